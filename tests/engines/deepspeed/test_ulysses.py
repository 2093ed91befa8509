"""DeepSpeed's Ulysses: our rank against DeepSpeed's own class, event by event, and the plans of its stages."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.engines.deepspeed.beside_deepspeed import assert_same_events
from tests.engines.deepspeed.test_auto_tp import CONFIG, QWEN2, QWEN3
from tests.engines.test_contract import ledger_and_schedule_differ
from zeroplan.core.buffers import Buffer
from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.workload import DType, Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.ds_config.reader import read_ds_config
from zeroplan.engines.case import Case
from zeroplan.engines.registry import find_engine
from zeroplan.interop.readers import read_setup
from zeroplan.models.load import load_model
from zeroplan.planner.estimate import estimate_report
from zeroplan.planner.fit import left_out
from zeroplan.planner.merge import with_files
from zeroplan.planner.resolve import resolve
from zeroplan.run.ask import Ask
from zeroplan.simulate.allocator.events import AllocatorOp
from zeroplan.simulate.timeline import _OP_MASK
from zeroplan.tape.expanded import Kind, Op
from zeroplan.tape.options import options_for
from zeroplan.tapes import can_trace

_SUM = Buffer.COMM_ALL_REDUCE
PLAIN: dict[str, Any] = {"config": CONFIG, "ranks": 2, "batch": 2, "checkpointing": "none", "zero3": False, "lora": False}
CASES = [
    PLAIN | {"id": "llama"},
    PLAIN | {"id": "llama, one sample, stage 3", "ranks": 4, "batch": 1, "zero3": True},
    PLAIN | {"id": "qwen2, recomputed", "config": QWEN2, "batch": 3, "checkpointing": "ckpt"},
    PLAIN | {"id": "qwen3, repeated KV heads", "config": QWEN3, "ranks": 8},
    PLAIN | {"id": "llama, adapters, recomputed", "batch": 1, "checkpointing": "ckpt", "lora": True},
]


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.skipif(not find_spec("deepspeed") or not can_trace(), reason="needs DeepSpeed, torch and transformers")
def test_our_rank_allocates_what_deepspeeds_class_does(tmp_path: Path, warm_python: Path) -> None:
    """The same events, storages and parameters, in the same order."""
    assert_same_events("run_ulysses.py", CASES, tmp_path, warm_python)


def tape_and_case(stage: int, layout: ParallelLayout) -> tuple[Any, Case]:
    from zeroplan.trace.api import trace_model

    workload = Workload.of(micro_batch=2, seq_len=64)
    options = options_for(workload, layout=layout, zero3=stage == 3)
    tape = trace_model(CONFIG, "AutoModelForCausalLM", options).expand(2, 64 // layout.ulysses)
    case = Case(load_model(CONFIG), workload, Cluster(gpus=8), ZeroConfig.of(stage), parallel=layout)
    return tape, case


@pytest.mark.slow
@pytest.mark.skipif(not can_trace(), reason="tracing needs torch and transformers")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ledger_and_schedule_agree_on_a_rank(stage: int) -> None:
    tape, case = tape_and_case(stage, ParallelLayout(gpus=8, ulysses=4))
    assert tape.parameters.shapes == case.parameters.shapes == load_model(CONFIG).parameters.shapes
    assert ledger_and_schedule_differ(case, find_engine("deepspeed"), tape) == {}


@pytest.mark.slow
@pytest.mark.skipif(not can_trace(), reason="tracing needs torch and transformers")
def test_what_is_received_is_communication() -> None:
    """Of each of q, k, v and the result, whose gradients come back: 2 · (8 + 4 + 4 + 8) heads of 32 over 32 tokens of 2."""
    tape, _ = tape_and_case(0, ParallelLayout(gpus=8, ulysses=2))
    received = [tape.storage_bytes[arg] for op, arg, _, kind, _ in tape.events() if op == Op.ALLOC and kind == Kind.COMM]
    states = 2 * 2 * (8 + 4 + 4 + 8) * 32 * 32 * 2
    positions = 2 * 2 * 2 * 32 * 8  # every rank's, and NCCL's flat buffer
    assert sum(received) == 4 * (states + positions)


@pytest.mark.slow
@pytest.mark.skipif(not can_trace(), reason="tracing needs torch and transformers")
def test_stage_2_reduces_in_fp32() -> None:
    """The sums of stages 1 and 2 are in fp32 where ranks share samples; plain data parallelism's are the model's bf16."""
    made = []
    for ulysses in (1, 2):
        tape, case = tape_and_case(2, ParallelLayout(gpus=8, ulysses=ulysses))
        code, value, labels = find_engine("deepspeed").simulate(case, tape).timeline.recorded
        sizes = [size for op, size in zip(code, value, strict=True) if op & _OP_MASK == AllocatorOp.ALLOC]
        sums = [size for size, label in zip(sizes, labels.labels_of(range(len(sizes))), strict=True) if label[0] is _SUM]
        made.append(set(sums))
    count = load_model(CONFIG).parameters.total
    assert made == [{2 * count}, {2 * count, 4 * count}]


def asked(**given: Any) -> Ask:
    plain = {"model": CONFIG, "gpus": 8, "depth": "formula", "seq_len": 64, "vram": "80G"}
    return Ask(**plain | given)


def test_states_are_sharded_over_all_ranks() -> None:
    (shared,) = estimate_report(asked(ulysses=4, stage=3, offload_optimizer="none")).plans
    (plain,) = estimate_report(asked(stage=3, offload_optimizer="none")).plans
    assert shared.gpu.model_states == plain.gpu.model_states
    report = estimate_report(asked(ulysses=4))
    assert {one.stage for one in report.plans} == {0, 1, 2, 3}
    assert (report.cluster["layout"]["dp"], report.cluster["layout"]["ulysses"]) == (2, 4)
    assert not any("not measured" in said for said in report.warnings)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ulysses": 3}, "ulysses 3 does not divide 1 × 8 = 8 ranks"),
        ({"ulysses": 3, "gpus": 6}, "ulysses 3 does not divide the 8 attention heads"),
        (
            {"ulysses": 8, "model": CONFIG | {"hidden_size": 384, "num_attention_heads": 24, "num_key_value_heads": 3}},
            "neither of ulysses 8 and the 3 KV heads divides the other",
        ),
        ({"ulysses": 8, "seq_len": 60}, "ulysses 8 does not divide the 60 tokens of a sample"),
        ({"ulysses": 2, "attn": "eager"}, "drops masks, which eager attention needs"),
        ({"ulysses": 2, "pairs": True}, "pairs of samples and references are not modelled with Ulysses"),
        ({"ulysses": 2, "tp": 2}, "beside data parallelism alone"),
        ({"ulysses": 2, "lengths": "50,64"}, "different lengths are not modelled with --ulysses"),
        ({"ulysses": 2, "engine": "fsdp2"}, "and no ulysses"),
        ({"ulysses": 2, "model": CONFIG | {"model_type": "gpt_neox"}}, "Ulysses of gpt_neox is not modelled"),
    ],
)
def test_what_is_not_modelled_is_one_line(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        estimate_report(asked(**given))


def ds_config(**keys: Any) -> dict[str, Any]:
    stage = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}
    return {"train_micro_batch_size_per_gpu": 1, **stage, **keys}


def test_a_ds_config_says_the_degree() -> None:
    """A global batch counts each group of ranks once."""
    config = ds_config(sequence_parallel_size=4, data_parallel_size=2, train_batch_size=2)
    report = estimate_report(asked(ds_config=config))
    assert report.cluster["layout"]["ulysses"] == 4
    assert not [one for one in report.plans[0].unmodelled if "parallel_size" in one.key]
    assert estimate_report(asked(ds_config=ds_config(train_batch_size=2), ulysses=4)).workload["grad_accum"] == 1
    with pytest.raises(BadInput, match=r"sequence_parallel_size 3 does not divide the 8 ranks"):
        estimate_report(asked(ds_config=ds_config(sequence_parallel_size=3)))
    with pytest.raises(BadInput, match=r"sequence_parallel_size 4 needs that many ranks"):
        estimate_report(asked(gpus=1, ds_config=ds_config(sequence_parallel_size=4)))
    with pytest.raises(BadInput, match=r"says 4 .*the flag 2"):
        estimate_report(asked(ulysses=2, ds_config=ds_config(sequence_parallel_size=4)))


def test_auto_ep_divides_ranks_and_experts() -> None:
    """A file's AutoEP gives the layout its degree; tests/engines/deepspeed/test_auto_ep.py has the rest."""
    mixture = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 6}
    given = {"model": CONFIG | mixture, "gpus": 12}

    def config(size: int) -> dict[str, Any]:
        return ds_config(expert_parallel={"enabled": True, "autoep_size": size})

    with pytest.raises(BadInput, match="autoep_size 5 does not divide the 12 ranks"):
        estimate_report(asked(**given, ds_config=config(5)))
    with pytest.raises(BadInput, match="autoep_size 4 does not divide the 6 experts of a layer"):
        estimate_report(asked(**given, ds_config=config(4)))
    assert estimate_report(asked(**given, ds_config=config(3))).cluster["layout"]["ep"] == 3


