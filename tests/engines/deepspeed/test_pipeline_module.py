"""DeepSpeed's PipelineModule: a stage's run against DeepSpeed's own engine and schedule, and the plans of pipelines."""

from __future__ import annotations

import random
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.engines.deepspeed.scripts import rows_of
from tests.engines.test_contract import ledger_and_schedule_differ
from tests.workloads import flat_workload, with_flat
from zeroplan.core.buffers import Buffer
from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.parameters import Parameters
from zeroplan.core.pipeline import Stage, layer_stages, recomputed_groups, stage_parameters
from zeroplan.core.plan import MemoryPlan
from zeroplan.core.workload import Attention, DType, OptimizerKind, Precision, Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.ds_config.reader import read_ds_config
from zeroplan.engines.case import Case
from zeroplan.engines.deepspeed.job import rank_of
from zeroplan.engines.deepspeed.pipeline import record_stage, slots_of, train_schedule
from zeroplan.engines.pipeline_cut import cut
from zeroplan.engines.registry import find_engine
from zeroplan.ledger.line import evaluate
from zeroplan.models.load import load_model
from zeroplan.planner.estimate import estimate_report
from zeroplan.run.ask import Ask
from zeroplan.simulate.allocator.events import OP_BITS, AllocatorOp
from zeroplan.simulate.recorder import Recorder
from zeroplan.tape.expanded import ExpandedTape, Kind, Mark, Op
from zeroplan.tape.options import options_for
from zeroplan.tapes import can_trace, find_tape

MODEL = "meta-llama/Llama-3.1-8B"
NEEDS_DEEPSPEED = pytest.mark.skipif(not find_spec("deepspeed"), reason="needs DeepSpeed")
SMALL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "tie_word_embeddings": False,
    "max_position_embeddings": 128,
}
DEEP = SMALL | {"num_hidden_layers": 9}
#: Smallest allocations that are compared: in 16 bits products on a CPU take scratch of 50 KB.
LEAST = {"fp32": 40_000, "bf16": 200_000}


