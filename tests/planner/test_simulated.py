"""What a simulated plan makes of a run: phases, ranks, skipped steps, checkpoints. On a model small enough to count by hand."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest

import zeroplan
from tests.workloads import flat_workload
from zeroplan.core.buffers import Phase
from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.plan import MemoryPlan
from zeroplan.core.sizes import MIB
from zeroplan.core.workload import Attention, DType, OptimizerKind, Precision, Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.case import Case
from zeroplan.engines.deepspeed.engine import DeepSpeed
from zeroplan.engines.registry import find_engine
from zeroplan.models.spec import ModelSpec, SpecUnit, Tensor
from zeroplan.planner.estimate import estimate_report
from zeroplan.planner.formula import formula_plan
from zeroplan.planner.simulated import Simulated, simulated_plan
from zeroplan.planner.tapes import MOST_LAYERS
from zeroplan.run.ask import Ask
from zeroplan.tape.expanded import ExpandedTape, Kind, Mark, Op, TapeModule, TapeParam

#: Elements of each layer's weight; the second is the largest.
SHAPES = ((1024, 4096), (2048, 8192), (1024, 2048), (1024, 4096))
PARAMS = sum(math.prod(shape) for shape in SHAPES)
SAVED = 48 * MIB  # activation of a layer


def _stream(width: int, saved: int, frozen: int) -> ExpandedTape:
    params = tuple(TapeParam(f"layers.{i}.weight", shape, i != frozen, width) for i, shape in enumerate(SHAPES))
    modules = (TapeModule("", "Net", -1, ()), *(TapeModule(f"layers.{i}", "Linear", 0, (i,)) for i in range(len(SHAPES))))
    stream = ExpandedTape(modules, params)

    def add(op: Op, arg: int, aux: int = 0, kind: Kind = Kind.SAVED, module: int = -1) -> None:
        for column, value in zip(
            (stream.op, stream.arg, stream.aux, stream.kind, stream.module), (op, arg, aux, kind, module), strict=True
        ):
            column.append(value)

    add(Op.MARK, Mark.FORWARD_BEGIN)
    add(Op.ENTER, 0)
    for i in range(len(SHAPES)):
        add(Op.ENTER, i + 1)
        add(Op.ALLOC, i, saved, Kind.SAVED, i + 1)
        add(Op.EXIT, i + 1)
    add(Op.EXIT, 0)
    add(Op.MARK, Mark.FORWARD_END)
    add(Op.MARK, Mark.BACKWARD_BEGIN)
    add(Op.BWD_ENTER, 0)
    for i in reversed(range(len(SHAPES))):
        add(Op.BWD_ENTER, i + 1)
        if i != frozen:
            add(Op.ALLOC, len(SHAPES) + i, width * math.prod(SHAPES[i]), Kind.GRAD, i + 1)
        add(Op.FREE, i)
        if i != frozen:
            add(Op.GRAD, i, len(SHAPES) + i)
        add(Op.BWD_EXIT, i + 1)
    add(Op.BWD_EXIT, 0)
    add(Op.MARK, Mark.BACKWARD_END)
    return stream


def _simulated(
    stage: int,
    *,
    gpus: int = 2,
    work: dict[str, Any] | None = None,
    saved: int = SAVED,
    frozen: int = -1,
    **knobs: Any,
) -> Simulated:
    """The layer `frozen` gets no gradient; `saved` are the bytes of each layer's activation."""
    workload = flat_workload(seq_len=8, **(work or {}))
    spec = ModelSpec(
        "net", (SpecUnit("", tuple(Tensor(f"layers.{i}.weight", s, i != frozen) for i, s in enumerate(SHAPES))),), "test"
    )
    case = Case(spec, workload, Cluster(gpus=gpus), ZeroConfig.of(stage, reduce_bucket_size=1 << 20, **knobs))
    return simulated_plan(
        formula_plan(DeepSpeed(), case), DeepSpeed(), case, _stream(workload.numerics.param_bytes, saved, frozen)
    )