def test_gradients_travel_in_a_dtype_of_their_own_key() -> None:
    """It takes the place of communication_data_type, which DeepSpeed overwrites; a null follows the model, silence is fp32."""
    keys = ({"seq_parallel_communication_data_type": None}, {})
    read = [read_ds_config(key).zero.step.seq_parallel_communication_data_type for key in keys]
    assert read == [None, DType.FP32]
    engine, layout = find_engine("deepspeed"), ParallelLayout(gpus=8, ulysses=2)
    for key, width in ((None, 2), (DType.FP32, 4)):
        zero = ZeroConfig.of(stage=3, communication_data_type=DType.FP16, seq_parallel_communication_data_type=key)
        workload = Workload.of(seq_len=64)
        for parallel, expected in ((layout, width), (None, 2)):
            rank = engine.ledger(Case(load_model(CONFIG), workload, Cluster(gpus=8), zero, parallel=parallel))[1]
            assert rank.comm_bytes == expected


def test_an_evaluation_of_whole_samples_leaves_the_answer_open() -> None:
    """accelerate runs it without the exchange, so that a rank has all tokens of its samples."""
    for ulysses, left in ((2, True), (1, False)):
        request = asked(ulysses=ulysses, stage=2, offload_optimizer="none", eval_batch=1)
        (case,) = resolve(request).cases
        assert ("evaluation" in [one.key for one in left_out(find_engine("deepspeed"), case)]) == left


