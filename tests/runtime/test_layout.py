"""The layout's arithmetic: every element has one place, shards are equal, and the totals follow ZeRO's formula."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zeroplan.core.arena.layout import (
    ALIGN,
    STAGING_NUMEL,
    STEP_SCALARS,
    ArenaLayout,
    ParamShape,
    UnitKind,
    UnitShape,
    flat_of,
    plan_layout,
)
from zeroplan.core.arena.layout_setup import RuntimeSetup
from zeroplan.core.arena.owned_buffers import runtime_buffers
from zeroplan.core.buffers import Buffer
from zeroplan.core.workload import DType

params = st.lists(
    st.tuples(st.integers(0, 700), st.booleans(), st.integers(0, 2)).map(lambda t: ParamShape("p", *t)), min_size=1, max_size=8
)
shapes = st.lists(st.tuples(st.sampled_from(UnitKind), params.map(tuple)), min_size=1, max_size=7).map(
    lambda units: [UnitShape(f"u{i}", kind, ps) for i, (kind, ps) in enumerate(units)]
)
ranks = st.integers(1, 9)


@given(params, ranks)
def test_a_flat_holds_every_parameter_once(chosen: list[ParamShape], count: int) -> None:
    flat = flat_of(UnitShape("u", UnitKind.BLOCK, tuple(chosen)), count, trainable=True)
    wanted = [i for i, p in enumerate(chosen) if p.trainable and p.numel]
    if flat is None:
        assert not wanted
        return
    assert sorted(flat.params) == wanted
    groups = [chosen[i].group for i in flat.params]
    assert groups == sorted(groups)
    covered = [0] * flat.full
    for offset, numel in zip(flat.offsets, flat.numels, strict=True):
        assert offset % ALIGN == 0
        for i in range(offset, offset + numel):
            covered[i] += 1
    for start, end in flat.gaps():
        for i in range(start, end):
            covered[i] += 1
    assert set(covered) == {1}
    assert flat.shard % ALIGN == 0
    assert flat.full - flat.used < count * ALIGN  # no more padding than alignment asks for


@given(params, ranks)
def test_the_ranks_overlaps_part_each_parameter(chosen: list[ParamShape], count: int) -> None:
    flat = flat_of(UnitShape("u", UnitKind.BLOCK, tuple(chosen)), count, trainable=True)
    if flat is None:
        return
    for position, numel in enumerate(flat.numels):
        pieces = [flat.overlap(position, rank) for rank in range(count)]
        assert sum(end - start for start, end in pieces) == numel
        assert [i for start, end in pieces for i in range(start, end)] == list(range(numel))


def total(layout: ArenaLayout, *buffers: Buffer) -> int:
    return sum(row.bytes for row in runtime_buffers(layout) if not buffers or row.buffer in buffers)


@given(shapes, ranks, st.sampled_from([DType.FP32, DType.BF16]))
def test_states_follow_the_formula(units: list[UnitShape], count: int, dtype: DType) -> None:
    """Masters and Adam's moments are 12 (fp32: 8) bytes an element over the ranks, up to padding."""
    trained = sum(p.numel for u in units for p in u.params if p.trainable)
    tensors = sum(len(u.params) for u in units)
    states = (Buffer.PARAM_MASTER, Buffer.OPTIM_EXP_AVG, Buffer.OPTIM_EXP_AVG_SQ)
    each = 8 if dtype is DType.FP32 else 12
    for stage in range(4):
        setup = RuntimeSetup(count, stage, dtype, dtype, dtype)
        have = total(plan_layout(units, setup), *states)
        exact = each * trained / (count if stage else 1)
        assert exact <= have <= exact + each * ALIGN * (tensors + len(units) * (1 if stage else count))