def _plan(stage: int, **more: Any) -> MemoryPlan:
    return _simulated(stage, **more).plan


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_accumulation_shows_every_phase(stage: int) -> None:
    """With four micro batches the most is held where the activations are, as with one."""
    one, four = _plan(stage).gpu, _plan(stage, work={"grad_accum": 4}).gpu
    assert set(one.phases) == set(four.phases) == {"load", "init", "forward", "backward", "step", "save", "resume"}
    for gpu in (one, four):
        trained = {phase: gpu.phases[phase] for phase in ("load", "init", "forward", "backward", "step")}
        assert gpu.peak_phase is not None
        assert trained[gpu.peak_phase] == max(trained.values()) == gpu.peak_allocated
    assert four.phases["step"] == one.phases["step"]
    assert four.phases["forward"] >= one.phases["forward"] >= len(SHAPES) * SAVED
    if stage < 2:  # a later forward runs beside the whole gradients of those before it
        assert four.phases["forward"] - one.phases["forward"] >= 2 * PARAMS


@pytest.mark.parametrize("stage", [1, 2])
def test_allocated_and_reserved_are_each_the_most_of_any_rank(stage: int) -> None:
    run = _simulated(stage, gpus=4, saved=MIB)
    timelines = [run.simulation.timeline, *run.simulation.others]
    assert len(timelines) == 4
    allocated = [timeline.peak_allocated for timeline in timelines]
    assert min(allocated) < max(allocated)  # ranks own different parameters
    assert run.plan.gpu.peak_allocated == max(allocated) == timelines[0].peak_allocated
    assert run.plan.gpu.peak_reserved == max(timeline.peak_reserved for timeline in timelines)


def test_fp16_is_planned_with_and_without_a_skipped_step() -> None:
    run = _simulated(2, gpus=1, work={"dtype": DType.FP16})
    usual, other = run.simulation.timeline, *run.simulation.others
    first_applied = [mark.allocated for mark in usual.marks if mark.name.startswith("step")]
    assert first_applied[0] < first_applied[1]  # states appear at the second step
    assert other.marks[-1].allocated == usual.marks[-1].allocated
    reserved = (usual.peak_reserved, other.peak_reserved)
    assert run.plan.gpu.peak_reserved == max(reserved)
    assert run.simulation.least_reserved == min(reserved)
    assert _simulated(2, gpus=1).simulation.least_reserved is None


def _part(ranks: int) -> int:
    return PARAMS // ranks  # every shape divides


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_checkpoint_needs_room_for_states_on_the_gpu_and_for_one_storage_on_the_host(stage: int) -> None:
    run = _simulated(stage)
    gpu, cpu = run.plan.gpu, run.plan.cpu
    after_init = run.simulation.held_after(Phase.INIT)
    assert after_init is not None
    assert gpu.phases["save"] == gpu.live_after_step
    assert gpu.phases["resume"] == after_init + 8 * _part(2)
    rss = DeepSpeed().host_rss(Workload(), ZeroConfig.of(stage), rotary=False)
    assert cpu.phases["save"] == 2 * (rss[Phase.STEP] + 4 * _part(2))
    own, model = 12 * _part(2), 2 * PARAMS if stage < 3 else 0
    assert cpu.phases["resume"] == 2 * (rss[Phase.INIT] + max(own, model))
    assert cpu.per_node == max(cpu.phases[phase.value] for phase in rss)


def test_gathering_the_model_to_save_it_takes_its_largest_module_and_the_first_rank_s_host() -> None:
    plain, gathered = _plan(3, gpus=8), _plan(3, gpus=8, gather_16bit_weights_on_model_save=True)
    assert gathered.gpu.phases["save"] - plain.gpu.phases["save"] == 2 * 2048 * 8192
    assert gathered.cpu.phases["save"] - plain.cpu.phases["save"] == 2 * PARAMS - 4 * _part(8)


