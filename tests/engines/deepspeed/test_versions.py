"""DeepSpeed's versions: each knob changes what is allocated as its source says, at its version and not before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from llama_tape import llama_tape

from zeroplan.core.buffers import Buffer, Phase, Place
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.unmodelled import Effect
from zeroplan.core.versions import Version, parse_version
from zeroplan.core.workload import DType, OptimizerKind, Precision, Workload
from zeroplan.core.zero_config import NEWEST_DEEPSPEED, OffloadDevice, OffloadOptimizer, ZeroConfig
from zeroplan.engines.deepspeed.lines import LEDGER
from zeroplan.engines.deepspeed.rank import DeepSpeedRank, deepspeed_rank
from zeroplan.engines.deepspeed.schedule import record_deepspeed
from zeroplan.engines.deepspeed.schedule_host import record_host
from zeroplan.engines.deepspeed.versions import (
    OLDEST,
    Knob,
    as_wrapped,
    planned_as,
    unmodelled_by_version,
    version_remark,
)
from zeroplan.simulate.allocator.events import OP_BITS, AllocatorOp
from zeroplan.simulate.recorder import simulate
from zeroplan.tape.expanded import ExpandedTape

TAPE = llama_tape(2)
RANKS = 4
FP32 = {"grad_accum_dtype": DType.FP32}
CPU = {"offload_optimizer": "cpu"}
BF16 = Workload()
FP16 = Workload.of(dtype=DType.FP16)
FULL = Workload.of(dtype=DType.FP32, precision=Precision.FP32)


def rank_at(
    version: Version, stage: int, workload: Workload = BF16, *, ranks: int = RANKS, zero_init: bool = True, **knobs: Any
) -> DeepSpeedRank:
    """A rank of a run at a version, as the engine makes it."""
    zero = replace(ZeroConfig.of(stage, **knobs), deepspeed=version)
    wrapped = as_wrapped(zero, workload, zero_init=zero_init)
    return deepspeed_rank(TAPE.parameters, workload, wrapped, ParallelLayout(ranks), zero_init=zero_init)


def allocated(rank: DeepSpeedRank, tape: ExpandedTape = TAPE) -> dict[str, list[int]]:
    """The sizes of what each phase of two steps allocates, in order; a phase by its mark and number."""
    recorder = record_deepspeed(rank, tape, steps=2)
    phases: dict[str, list[int]] = {}
    sizes: list[int] = []
    for code, value in zip(recorder.code, recorder.value, strict=True):
        op = code & ((1 << OP_BITS) - 1)
        if op == AllocatorOp.ALLOC:
            sizes.append(value)
        elif op == AllocatorOp.MARK:
            name = recorder.marks[value]
            phases[name if name not in phases else f"{name}{len(phases)}"] = sizes
            sizes = []
    return phases


def after_init(rank: DeepSpeedRank) -> int:
    """Bytes on the GPU when initialisation ends."""
    return next(mark.allocated for mark in simulate(record_deepspeed(rank, TAPE, steps=1)).marks if mark.name == "init")


def held_in_second_forward(rank: DeepSpeedRank) -> int:
    """Bytes on the GPU when the second step's forward ends, without the bucket."""
    marks = [mark for mark in simulate(record_deepspeed(rank, TAPE, steps=2)).marks if mark.name == "fwd"]
    return marks[-1].allocated


def line(rank: DeepSpeedRank, buffer: Buffer, place: Place) -> int:
    """The ledger's bytes of a buffer in a memory."""
    return sum(one.fn(rank) for one in LEDGER if one.buffer is buffer and one.place_of(rank) is place)


def host_phase(rank: DeepSpeedRank, phase: Phase) -> tuple[int, int, int]:
    """Bytes pageable, pinned and at the peak by the end of a phase on the host."""
    mark = next(one for one in record_host(rank).marks if one.phase is phase)
    return mark.pageable, mark.pinned, mark.peak


def _around(knob: Knob) -> tuple[Version, Version]:
    """The version just before the knob's, and its own."""
    major, minor, patch = knob.value.since
    return (major, minor, patch - 1) if patch else (major, minor - 1, 99), knob.value.since


Found = Callable[[Version], Any]


def differs(knob: Knob, found: Found) -> tuple[Any, Any]:
    """What `found` gives at both sides of the knob's version, which must differ."""
    before, after = (found(version) for version in _around(knob))
    assert before != after
    return before, after