def real_case(
    name: str, stage: int, dtype: str, *, stages: int = 2, dp: int = 1, micro_batches: int = 4, **other: Any
) -> dict[str, Any]:
    """A case of run_pipeline_module.py."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 150_000, "overlap_comm": True},
        **other.pop("config", {}),
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    plain = {"model": SMALL, "batch": 2, "seq": 64, "partition": "parameters", "checkpointed": False}
    return plain | {"id": name, "stages": stages, "dp": dp, "dtype": dtype, "config": config} | other


REAL = [
    real_case("stage 0, fp32", 0, "fp32", partition="uniform"),
    real_case("stage 0, fp32, recomputed", 0, "fp32", checkpointed=True, config={"pipeline": {"use_reentrant": False}}),
    real_case("stage 0, fp32, two together", 0, "fp32", checkpointed=2, config={"pipeline": {"use_reentrant": False}}),
    real_case(
        "stage 1, fp32, three together", 1, "fp32", model=DEEP, checkpointed=3, config={"pipeline": {"use_reentrant": False}}
    ),
    real_case(
        "stage 1, fp32, two together, three stages",
        1,
        "fp32",
        stages=3,
        dp=2,
        model=DEEP,
        checkpointed=2,
        config={"pipeline": {"use_reentrant": False}},
    ),
    real_case("stage 1, fp32, three stages", 1, "fp32", stages=3, dp=2, micro_batches=7, partition="type:block"),
    real_case("stage 1, fp32, one micro batch", 1, "fp32", micro_batches=1),
    real_case("stage 1, bf16", 1, "bf16", dp=2, micro_batches=3),
    real_case("stage 1, bf16, fp32 sums", 1, "bf16", dp=2, config={"data_types": {"grad_accum_dtype": "fp32"}}),
    real_case("stage 0, bf16", 0, "bf16", dp=2),
    real_case("stage 0, fp32, tied", 0, "fp32", model=SMALL | {"tie_word_embeddings": True}),
    real_case("stage 1, fp32, tied", 1, "fp32", dp=2, stages=3, model=SMALL | {"tie_word_embeddings": True}),
]


def small_stage(case: dict[str, Any], number: int) -> Recorder:
    """Our record of one stage of a real case."""
    from zeroplan.trace.api import traced

    config = read_ds_config(case["config"])
    dtype = DType(case["dtype"])
    workload = flat_workload(
        micro_batch=case["batch"],
        seq_len=case["seq"],
        grad_accum=case["config"]["gradient_accumulation_steps"],
        dtype=dtype,
        precision=Precision.FP32 if dtype is DType.FP32 else Precision.MIXED,
        attn=Attention.EAGER,
        gradient_checkpointing=bool(case["checkpointed"]),
        checkpoint_interval=max(1, int(case["checkpointed"])),
        optimizer_kind=OptimizerKind.LOOP,
    )
    ranks = case["stages"] * case["dp"]
    layout = ParallelLayout(gpus=ranks, pp=case["stages"])
    zero = config.zero.but(overlap_comm=False)
    one = Case(
        load_model(case["model"]),
        workload,
        Cluster(gpus=ranks),
        zero,
        parallel=layout,
        pp_rank=number,
        partition=case["partition"],
    )
    options = replace(options_for(workload), grouped=find_engine("deepspeed").trace_options(one).grouped)
    tape = traced(case["model"], "AutoModelForCausalLM", options, case["batch"], case["seq"], None).expand(
        case["batch"], case["seq"]
    )
    return record_stage(replace(rank_of(one, tape.parameters), cublas_workspace=0), tape, steps=2)


def phases_of(recorder: Recorder, least: int) -> dict[str, list[int]]:
    """By phase, the bytes of allocations, and as negative numbers of frees."""
    found: dict[str, list[int]] = {}
    now: list[int] = []
    sizes: list[int] = []
    for code, value in zip(recorder.code, recorder.value, strict=True):
        op = code & ((1 << OP_BITS) - 1)
        if op == AllocatorOp.ALLOC:
            sizes.append(value)
            now.append(value)
        elif op == AllocatorOp.FREE:
            now.append(-sizes[value])
        elif op == AllocatorOp.MARK and (name := recorder.marks[value]) not in ("fwd", "bwd"):
            found[name] = [size for size in now if abs(size) >= least]
            now = []
    return found


def rise(sizes: list[int]) -> tuple[int, int]:
    """How far bytes rise above their beginning, and where they end."""
    now = most = 0
    for size in sizes:
        now += size
        most = max(most, now)
    return most, now


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.skipif(not find_spec("deepspeed") or not can_trace(), reason="needs DeepSpeed, torch and transformers")
def test_stages_need_what_deepspeeds_engine_allocates(tmp_path: Path, warm_python: Path) -> None:
    """Every stage's peak and what it leaves behind are those of the real PipelineEngine, step by step, to the byte."""
    rows = rows_of("run_pipeline_module.py", REAL, tmp_path, warm_python)
    for row, case in zip(rows, REAL, strict=True):
        parameters, least = load_model(case["model"]).parameters, LEAST[case["dtype"]]
        parts = [one.first + 1 for one in layer_stages(parameters, case["stages"], case["partition"])]
        assert [0, *parts[1:], case["model"]["num_hidden_layers"] + 3] == row["parts"], row["id"]
        for number, phases in enumerate(row["stages"]):
            ours = phases_of(small_stage(case, number), least)
            for name, sizes in phases[1:]:
                theirs = [size for size in sizes if abs(size) >= least]
                assert rise(ours[name]) == rise(theirs), f"{row['id']}, stage {number}, {name}"