@given(shapes, st.integers(2, 9))
def test_what_a_stage_shards(units: list[UnitShape], count: int) -> None:
    layouts = [plan_layout(units, RuntimeSetup(count, stage, grad_accum=2)) for stage in range(4)]
    flats = [u.trainable for u in layouts[0].units if u.trainable]
    whole, shards = sum(f.full for f in flats), sum(f.shard for f in flats)
    assert whole == shards * count
    slots = [sum(layout.grad_slots.values()) for layout in layouts]
    assert [total(layout, Buffer.GRAD_FULL, Buffer.GRAD_SHARD) for layout in layouts] == [
        2 * whole,
        2 * whole,
        2 * (shards + slots[2]),
        2 * (shards + slots[3]),
    ]
    frozen = sum(u.frozen.shard for u in layouts[0].units if u.frozen)
    gathered = sum(layouts[3].param_slots.values())
    kinds = (Buffer.PARAM_FULL, Buffer.PARAM_SHARD, Buffer.PARAM_FROZEN)
    assert [total(layout, *kinds) for layout in layouts] == [2 * (whole + frozen * count)] * 3 + [2 * (frozen + gathered)]
    # fp32 parameters are their own masters, and their shards stand.
    alone = plan_layout(units, RuntimeSetup(count, 3, DType.FP32, DType.FP32, DType.FP32))
    assert total(alone, *kinds) == 4 * (shards + frozen + gathered)


@given(shapes, st.integers(2, 9))
def test_without_accumulation_stage_1_needs_no_whole_gradients(units: list[UnitShape], count: int) -> None:
    first, second = (plan_layout(units, RuntimeSetup(count, stage)) for stage in (1, 2))
    assert runtime_buffers(first) == runtime_buffers(second)


@given(shapes)
def test_one_rank_alone_is_the_same_at_every_stage(units: list[UnitShape]) -> None:
    assert len({total(plan_layout(units, RuntimeSetup(1, stage))) for stage in range(4)}) == 1


@given(shapes)
def test_one_micro_batch_of_one_rank_needs_no_fp32_gradients(units: list[UnitShape]) -> None:
    narrow, wide, added = (
        total(plan_layout(units, RuntimeSetup(1, 2, DType.BF16, dtype, dtype, grad_accum=accum)), Buffer.GRAD_SHARD)
        for dtype, accum in ((DType.BF16, 1), (DType.FP32, 1), (DType.FP32, 2))
    )
    assert 2 * narrow == 2 * wide == added


def test_slots_hold_the_largest_unit_that_uses_them() -> None:
    def unit(name: str, kind: UnitKind, numel: int) -> UnitShape:
        return UnitShape(name, kind, (ParamShape("w", numel),))

    units = [unit("root", UnitKind.ROOT, 64), unit("embed", UnitKind.WIDE, 6400)]
    units += [unit(f"b{i}", UnitKind.BLOCK, 640 * (i + 1)) for i in range(5)]
    units += [unit("head", UnitKind.WIDE, 12800)]
    layout = plan_layout(units, RuntimeSetup(2, 3))
    # Blocks 0, 2 and 4 share one slot and 1 and 3 the other; shards are multiples of 64, so some are padded.
    assert layout.param_slots == {"root": 128, "wide": 12800, "ring.0": 3200, "ring.1": 2560}
    assert layout.grad_slots == layout.param_slots
    shards = 64 + 3200 + 320 + 640 + 960 + 1280 + 1600 + 6400
    by_hand = {
        Buffer.PARAM_SHARD: 0,
        Buffer.PARAM_FULL: 2 * (128 + 12800 + 3200 + 2560),
        Buffer.PARAM_MASTER: 4 * shards,
        Buffer.OPTIM_EXP_AVG: 4 * shards,
        Buffer.GRAD_SHARD: 2 * shards,
        Buffer.OPTIM_NORM: 4 * (STEP_SCALARS + len(units)) + 2048 * 8 + 64,
    }
    assert {buffer: total(layout, buffer) for buffer in by_hand} == by_hand


def test_fp32_reduction_stages_what_does_not_belong_to_blocks() -> None:
    units = [
        UnitShape("root", UnitKind.ROOT, (ParamShape("w", 640),)),
        UnitShape("b", UnitKind.BLOCK, (ParamShape("w", 6400),)),
    ]
    setup = RuntimeSetup(2, 2, DType.BF16, DType.FP32, DType.FP32)
    rows = {(row.buffer, row.unit): row.bytes for row in runtime_buffers(plan_layout(units, setup))}
    assert rows[Buffer.GRAD_FULL, "root"] == 2 * 640
    assert rows[Buffer.GRAD_FULL, "ring.0"] == 4 * 6400
    assert rows[Buffer.COMM_REDUCE_SCATTER, "staging"] == 4 * 640
    wide = [UnitShape("head", UnitKind.WIDE, (ParamShape("w", STAGING_NUMEL * 3),))]
    assert plan_layout(wide, setup).piece == STAGING_NUMEL // 2