TOTAL = sum(TAPE.parameters.numel)
LARGEST = max(TAPE.parameters.numel)
PART = TOTAL // RANKS


def test_only_fp16_looks_for_overflow() -> None:
    """Stage 3 looks at the whole flat gradient; stages 1 and 2 at a gradient after the other."""
    before, after = differs(Knob.OVERFLOW_FP16_ONLY, lambda v: allocated(rank_at(v, 3))["step1"].count(PART))
    assert (before, after) == (2, 0)  # masks of isinf and isnan, a byte an element
    before, after = differs(Knob.OVERFLOW_FP16_ONLY, lambda v: len(allocated(rank_at(v, 2))["step1"]))
    assert before > after


def test_slices_are_reduced_where_they_lie() -> None:
    """One rank's stage 1 flattens the slices of a bucket and casts them; earlier it casts the bucket."""
    knob = Knob.REDUCED_IN_COPIES
    bucket = 4 * 500_000_000
    comm = {"communication_data_type": DType.FP32}
    before, after = differs(knob, lambda v: max(allocated(rank_at(v, 2, **comm))["bwd"]))
    assert (before, after) == (bucket, max(2 * 500_000_000, after))
    assert len(allocated(rank_at(_around(knob)[0], 2))["bwd"]) < len(allocated(rank_at(_around(knob)[1], 2))["bwd"])


def test_stage_1_has_buckets() -> None:
    assert differs(Knob.STAGE1_BUCKETS, lambda v: line(rank_at(v, 1), Buffer.COMM_BUCKET, Place.HBM)) == (0, 1_000_000_000)
    overlapped = {"overlap_comm": True}
    after = [line(rank_at(v, 1, **overlapped), Buffer.COMM_BUCKET, Place.HBM) for v in _around(Knob.STAGE1_BUCKETS)]
    assert after == [0, 2_000_000_000]


def test_overflow_takes_masks() -> None:
    """One fp16 gradient after the other: its fp32 copy alone, then copy, masks, magnitudes and sum."""
    whole = rank_at(NEWEST_DEEPSPEED, 2, FP16, ranks=1).numel[0]
    before, after = differs(Knob.OVERFLOW_ON_DEVICE, lambda v: allocated(rank_at(v, 2, FP16, ranks=1))["step1"])
    assert before.count(4 * whole) + 2 == after.count(4 * whole)
    assert (before.count(whole), after.count(whole)) == (0, 3)


@pytest.mark.parametrize(("stage", "knobs"), [(1, {}), (1, FP32), (2, {}), (3, {})])
def test_states_are_there_from_initialisation(stage: int, knobs: dict[str, Any]) -> None:
    before, after = differs(Knob.STATES_AT_FIRST_STEP, lambda v: after_init(rank_at(v, stage, **knobs)))
    assert before - after == pytest.approx(8 * PART, rel=1e-3)


@pytest.mark.parametrize("stage", [2, 3])
def test_offloaded_states_are_there_from_initialisation(stage: int) -> None:
    before, after = differs(Knob.STATES_AT_FIRST_STEP, lambda v: host_phase(rank_at(v, stage, **CPU), Phase.INIT)[0])
    assert before - after == pytest.approx(8 * PART, rel=1e-3)
    last = [sum(host_phase(rank_at(v, stage, **CPU), Phase.STEP)[:2]) for v in _around(Knob.STATES_AT_FIRST_STEP)]
    assert last[0] == last[1]


def test_a_whole_bucket_is_cast() -> None:
    knobs = {"reduce_scatter": False, "communication_data_type": DType.FP32}
    before, after = differs(Knob.REDUCES_FILLED_PART, lambda v: allocated(rank_at(v, 2, **knobs))["bwd"])
    assert 4 * 500_000_000 in before
    assert 4 * 500_000_000 not in after


def test_updates_pass_the_gpu_in_fp32() -> None:
    knob, part = Knob.UPDATES_CAST_ON_GPU, rank_at(NEWEST_DEEPSPEED, 2).flat.partition

    def found(version: Version) -> int:
        rank = rank_at(version, 2, **CPU)
        assert line(rank, Buffer.STAGE_H2D, Place.HBM) == 4 * part * allocated(rank)["step1"].count(4 * part)
        return line(rank, Buffer.STAGE_H2D, Place.HBM)

    assert differs(knob, found) == (0, 4 * part)
    assert found(knob.value.until) == 0