@NEEDS_DEEPSPEED
@pytest.mark.torch
def test_instructions_are_those_of_deepspeeds_schedule() -> None:
    from deepspeed.runtime.pipe.schedule import TrainSchedule

    for stages in range(2, 6):
        for micro_batches in range(1, 9):
            for stage in range(stages):
                theirs = TrainSchedule(micro_batches=micro_batches, stages=stages, stage_id=stage)
                said = [(type(cmd).__name__, cmd.kwargs["buffer_id"]) for cmds in theirs for cmd in cmds if cmd.kwargs]
                ours = train_schedule(stages, stage, micro_batches)
                assert [(one.command.value, one.slot) for one in ours] == said
                assert slots_of(stages, stage, micro_batches) == theirs.num_pipe_buffers()


def layers_of(counts: list[int], words: int, hidden: int) -> Parameters:
    """A model of blocks with so many parameters, between an embedding and a head."""
    names = ["model.embed_tokens.weight", *(f"model.layers.{i}.weight" for i in range(len(counts)))]
    blocks = ("", *(f"model.layers.{i}" for i in range(len(counts))), "", "")
    shapes = ((words, hidden), *((count,) for count in counts), (hidden,), (words, hidden))
    trainable = (True,) * len(shapes)
    return replace(
        load_model(SMALL).parameters,
        names=(*names, "model.norm.weight", "lm_head.weight"),
        shapes=shapes,
        trainable=trainable,
        autocast=trainable,
        blocks=blocks,
        modules=tuple((i,) for i in range(len(shapes))),
    )


@NEEDS_DEEPSPEED
@pytest.mark.torch
def test_layers_are_divided_as_deepspeed_divides_them() -> None:
    from deepspeed.runtime.utils import partition_balanced, partition_uniform

    rng, divided = random.Random(0), 0
    for _ in range(60):
        counts = [rng.randrange(1, 60) for _ in range(rng.randrange(4, 24))]
        words, hidden, stages = rng.randrange(1, 200), rng.randrange(1, 4), rng.randrange(2, 6)
        weights = [words * hidden, *counts, hidden, words * hidden]
        theirs = {
            "parameters": partition_balanced(weights, stages),
            "type:decoder": partition_balanced([0, *[1] * len(counts), 0, 0], stages),
            "uniform": partition_uniform(len(weights), stages),
        }
        for method, parts in theirs.items():
            last = len(weights)
            if parts[-2] > last - 2 or len(set(parts)) <= stages:
                with pytest.raises(BadInput, match="stage"):
                    layer_stages(layers_of(counts, words, hidden), stages, method)
                continue
            ours = layer_stages(layers_of(counts, words, hidden), stages, method)
            assert [stage.first for stage in ours[1:]] == [min(int(part) - 1, len(counts)) for part in parts[1:-1]]
            assert (ours[0].first, ours[-1].end) == (0, len(counts))
            divided += 1
    assert divided > 60


WORK = Workload.of(micro_batch=1, seq_len=512, grad_accum=8)


@pytest.fixture(scope="module")
def tape() -> ExpandedTape:
    found = find_tape(load_model(MODEL), WORK)
    assert found is not None
    return found.expand(1, 512)


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16])
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("number", [0, 1, 3])
def test_what_the_ledger_keeps_the_schedule_leaves_alive(tape: ExpandedTape, number: int, stage: int, dtype: DType) -> None:
    layout = ParallelLayout(gpus=8, pp=4)
    case = Case(
        load_model(MODEL),
        with_flat(WORK, dtype=dtype),
        Cluster(gpus=8),
        ZeroConfig.of(stage),
        parallel=layout,
        pp_rank=number,
        partition="parameters",
    )
    engine = find_engine("deepspeed")
    assert not ledger_and_schedule_differ(case, engine, tape)
    told = {item.name: item.bytes for item in evaluate(*engine.ledger(case))}
    assert told.get("ipg_bucket", 0) == (2 * 2 * 500_000_000 if stage else 0)


