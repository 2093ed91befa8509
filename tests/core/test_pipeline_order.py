"""The order of a pipeline rank's micro batches, against torch's own schedules."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroplan.core.errors import BadInput
from zeroplan.core.pipeline_order import Action, Do, PipelineOrder, PipelineSchedule, in_flight, with_gathers

ONE_F_ONE_B, GPIPE, ZERO_BUBBLE = PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.GPIPE, PipelineSchedule.ZERO_BUBBLE
ZBV, DUALPIPE_V = PipelineSchedule.ZBV, PipelineSchedule.DUALPIPE_V

#: torch's schedules of several chunks.
_LOOPED = {
    ONE_F_ONE_B: "ScheduleInterleaved1F1B",
    GPIPE: "ScheduleLoopedBFS",
    ZERO_BUBBLE: "ScheduleInterleavedZeroBubble",
    ZBV: "ScheduleZBVZeroBubble",
    DUALPIPE_V: "ScheduleDualPipeV",
}


class _Stage:
    """What torch's schedules ask of a stage; it notes the micro batches that it is to run."""

    has_backward, is_first, is_last, submod = True, False, False, None

    def __init__(self, index: int, rank: int, ranks: int, chunks: int) -> None:
        self.stage_index, self.group_rank, self.group_size, self.num_stages = index, rank, ranks, ranks * chunks
        self.seen: list[Action] = []

    def forward_one_chunk(self, number: int, *_: Any, **__: Any) -> None:
        self.seen.append(Action(Do.FORWARD, 0, number))

    def backward_one_chunk(self, number: int, **_: Any) -> None:
        self.seen.append(Action(Do.BACKWARD, 0, number))

    def perform_reduce_grad(self, _: int) -> None:
        """Every micro batch has run."""

    def _nothing_sent(self, _: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _nothing_sent


def _one_chunk(schedules: Any, schedule: PipelineSchedule, rank: int, ranks: int, count: int) -> list[Action]:
    """Return what torch's schedule runs on a rank with one chunk."""
    stage = _Stage(rank, rank, ranks, 1)
    made = (schedules.Schedule1F1B if schedule is ONE_F_ONE_B else schedules.ScheduleGPipe)(stage, count)
    made._initialize_stage = lambda *_: None
    made._step_microbatches()
    return stage.seen


def _chunks(
    schedules: Any, schedule: PipelineSchedule, rank: int, ranks: int, chunks: int, count: int
) -> tuple[list[Action], list[Action]]:
    """Return a rank's forwards and backwards as torch orders them, and the same with gathers and reductions."""
    made = getattr(schedules, _LOOPED[schedule])(
        [_Stage(schedule.stage_of(chunk, rank, ranks), rank, ranks, chunks) for chunk in range(chunks)], count
    )
    computed = made.pipeline_order[rank]
    gathered = schedules._add_reduce_grad(schedules._add_unshard_reshard(computed), count)
    return _plain(computed, ranks), _plain(gathered, ranks)


def _plain(actions: list[Any], ranks: int) -> list[Action]:
    """Return torch's actions, those that it overlaps one by one."""
    named = {do.value: do for do in Do}
    found = []
    for one in actions:
        for part in (one,) if one is None or not one.sub_actions else one.sub_actions:
            if part is not None:
                number = -1 if part.microbatch_index is None else part.microbatch_index
                found.append(Action(named[part.computation_type.value], part.stage_index // ranks, number))
    return found


@pytest.mark.parametrize("schedule", [ONE_F_ONE_B, GPIPE, ZERO_BUBBLE])
@pytest.mark.parametrize(
    ("ranks", "chunks", "count"),
    [
        (3, 1, 5),
        (4, 1, 8),
        (4, 1, 4),
        (2, 2, 4),
        (4, 2, 8),
        (4, 2, 10),
        (4, 3, 12),
        (4, 4, 16),
        (8, 2, 32),
        (4, 2, 3),
        (2, 5, 4),
    ],
)
def test_the_order_is_torchs(schedule: PipelineSchedule, ranks: int, chunks: int, count: int) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    for rank in range(ranks):
        ours = PipelineOrder(schedule, rank, ranks, chunks, count).actions()
        if chunks == 1 and schedule is not ZERO_BUBBLE:
            assert ours == _one_chunk(schedules, schedule, rank, ranks, count)
            continue
        computed, gathered = _chunks(schedules, schedule, rank, ranks, chunks, count)
        assert ours == computed
        assert with_gathers(ours) == gathered


@pytest.mark.parametrize(
    ("schedule", "ranks", "counts"),
    [
        (ZBV, 2, (1, 2, 3, 4, 9)),
        (ZBV, 4, (1, 5, 7, 8, 16)),
        (ZBV, 8, (3, 15, 16, 32)),
        (DUALPIPE_V, 2, (4, 5, 9)),
        (DUALPIPE_V, 4, (8, 11, 16)),
        (DUALPIPE_V, 8, (16, 17, 32)),
    ],
)
def test_the_order_of_folded_schedules_is_torchs(schedule: PipelineSchedule, ranks: int, counts: tuple[int, ...]) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    for count in counts:
        for rank in range(ranks):
            ours = PipelineOrder(schedule, rank, ranks, 2, count).actions()
            computed, gathered = _chunks(schedules, schedule, rank, ranks, 2, count)
            assert ours == computed
            found, last = with_gathers(ours), Action(Do.RESHARD, 0)
            assert found == gathered or (found[:-2], set(found[-2:])) == (gathered[:-2], {last, last._replace(chunk=1)})


def test_a_rank_of_a_folded_pipeline_has_stages_alike_far_from_its_ends() -> None:
    mapping = pytest.importorskip("torch.distributed.pipelining._utils").generate_rank_to_stage_mapping
    for ranks in (1, 2, 4, 8):
        ours = {rank: [ZBV.stage_of(chunk, rank, ranks) for chunk in (0, 1)] for rank in range(ranks)}
        assert ours == mapping(ranks, 2 * ranks, style="v")


def test_what_folded_schedules_refuse_is_refused_as_in_torch() -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    with pytest.raises(ValueError, match="exactly 2 stages per rank"):
        schedules.ScheduleZBVZeroBubble([_Stage(chunk, 0, 2, 3) for chunk in range(3)], 8)
    with pytest.raises(BadInput, match="zbv runs exactly 2 chunks a rank, and not 3"):
        PipelineOrder(ZBV, 0, 2, 3, 8)
    with pytest.raises(ValueError, match="at least as many microbatches as stages"):
        schedules.ScheduleDualPipeV([_Stage(0, 0, 4, 2), _Stage(7, 0, 4, 2)], 7)
    with pytest.raises(BadInput, match="dualpipev over 2 × 4 stages takes 8 micro batches or more, and not 7"):
        PipelineOrder(DUALPIPE_V, 0, 4, 2, 7)


def test_rounds_that_do_not_divide_are_refused_as_in_torch() -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    with pytest.raises(ValueError, match="multiple of the number of rounds"):
        schedules.ScheduleInterleaved1F1B([_Stage(0, 0, 4, 2), _Stage(4, 0, 4, 2)], 9)
    with pytest.raises(BadInput, match="the 2 rounds of the interleaved schedule do not divide 9 micro batches"):
        PipelineOrder(ONE_F_ONE_B, 0, 4, 2, 9)


def test_too_few_micro_batches_are_refused_as_in_torch() -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    with pytest.raises(ValueError, match="greater than or equal to the number of stages"):
        schedules.Schedule1F1B(_Stage(0, 0, 4, 1), 3)
    with pytest.raises(BadInput, match="1f1b over 4 stages takes 4 micro batches or more, and not 3"):
        PipelineOrder(ONE_F_ONE_B, 0, 4, 1, 3)


def test_the_order_of_one_f_one_b() -> None:
    order = PipelineOrder(ONE_F_ONE_B, 1, 4, 1, 5).actions()
    assert " ".join(f"{do.value}{number}" for do, _, number in order) == "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"


def test_the_steady_state_has_three_chunks_gathered() -> None:
    found = with_gathers(PipelineOrder(ONE_F_ONE_B, 0, 2, 5, 4).actions())
    gathered = most = 0
    for do, _, _ in found:
        gathered += (do is Do.UNSHARD) - (do is Do.RESHARD)
        most = max(most, gathered)
    assert (gathered, most) == (0, 3)


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 24), st.sampled_from(PipelineSchedule), st.data())
def test_fewer_micro_batches_reach_the_same_state(
    ranks: int, chunks: int, count: int, schedule: PipelineSchedule, data: st.DataObject
) -> None:
    """A micro batch goes forward, then backward; a chunk's slots are taken in turn; the shortened step holds as many."""
    if ranks == 1:
        chunks = 1
    if schedule.folded:
        chunks = 2
    try:
        order = PipelineOrder(schedule, data.draw(st.integers(0, ranks - 1)), ranks, chunks, count)
    except BadInput:
        return
    whole, short = order.actions(), order.shortened()
    assert in_flight(short, chunks) == in_flight(whole, chunks)
    assert len(short) <= len(whole)
    for actions in (whole, short):
        slots = in_flight(actions, chunks)
        flying: set[tuple[int, int]] = set()
        for do, chunk, number in actions:
            slot = (chunk, number % slots[chunk])  # as players number them
            if do is Do.FORWARD:
                assert slot not in flying
                flying.add(slot)
            elif do is not Do.INPUT:
                flying.remove(slot)
        assert not flying