def test_trls_own_head_leaves_the_answer_open() -> None:
    (plan,) = estimate_report(asked(ulysses=2, stage=2, offload_optimizer="none", chunked_head=True)).plans
    assert (plan.fits, "loss" in [one.key for one in plan.unmodelled]) == (None, True)


def test_another_version_leaves_the_answer_open() -> None:
    (plan,) = estimate_report(asked(ulysses=2, stage=2, offload_optimizer="none", deepspeed_version="0.18.0")).plans
    assert "--ulysses" in [one.key for one in plan.unmodelled]


def test_accelerates_file_says_the_degree() -> None:
    """TRL's own example, ``alst_ulysses_4gpu.yaml``; the attention has to be the model's."""
    sizes = {"parallelism_config_dp_shard_size": 2, "parallelism_config_sp_size": 2}
    attention = {"parallelism_config_sp_attn_implementation": "flash_attention_2"}
    config = {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"zero_stage": 3, "zero3_init_flag": True},
        "num_processes": 4,
        "mixed_precision": "bf16",
        "parallelism_config": sizes | attention,
    }
    request, setup = with_files(asked(gpus=None, files=[config], micro_batch=1))
    assert (request.ulysses, request.gpus, request.attn, request.engine) == (2, 4, "flash", "deepspeed")
    assert setup.key("ulysses") not in [one.key for one in request.unmodelled]
    both = {"parallelism_config": sizes | {"parallelism_config_cp_size": 2}}
    with pytest.raises(BadInput, match="sp_size 2 and cp_size 2 exclude each other"):
        read_setup(config | both)


def test_a_search_plans_data_parallelism_and_says_so() -> None:
    """What shares samples or matrices stands among what the row of the file leaves out."""
    from zeroplan.search.candidates_file import candidate_of
    from zeroplan.search.search_options import SearchOptions, resolve_search

    request = Ask(model=CONFIG, gpus=8, gpu="H100", seq_len=64)
    resolved = resolve_search(request, SearchOptions())
    for key, more in (("tensor_parallel", {"autotp_size": 2}), ("sequence_parallel_size", 2)):
        candidate = candidate_of(ds_config(**{key: more}), resolved, request, False)
        assert [one.key for one in candidate.unmodelled] == [key]
    assert not candidate_of(ds_config(), resolved, request, False).unmodelled