def test_the_last_stage_keeps_logits_of_two_micro_batches(tape: ExpandedTape) -> None:
    layout, engine = ParallelLayout(gpus=2, pp=2), find_engine("deepspeed")
    case = Case(load_model(MODEL), WORK, Cluster(gpus=2), ZeroConfig.of(1), parallel=layout, pp_rank=1, partition="parameters")
    run = engine.simulate(case, tape).timeline
    assert run.alive_by_buffer()[Buffer.LOGITS] == 2 * 512 * 128256 * 2


@pytest.mark.torch
@pytest.mark.skipif(not can_trace(), reason="needs torch and transformers")
def test_an_mlp_as_wide_as_the_vocabulary_is_not_taken_for_logits() -> None:
    from zeroplan.trace.api import trace_model

    model = SMALL | {"intermediate_size": SMALL["vocab_size"], "tie_word_embeddings": False}
    work = flat_workload(micro_batch=2, seq_len=64, gradient_checkpointing=True)
    tape = trace_model(model, "AutoModelForCausalLM", options_for(work)).expand(2, 64)
    wide = {arg: module for op, arg, _, kind, module in tape.events() if op == Op.ALLOC and kind == Kind.LOGITS}
    assert {tape.modules[module].name for module in wide.values()} == {"lm_head"}
    first, second = layer_stages(tape.parameters, 2, "uniform")
    assert cut(tape, first, copies=True).logits < 0
    assert cut(tape, second, copies=True).logits in wide


def asked(**given: Any) -> Ask:
    plain = {"model": MODEL, "gpus": 4, "vram": "80G", "seq_len": 512, "grad_accum": 8, "depth": "formula", "stage": 1}
    return Ask(**plain | given)


def test_the_plan_is_of_the_stage_that_needs_the_most() -> None:
    (plan,) = estimate_report(asked(pp=4, depth="simulated")).plans
    assert plan.stages is not None
    needed = [one.total or 0 for one in plan.stages]
    assert (needed, plan.gpu.total) == (sorted(needed, reverse=True), needed[0])
    assert sorted(block for one in plan.stages for block in one.blocks) == [(0, 7), (7, 16), (16, 25), (25, 32)]
    (other,) = estimate_report(asked(pp=4, partition="type:decoder")).plans
    assert other.stages is not None
    assert sorted(block for one in other.stages for block in one.blocks) == [(0, 8), (8, 16), (16, 24), (24, 32)]