def test_updates_get_a_buffer_on_the_host() -> None:
    found = {v: line(rank_at(v, 2, **CPU), Buffer.STAGE_H2D, Place.PINNED) for v in _around(Knob.UPDATES_BUFFER)}
    assert min(found.values()) == 0 < max(found.values())
    before, after = differs(Knob.UPDATES_BUFFER, lambda v: sum(host_phase(rank_at(v, 2, **CPU), Phase.STEP)[:2]))
    assert after > before


def test_bf16_optimizers_low_precision_gradients() -> None:
    """Dropped when the next backward begins, kept from 0.12.6 to 0.14.1, dropped by the step from 0.16.5 on."""
    versions = [(0, 12, 5), (0, 12, 6), (0, 14, 1), (0, 14, 2), (0, 16, 4), (0, 16, 5)]
    held = [held_in_second_forward(rank_at(v, 1, **FP32)) for v in versions]
    assert held[0] == held[1] == held[2] == held[3] == held[4]
    assert held[4] - held[5] == pytest.approx(2 * TOTAL, rel=1e-2)
    assert [_freed_before_first_gradient(rank_at(v, 1, **FP32)) > 0 for v in versions[:5]] == [True, False, False, True, True]


def _freed_before_first_gradient(rank: DeepSpeedRank) -> int:
    """The blocks that the second backward frees before it allocates any."""
    recorder = record_deepspeed(rank, TAPE, steps=2)
    forwards = freed = 0
    for code, value in zip(recorder.code, recorder.value, strict=True):
        op = code & ((1 << OP_BITS) - 1)
        forwards += op == AllocatorOp.MARK and recorder.marks[value] == "fwd"
        if forwards == 2 and op == AllocatorOp.ALLOC:
            break
        freed += forwards == 2 and op == AllocatorOp.FREE
    return freed


def test_immediate_update_frees() -> None:
    knobs = {**FP32, "immediate_grad_update": True}
    before, after = differs(Knob.IMMEDIATE_UPDATE_FREES, lambda v: _backward_end(rank_at(v, 1, **knobs)))
    assert before - after == pytest.approx(2 * TOTAL, rel=1e-2)


def _backward_end(rank: DeepSpeedRank) -> int:
    return next(one.allocated for one in simulate(record_deepspeed(rank, TAPE, steps=1)).marks if one.name == "bwd")


def test_stage_3s_bucket_has_the_models_dtype() -> None:
    comm = {"communication_data_type": DType.FP32}
    bucket = {v: line(rank_at(v, 3, **comm), Buffer.COMM_BUCKET, Place.HBM) for v in _around(Knob.STAGE3_BUCKET_DTYPE)}
    assert list(bucket.values()) == [1_000_000_000, 2_000_000_000]
    before, after = differs(Knob.STAGE3_BUCKET_DTYPE, lambda v: after_init(rank_at(v, 3, **comm)))
    assert after - before == pytest.approx(1_000_000_000, rel=1e-2)


def test_stage_0_in_bf16_ran_in_bf16_optimizer() -> None:
    before, after = _around(Knob.STAGE0_BF16_UNSHARDED)
    old, today = rank_at(before, 0), rank_at(after, 0)
    assert (old.stage, old.full_fp32_grads, today.stage, today.full_fp32_grads) == (1, True, 0, False)
    assert line(old, Buffer.GRAD_ACCUM, Place.HBM) == 4 * old.flat_group
    assert line(old, Buffer.PARAM_MASTER, Place.HBM) == pytest.approx(4 * PART, rel=1e-3)
    assert line(today, Buffer.PARAM_MASTER, Place.HBM) == 4 * TOTAL
    assert rank_at(before, 0, FP16).stage == rank_at(before, 0, FULL).stage == 0


def test_bf16_optimizer_was_missed() -> None:
    """From 0.17.6 to 0.18.4 stage 1 with fp32 accumulation shards nothing."""
    knob = Knob.BF16_OPTIMIZER_MISSED
    versions = (*_around(knob), (0, 18, 4), knob.value.until)
    masters = [line(rank_at(v, 1, **FP32), Buffer.PARAM_MASTER, Place.HBM) for v in versions]
    assert masters[1] == masters[2] == 4 * TOTAL
    assert masters[0] == masters[3] < TOTAL * 2
    zero = ZeroConfig.of(1, grad_accum_dtype=DType.FP32)
    said = [bool(version_remark(replace(zero, deepspeed=v), BF16)) for v in versions]
    assert said == [False, True, True, False]
    assert rank_at((0, 18, 4), 1, **FP32, **CPU).stage == 1