def test_offloaded_states_are_saved_from_where_they_are() -> None:
    plan = _plan(2, offload_optimizer="cpu")
    pinned_and_states = plan.cpu.phases["step"]
    model = 2 * PARAMS  # the first rank writes the flat group's one storage
    assert plan.cpu.phases["save"] == pinned_and_states + model
    assert plan.gpu.phases["save"] == plan.gpu.live_after_step


@pytest.mark.parametrize(("stage", "copied"), [(1, 0), (2, 2048 * 8192), (3, 2048 * 8192 // 2)])
def test_frozen_parameters_are_copied_where_gradients_are_partitioned(stage: int, copied: int) -> None:
    run = _simulated(stage, frozen=1)
    rss = DeepSpeed().host_rss(Workload(), ZeroConfig.of(stage), rotary=False)
    trained = PARAMS - 2048 * 8192
    master, own, model = 4 * trained // 2, 12 * trained // 2, 2 * PARAMS if stage < 3 else 0
    every = max(master, 2 * copied)
    largest = 2 * max(trained, 2048 * 8192) if stage < 3 else 0
    first = max(0, 2 * copied + largest - every)
    assert run.plan.cpu.phases["save"] == 2 * (rss[Phase.STEP] + every) + first
    assert run.plan.cpu.phases["resume"] == 2 * (rss[Phase.INIT] + 2 * copied + max(own, model))


def test_fp32_at_stage_0_has_no_masters_to_load() -> None:
    fp32 = {"dtype": DType.FP32, "precision": Precision.FP32}
    run = _simulated(0, work=fp32)
    whole = 4 * PARAMS
    assert run.plan.cpu.phases["resume"] == 2 * (
        DeepSpeed().host_rss(flat_workload(**fp32), ZeroConfig.of(0), rotary=False)[Phase.INIT] + 3 * whole
    )


def test_host_rss_of_the_process_on_measured_runs(measured_rows: list[dict[str, Any]]) -> None:
    """At the end of the last step of runs that offload nothing, where the engine holds no host memory."""
    errors = {}
    for row in measured_rows:
        if not row["ok"] or "offload" in str(row["zero_overrides"]):
            continue
        lists = bool((row.get("opt_params") or {}).get("torch_adam"))
        workload = flat_workload(
            dtype=DType(row["dtype"]),
            attn=Attention(row["attn"] or "sdpa"),
            lora_rank=row["lora_rank"],
            optimizer_kind=OptimizerKind.FOREACH if lists else OptimizerKind.FUSED,
        )
        known = find_engine(row["engine"]).host_rss(workload, ZeroConfig.of(row["stage"]))[Phase.STEP]
        errors[row["id"]] = abs(known / row["marks"][-1]["host_VmRSS"] - 1)
    assert len(errors) >= 30
    assert statistics.median(errors.values()) <= 0.01
    assert max(errors.values()) <= 0.08, errors


def test_a_model_of_more_layers_than_are_simulated_is_refused_before_any_work() -> None:
    deep = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": MOST_LAYERS + 1, "num_attention_heads": 4}
    deep |= {"intermediate_size": 128, "vocab_size": 100}
    with pytest.raises(BadInput, match=r"513 layers; at most 512 are simulated; use --depth formula"):
        estimate_report(Ask(model=deep, stage=3))
    report = estimate_report(Ask(model=deep, stage=3, depth="formula", vram="80G"))
    assert report.plans[0].fits is None


def test_what_no_amd_card_has_measured_leaves_the_verdict_open() -> None:
    def plan(gpu: str) -> MemoryPlan:
        return zeroplan.estimate("openai-community/gpt2", engine="ddp", gpu=gpu, seq_len=512)[0]

    amd, nvidia = plan("MI300X"), plan("H200")
    assert nvidia.fits is True
    assert amd.fits is None
    assert "measured on no AMD card" in amd.unmodelled[0].says
    assert amd.settle == "measure a few steps of the program itself"