def test_a_tied_head_is_on_both_ends_of_the_pipeline() -> None:
    """The embedding's 128,256 × 2,048 weights count once in the model and twice in the stages."""
    spec = load_model("meta-llama/Llama-3.2-1B")
    stages = layer_stages(spec.parameters, 4, "parameters")
    parts = [stage_parameters(spec.parameters, [stage]) for stage in stages]
    assert sum(part.total for part in parts) == spec.parameters.total + 128_256 * 2048
    assert [part.names[0] for part in (parts[0], parts[-1])] == ["model.embed_tokens.weight"] * 2
    for part in parts:
        assert sorted(p for owned in part.modules for p in owned) == list(range(len(part)))
    assert len(estimate_report(asked(pp=4, model="meta-llama/Llama-3.2-1B")).plans[0].stages or ()) == 4


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"pp": 2, "stage": 2}, "ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism"),
        ({"pp": 2, "stage": 3}, "ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism"),
        ({"pp": 2, "offload_optimizer": "cpu"}, "offload is not modelled on stages of a PipelineModule"),
        ({"pp": 2, "tp": 2}, "PipelineModule is modelled beside data parallelism alone"),
        ({"pp": 2, "vpp": 2}, "PipelineModule runs 1f1b with one chunk a rank"),
        ({"pp": 2, "schedule": "gpipe"}, "PipelineModule runs 1f1b with one chunk a rank"),
        ({"pp": 2, "partition": "best"}, "unknown way to partition 'best'"),
        ({"pp": 2, "partition": "uniform:2"}, "unknown way to partition 'uniform:2'"),
        ({"pp": 2, "partition": "type:["}, "'\\[' is no pattern"),
        ({"pp": 2, "partition": "type:"}, "'' counts Embedding as well"),
        ({"pp": 2, "partition": "type:linear"}, "'linear' counts Linear as well"),
        ({"partition": "uniform"}, "layers are divided by a method on stages of DeepSpeed's PipelineModule"),
        ({"pp": 2, "partition": "uniform", "engine": "fsdp2", "stage": 2}, "layers are divided by a method"),
        ({"pp": 32, "gpus": 32, "partition": "uniform"}, "part the final norm from the head"),
    ],
)
def test_what_deepspeed_or_the_plan_does_not_do(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        estimate_report(asked(**given))


def test_layers_that_are_recomputed_together() -> None:
    """Groups begin with each stage's first layer; those with the embedding, the norm or the head are not recomputed."""
    stages = [Stage(0, 4, 0, 5), Stage(1, 4, 5, 11), Stage(2, 4, 11, 17), Stage(3, 4, 17, 21)]
    assert [recomputed_groups(one, 2) for one in stages] == [(2, 1, 5), (2, 5, 11), (2, 11, 17), (2, 17, 21)]
    assert [recomputed_groups(one, 4) for one in stages] == [(4, 3, 5), (4, 5, 11), (4, 11, 17), (4, 17, 21)]
    assert [recomputed_groups(one, 9) for one in stages] == [(9, 5, 5), (9, 5, 11), (9, 11, 17), (9, 17, 17)]


@pytest.mark.torch
@pytest.mark.skipif(not can_trace(), reason="needs torch and transformers")
def test_groups_keep_fewer_inputs_and_more_within() -> None:
    """At the forward's end, three groups of two blocks keep three inputs, where six blocks keep six."""
    from zeroplan.trace.api import traced

    model = SMALL | {"num_hidden_layers": 6}
    options = options_for(flat_workload(micro_batch=2, seq_len=64, gradient_checkpointing=True))

    def kept(grouped: tuple[int, int, int] | None) -> int:
        tape = traced(model, "AutoModelForCausalLM", replace(options, grouped=grouped), 2, 64, None).expand(2, 64)
        alive: dict[int, int] = {}
        for op, arg, aux, _, _ in tape.events():
            if op == Op.ALLOC:
                alive[arg] = aux
            elif op == Op.FREE:
                alive.pop(arg)
            elif op == Op.MARK and arg == Mark.FORWARD_END:
                break
        return sum(alive.values())

    assert kept(None) - kept((2, 0, 6)) == 3 * 2 * 64 * 128 * 2
    assert kept((2, 0, 0)) > kept((2, 0, 4)) > kept((2, 0, 6))


def test_a_file_counts_data_parallel_ranks_and_asks_for_recomputation() -> None:
    """``train_batch_size`` is micro batch × accumulation × the ranks that read different samples: here 1 × 8 × 2."""
    config: dict[str, Any] = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "pipeline": {"activation_checkpoint_interval": 1},
    }
    request = asked(pp=2, ds_config=config).replace(stage=None, grad_accum=None)
    report = estimate_report(request)

    def left_out(plan: MemoryPlan) -> list[str]:
        return [one.key for one in plan.unmodelled if one.key.startswith("pipeline")]

    assert (report.workload["grad_accum"], report.workload["gradient_checkpointing"]) == (8, True)
    assert not left_out(report.plans[0])
    config["pipeline"] = {"activation_checkpoint_interval": 2}
    report = estimate_report(request.replace(ds_config=config))
    assert (report.workload["checkpoint_interval"], left_out(report.plans[0])) == (2, [])
    (plan,) = estimate_report(request.replace(ds_config=config | {"train_batch_size": 32}, pp=1)).plans
    assert left_out(plan) == ["pipeline"]