def test_an_fp32_models_shards_are_their_own_masters() -> None:
    """In 0.18.2 alone."""
    tape = llama_tape(2, itemsize=4)
    knob = Knob.FP32_MASTERS_ALIAS
    versions = (*_around(knob), knob.value.until)
    found = [line(rank_at(v, 3, FULL), Buffer.PARAM_MASTER, Place.HBM) for v in versions]
    assert found[0] == found[2] == 4 * PART
    assert found[1] == 0
    blocks = [sum(allocated(rank_at(v, 3, FULL), tape)["init"]) for v in versions]
    assert blocks[0] - blocks[1] == blocks[2] - blocks[1] == 4 * PART
    assert line(rank_at((0, 18, 2), 3), Buffer.PARAM_MASTER, Place.HBM) == 4 * PART


def test_masters_of_stage_3_come_of_a_clone() -> None:
    before, after = differs(Knob.MASTERS_CONVERTED_FIRST, lambda v: allocated(rank_at(v, 3))["init"])
    assert before.count(4 * PART) + 1 == after.count(4 * PART)
    assert before.count(2 * PART) == after.count(2 * PART) + 1


def test_masters_were_always_pinned() -> None:
    unpinned = OffloadOptimizer(OffloadDevice.CPU, pin_memory=False)

    def pinned(version: Version) -> int:
        rank = rank_at(version, 2, offload_optimizer=unpinned)
        assert line(rank, Buffer.PARAM_MASTER, Place.PINNED) == host_phase(rank, Phase.STEP)[1]
        return line(rank, Buffer.PARAM_MASTER, Place.PINNED)

    before, after = differs(Knob.MASTERS_PINNED_BY_KEY, pinned)
    assert before >= 4 * PART
    assert after == 0


def test_an_offloaded_optimizers_masters_are_cloned_on_the_gpu() -> None:
    """Before, the host held what was moved and its clone."""
    knob = Knob.MASTERS_CLONED_ON_GPU
    on_gpu = differs(knob, lambda v: sum(allocated(rank_at(v, 2, **CPU))["init"]))
    assert on_gpu[1] - on_gpu[0] == pytest.approx(2 * PART, rel=1e-3)
    one_less, one = (allocated(rank_at(version, 2))["init"] for version in _around(knob))
    assert one_less == one  # without offload nothing moves


def test_buckets_precede_the_backward() -> None:
    def first_of_backward(version: Version) -> int:
        return allocated(rank_at(version, 2))["bwd"][0]

    assert differs(Knob.BUCKETS_AT_FIRST_GRADIENT, first_of_backward)[0] == 1_000_000_000


@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_are_flattened_on_the_host(stage: int) -> None:
    before, after = differs(Knob.FLATTENS_ON_GPU, lambda v: host_phase(rank_at(v, stage), Phase.INIT)[2])
    assert before == pytest.approx(4 * TOTAL, rel=1e-3)
    assert after == 0
    peaks = [
        next(one.peak for one in simulate(record_deepspeed(rank_at(v, stage), TAPE, steps=1)).marks if one.name == "init")
        for v in _around(Knob.FLATTENS_ON_GPU)
    ]
    assert peaks[0] < peaks[1]


def test_stage_3_reduces_into_the_models_dtype() -> None:
    before, after = differs(Knob.STAGE3_ACCUM_DTYPE, lambda v: allocated(rank_at(v, 3, **FP32))["bwd"])
    assert sum(after) - sum(before) == pytest.approx(4 * PART, rel=1e-2)


def test_torchs_linear_function_runs_for_a_whole_model() -> None:
    def efficient(version: Version) -> bool:
        return rank_at(version, 3, zero_init=False).zero.stage3.memory_efficient_linear

    assert differs(Knob.LINEAR_WITHOUT_INIT, efficient) == (False, True)
    assert rank_at(_around(Knob.LINEAR_WITHOUT_INIT)[0], 3).zero.stage3.memory_efficient_linear


@pytest.mark.parametrize(("workload", "knobs"), [(FP16, {}), (BF16, {}), (BF16, CPU)])
def test_overflow_in_two_elements(workload: Workload, knobs: dict[str, Any]) -> None:
    """bf16 looks since check_grad_overflow, whose default is true from 0.19.3 on."""
    phase = "bwd" if knobs else "step1"
    before, after = differs(Knob.OVERFLOW_BY_EXTREMES, lambda v: len(allocated(rank_at(v, 2, workload, **knobs))[phase]))
    assert before > after


def test_bf16_looks_for_overflow_where_the_key_says_so() -> None:
    found = [
        len(allocated(rank_at(v, 2, check_grad_overflow=check))["step1"])
        for v, check in (((0, 17, 0), True), ((0, 17, 1), False), ((0, 17, 1), True))
    ]
    assert found[0] == found[1] < found[2]


def test_stage_2_ignores_the_accumulations_dtype() -> None:
    """The gradients kept are 16-bit, and the step flattens and casts them; later they are fp32 and step as they are."""
    versions = _around(Knob.COMPACT_FP32_GRADS)
    assert [rank_at(v, 2, **FP32).accum_bytes for v in versions] == [2, 4]
    before, after = differs(Knob.COMPACT_FP32_GRADS, lambda v: line(rank_at(v, 2, **FP32), Buffer.GRAD_MASTER, Place.HBM))
    assert (before, after) == (4 * rank_at(NEWEST_DEEPSPEED, 2).flat.partition, 0)


def test_frozen_parameters_of_a_recomputed_module() -> None:
    rank = rank_at(NEWEST_DEEPSPEED, 3)
    old = rank_at(_around(Knob.FROZEN_STAY_FOR_BACKWARD)[0], 3)
    assert (old.does(Knob.FROZEN_STAY_FOR_BACKWARD), rank.does(Knob.FROZEN_STAY_FOR_BACKWARD)) == (False, True)


def test_every_knob_is_tested_at_its_version() -> None:
    with open(__file__, encoding="utf-8") as source:
        text = source.read()
    named = {knob for knob in Knob if f"Knob.{knob.name}" in text}
    dated = {Knob.BF16_GRADS_STAY, Knob.BF16_GRADS_DROPPED_BY_STEP}  # by the versions themselves
    assert named | dated == set(Knob)


def test_an_unknown_version_is_planned_as_the_nearest() -> None:
    zero = ZeroConfig.of(2)
    for text, nearest in (("0.9.5", OLDEST), ("0.20.1", NEWEST_DEEPSPEED), ("1.0", NEWEST_DEEPSPEED), ("0.15.2", (0, 15, 2))):
        version = parse_version(text)
        assert planned_as(version) == nearest
        said = unmodelled_by_version(replace(zero, deepspeed=version), BF16, frozen=False)
        assert [one.effect for one in said] == ([] if nearest == version else [Effect.UNKNOWN])


@pytest.mark.parametrize(
    ("version", "workload", "knobs", "key"),
    [
        ((0, 19, 7), FP16, {"stage": 1, **FP32}, "data_types.grad_accum_dtype"),
        ((0, 17, 6), BF16, {"stage": 3, "offload_optimizer": OffloadOptimizer(OffloadDevice.CPU, ratio=0.5)}, "ratio"),
        ((0, 13, 1), BF16, {"stage": 3, "zero_hpz_partition_size": 2}, "zero_hpz_partition_size"),
        ((0, 19, 7), BF16, {"stage": 3, "offload_optimizer": "nvme", "nvme_path": "/nvme"}, "nvme"),
        ((0, 19, 7), BF16.but(optimizer="muon", optimizer_kind=OptimizerKind.FOREACH), {"stage": 2}, "optimizer.type"),
    ],
)
def test_what_no_row_covers_is_said(version: Version, workload: Workload, knobs: dict[str, Any], key: str) -> None:
    zero = replace(ZeroConfig.of(**knobs), deepspeed=version)
    (said,) = unmodelled_by_version(zero, workload, frozen=False)
    assert key in said.key
    assert said.effect is Effect.UNKNOWN
    assert not unmodelled_by_version(replace(zero, deepspeed=NEWEST_DEEPSPEED), workload, frozen=False)


def test_frozen_parameters_at_stage_0_in_fp16() -> None:
    old = ZeroConfig(deepspeed=(0, 19, 1))
    assert [one.effect for one in unmodelled_by_version(old, FP16, frozen=True)] == [Effect.MORE]
    assert not unmodelled_by_version(old, FP16, frozen=False)
