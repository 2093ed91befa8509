"""The order in which a pipeline rank runs its micro batches, and gathers and reduces its parameters.

Note [Looped schedules]
    With several chunks a rank (vpp), chunk c of rank r is the pipeline's stage c × ranks + r, and micro batches pass every rank
    `chunks` times. 1F1B becomes the interleaved schedule, which takes micro batches in rounds: as many as there are ranks, or a
    little more where those do not divide them. GPipe becomes the breadth-first schedule, with the last micro batch's backward
    first. Sources: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 2.2;
    Lamy-Poirier 2022, "Breadth-First Pipeline Parallelism", section 4; torch/distributed/pipelining/schedules.py
    (``ScheduleInterleaved1F1B``, ``ScheduleLoopedBFS``).

    These schedules gather parameters ahead: of the next three chunks with work. A chunk that is not among them is resharded,
    and a chunk whose last backward has run is reduced. Source: ``_add_unshard_reshard`` and ``_add_reduce_grad`` there.

Note [Zero bubble]
    A backward runs in two halves: the gradient of the stage's input, for which the stage before waits, and those of its
    weights, which fill what would be a bubble. ZB1P (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2) warms up
    by one micro batch a rank behind it, in place of two, and puts the weights of as many micro batches off as there are ranks
    in front. torch runs it for any number of chunks as a looped schedule (``ScheduleInterleavedZeroBubble``).

Note [Folded schedules]
    ZBV and DualPipeV lay the pipeline's 2 p stages on p ranks as a V: rank r has the stages r and 2 p − 1 − r, so that the
    first rank has embedding, head and loss, and the last one hands hidden states and their gradients on to itself. ZBV halves
    every backward. DualPipeV halves few: those in front of its steady state, and about half of those behind it; in the steady
    state a forward of one chunk and a whole backward of the other are one action, which torch runs one behind the other unless
    a program registers a function that overlaps them. Sources: Qi et al. 2023, section 6; DeepSeek-V3's report (arXiv
    2412.19437), section 3.2.1, and deepseek-ai/DualPipe, dualpipev.py; torch/distributed/pipelining/schedules.py
    (``ScheduleZBVZeroBubble``, ``ScheduleDualPipeV``), _utils.py (``generate_stage_to_rank_mapping``).

Chunk 0 of rank r is the stage on the way there, chunk 1 the one on the way back.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from typing import NamedTuple

from zeroplan.core.errors import BadInput


class Do(Enum):
    """What a pipeline rank does with one of its chunks."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"  # the first half of a backward: the gradient of the input
    WEIGHT = "W"  # the second: the gradients of the weights
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE = "REDUCE_GRAD"


class Action(NamedTuple):
    """One thing that a rank does: with which of its chunks, counted from 0, and with which micro batch (-1 for none)."""

    do: Do
    chunk: int
    micro_batch: int = -1


class PipelineSchedule(StrEnum):
    """The orders in which stages run micro batches."""

    ONE_F_ONE_B = "1f1b"
    GPIPE = "gpipe"
    ZERO_BUBBLE = "zero-bubble"
    ZBV = "zbv"
    DUALPIPE_V = "dualpipev"

    @property
    def halves(self) -> bool:
        """Whether backwards run in two halves, all or some. See Note [Zero bubble]."""
        return self not in (PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.GPIPE)

    @property
    def mixed(self) -> bool:
        """Whether some backwards run in two halves and others do not."""
        return self is PipelineSchedule.DUALPIPE_V

    @property
    def folded(self) -> bool:
        """Whether a rank's two stages lie at the same distance from the pipeline's ends. See Note [Folded schedules]."""
        return self in (PipelineSchedule.ZBV, PipelineSchedule.DUALPIPE_V)

    def stage_of(self, chunk: int, rank: int, ranks: int) -> int:
        """Return the pipeline's stage that a rank has as one of its chunks."""
        if self.folded and chunk:
            return 2 * ranks - 1 - rank
        return chunk * ranks + rank


#: Known elsewhere by these names, and why not here.
_REFUSED = {
    "interleaved": ("the interleaved schedule is 1f1b with several chunks a rank", "use --schedule 1f1b --vpp 2"),
    "dualpipe": (
        "DualPipe runs both ways through two copies of every stage, whose gradients no engine that is planned adds up",
        "use dualpipev, which has one copy",
    ),
}


def schedule_of(name: str) -> PipelineSchedule:
    """Return the schedule called `name`. Raises BadInput: a schedule that is unknown or not modelled."""
    if name.lower() in _REFUSED:
        what, remedy = _REFUSED[name.lower()]
        raise BadInput(what, where="--schedule", remedy=remedy)
    try:
        return PipelineSchedule(name)
    except ValueError:
        known = ", ".join(PipelineSchedule)
        raise BadInput(f"unknown schedule {name[:40]!r}", where="--schedule", remedy=f"use one of {known}") from None


#: What ends a micro batch on a chunk.
_LAST = (Do.BACKWARD, Do.WEIGHT)
#: Micro batches beyond those in flight that need to be played: each is like the one before it.
_FURTHER = 6
#: Rounds of the interleaved schedule that need to be played: at most two of warm-up, a steady one, and the last.
_ROUNDS = 4
#: Chunks whose parameters are gathered at a time.
GATHERED_CHUNKS = 3


@dataclass(frozen=True, slots=True)
class PipelineOrder:
    """A schedule on one rank. See Note [Looped schedules].

    Attributes:
        schedule: the schedule.
        rank: the pipeline rank, counted from 0.
        ranks: the number of pipeline ranks.
        chunks: model chunks a rank.
        micro_batches: micro batches of a step.
        takes_fewer: there may be fewer micro batches than stages, as under DeepSpeed.

    Raises:
        BadInput: fewer micro batches than 1F1B or DualPipeV has stages, some that a schedule of rounds cannot take in equal
            ones, or other than two chunks of a folded schedule.
    """

    schedule: PipelineSchedule
    rank: int
    ranks: int
    chunks: int
    micro_batches: int
    takes_fewer: bool = False

    def __post_init__(self) -> None:
        if self.schedule is PipelineSchedule.GPIPE:
            return
        if self.schedule.folded:
            self._require_folded()
            return
        if not self.looped and self.micro_batches < self.ranks and not self.takes_fewer:
            what = f"1f1b over {self.ranks} stages takes {self.ranks} micro batches or more, and not {self.micro_batches}"
            raise BadInput(what, where="--grad-accum", remedy=f"use --grad-accum {self.ranks} or more, or --schedule gpipe")
        if self.looped and self.micro_batches % self.rounds:
            kind = self.schedule if self.schedule.halves else "interleaved"
            what = f"the {self.rounds} rounds of the {kind} schedule do not divide {self.micro_batches} micro batches"
            raise BadInput(what, where="--grad-accum", remedy=f"use a multiple of --pp {self.ranks}")

    def _require_folded(self) -> None:
        """Refuse what torch's folded schedules do."""
        if self.chunks != 2:
            what = f"{self.schedule} runs exactly 2 chunks a rank, and not {self.chunks}"
            raise BadInput(what, where="--vpp", remedy="use --vpp 2")
        stages = 2 * self.ranks
        if self.schedule is PipelineSchedule.DUALPIPE_V and self.micro_batches < stages:
            what = f"dualpipev over 2 × {self.ranks} stages takes {stages} micro batches or more, and not {self.micro_batches}"
            raise BadInput(what, where="--grad-accum", remedy=f"use --grad-accum {stages} or more, or --schedule zbv")

    @property
    def looped(self) -> bool:
        """Whether torch runs it as a looped schedule. See Note [Looped schedules]."""
        return self.chunks > 1 or self.schedule.halves

    @property
    def rounds(self) -> int:
        """The rounds in which an interleaved schedule takes the micro batches."""
        return max(1, self.micro_batches // self.ranks)

    def actions(self) -> list[Action]:
        """Return the forwards and backwards of a step."""
        if self.schedule is PipelineSchedule.ZBV:
            return zbv_order(self.rank, self.ranks, self.micro_batches)
        if self.schedule is PipelineSchedule.DUALPIPE_V:
            return dualpipe_v_order(self.rank, self.ranks, self.micro_batches)
        if self.schedule.halves:
            return self._zero_bubble()
        if self.chunks == 1:
            return self._one_chunk()
        if self.schedule is PipelineSchedule.GPIPE:
            return self._breadth_first()
        return self._interleaved(self.rounds, self.micro_batches // self.rounds)

    def shortened(self) -> list[Action]:
        """Return the forwards and backwards of a step with fewer micro batches that reaches the same steady state.

        Where backwards run in two halves, the gradients of all micro batches' inputs stay, so that each is played.
        """
        if self.schedule is PipelineSchedule.GPIPE or self.schedule.halves:
            return self.actions()
        if self.chunks == 1:
            played = min(self.micro_batches, self.ranks - self.rank + _FURTHER)
            return replace(self, micro_batches=max(played, min(self.ranks, self.micro_batches))).actions()
        return self._interleaved(min(self.rounds, _ROUNDS), self.micro_batches // self.rounds)

    def _one_chunk(self) -> list[Action]:
        """Sources: Huang et al. 2019, "GPipe", section 2.3; Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN
        Training", section 3.2 (1F1B).
        """
        count = self.micro_batches
        ahead = count if self.schedule is PipelineSchedule.GPIPE else min(self.ranks - self.rank, count)
        found = [Action(Do.FORWARD, 0, number) for number in range(ahead)]
        for number in range(count):
            found.append(Action(Do.BACKWARD, 0, number))
            if number + ahead < count:
                found.append(Action(Do.FORWARD, 0, number + ahead))
        return found

    def _breadth_first(self) -> list[Action]:
        numbers, chunks = range(self.micro_batches), range(self.chunks)
        forwards = [Action(Do.FORWARD, chunk, number) for chunk in chunks for number in numbers]
        return forwards + [Action(Do.BACKWARD, chunk, number) for chunk in reversed(chunks) for number in reversed(numbers)]

    def _in_rounds(self, rounds: int, in_round: int) -> tuple[list[Action], list[Action]]:
        """Return forwards and backwards, each round of which takes `in_round` micro batches through all chunks."""
        forwards = [
            Action(Do.FORWARD, chunk, turn * in_round + number)
            for turn in range(rounds)
            for chunk in range(self.chunks)
            for number in range(in_round)
        ]
        last = self.chunks - 1
        return forwards, [Action(Do.BACKWARD, last - forward.chunk, forward.micro_batch) for forward in forwards]

    def _interleaved(self, rounds: int, in_round: int) -> list[Action]:
        forwards, backwards = self._in_rounds(rounds, in_round)
        ahead = min((self.chunks - 1) * in_round + 2 * (self.ranks - 1 - self.rank), len(forwards))
        found = forwards[:ahead]
        for forward, backward in zip(forwards[ahead:], backwards, strict=False):
            found += (forward, backward)
        return found + backwards[len(forwards) - ahead :]

    def _zero_bubble(self) -> list[Action]:
        in_round = self.micro_batches // self.rounds
        forwards, backwards = self._in_rounds(self.rounds, in_round)
        ahead = min((self.chunks - 1) * in_round + self.ranks - 1 - self.rank, len(forwards))
        found, weights = forwards[:ahead], iter(one._replace(do=Do.WEIGHT) for one in backwards)
        for number, backward in enumerate(backwards):
            found += forwards[ahead + number : ahead + number + 1]
            found.append(backward._replace(do=Do.INPUT))
            if number >= self.rank:
                found.append(next(weights))
        return found + list(weights)


def in_flight(actions: Iterable[Action], chunks: int) -> list[int]:
    """Return for each chunk the most micro batches of which the forward has run and the backward has not."""
    now, most = [0] * chunks, [0] * chunks
    for do, chunk, _ in actions:
        now[chunk] += (do is Do.FORWARD) - (do in _LAST)
        most[chunk] = max(most[chunk], now[chunk])
    return most


def with_gathers(actions: Sequence[Action]) -> list[Action]:
    """Add to forwards and backwards what a looped schedule gathers, reduces and reshards. See Note [Looped schedules]."""
    left: dict[int, int] = {}
    for do, chunk, _ in actions:
        left[chunk] = left.get(chunk, 0) + (do in _LAST)
    gathered: list[int] = []
    found: list[Action] = []
    for at, action in enumerate(actions):
        wanted = _next_chunks(actions, at)
        for chunk in sorted(set(gathered) - set(wanted)):
            gathered.remove(chunk)
            found.append(Action(Do.RESHARD, chunk))
        for chunk in wanted:
            if chunk not in gathered:
                gathered.append(chunk)
                found.append(Action(Do.UNSHARD, chunk))
        found.append(action)
        if action.do in _LAST:
            left[action.chunk] -= 1
            if not left[action.chunk]:
                found.append(Action(Do.REDUCE, action.chunk))
    return found + [Action(Do.RESHARD, chunk) for chunk in sorted(gathered)]


def _next_chunks(actions: Sequence[Action], at: int) -> list[int]:
    """Return the next chunks with work from an action on."""
    found: list[int] = []
    for action in actions[at:]:
        if action.chunk not in found:
            found.append(action.chunk)
            if len(found) == GATHERED_CHUNKS:
                break
    return found


_THERE, _BACK = 0, 1


class _Order:
    """Actions in the making, each with the next micro batch of its kind."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.done: Counter[tuple[Do, int]] = Counter()
        self.halved: deque[tuple[int, int]] = deque()  # chunks and micro batches whose weights are put off

    def add(self, do: Do, chunk: int) -> None:
        """Add a forward, a backward or the first half of one."""
        begun = Do.FORWARD if do is Do.FORWARD else Do.BACKWARD
        number = self.done[begun, chunk]
        self.done[begun, chunk] += 1
        self.actions.append(Action(do, chunk, number))
        if do is Do.INPUT:
            self.halved.append((chunk, number))

    def weights(self) -> None:
        """Add the second half that was put off first, if any was."""
        if self.halved:
            self.actions.append(Action(Do.WEIGHT, *self.halved.popleft()))

    def weights_of(self, chunk: int) -> None:
        """Add the second half that was put off first of those of a chunk."""
        number = next(number for of, number in self.halved if of == chunk)
        self.halved.remove((chunk, number))
        self.actions.append(Action(Do.WEIGHT, chunk, number))

    def left(self, chunk: int) -> int:
        """Return how many second halves of a chunk are put off."""
        return sum(of == chunk for of, _ in self.halved)

    def at_once(self, chunk: int) -> None:
        """Add both halves of a backward."""
        self.add(Do.INPUT, chunk)
        self.weights_of(chunk)


def zbv_order(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """Return what ZBV runs on a rank.

    It is laid out for 2 p − 1 micro batches or more; of fewer, the rest is left out.
    Source: torch's ``ScheduleZBVZeroBubble``; Qi et al. 2023, section 6 and figure 5.
    """
    order, count = _Order(), max(2 * ranks - 1, micro_batches)
    for _ in range(2 * (ranks - rank) - 1):
        order.add(Do.FORWARD, _THERE)
    for _ in range(rank):
        order.add(Do.FORWARD, _BACK)
        order.add(Do.FORWARD, _THERE)
    for _ in range(ranks - rank):
        order.add(Do.FORWARD, _BACK)
        order.at_once(_BACK)
    forwards = order.done
    while forwards[Do.FORWARD, _BACK] < forwards[Do.FORWARD, _THERE] or forwards[Do.FORWARD, _THERE] < count:
        if forwards[Do.FORWARD, _THERE] < count:
            order.add(Do.FORWARD, _THERE)
        order.at_once(_THERE)
        order.add(Do.FORWARD, _BACK)
        order.at_once(_BACK)
    for _ in range(rank):
        order.add(Do.INPUT, _THERE)
        order.add(Do.INPUT, _BACK)
    for _ in range(ranks - rank):
        order.add(Do.INPUT, _THERE)
        order.weights_of(_THERE)
    for chunk in (_BACK, _THERE):
        for _ in range(order.left(chunk)):
            order.weights_of(chunk)
    return [action for action in order.actions if action.micro_batch < micro_batches]


def dualpipe_v_order(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """Return what DualPipeV runs on a rank, of 2 p micro batches or more; parts of an overlapped action stand by themselves.

    Source: torch's ``ScheduleDualPipeV``, whose steps are those of deepseek-ai/DualPipe, dualpipev.py (``step``).
    """
    order, behind = _Order(), ranks - rank - 1
    for _ in range(2 * behind):
        order.add(Do.FORWARD, _THERE)
    for _ in range(rank + 1):
        order.add(Do.FORWARD, _THERE)
        order.add(Do.FORWARD, _BACK)
    for _ in range(behind):
        order.add(Do.INPUT, _BACK)
        order.weights()
        order.add(Do.FORWARD, _BACK)
    for _ in range(micro_batches - 2 * ranks + rank + 1):
        for chunk in (_THERE, _BACK):
            order.add(Do.FORWARD, chunk)
            order.add(Do.BACKWARD, 1 - chunk)
    for _ in range(behind):
        order.add(Do.BACKWARD, _BACK)
        order.add(Do.FORWARD, _BACK)
        order.add(Do.BACKWARD, _THERE)
    drained = rank + 1
    whole = 2 * (drained // 2) + (rank % 2 == 0)  # of the backwards there and back in turn, those in front of the halved ones
    for number in range(2 * drained):
        order.add(Do.BACKWARD if number < whole else Do.INPUT, _BACK if number % 2 == 0 else _THERE)
    for _ in range(behind):
        order.weights()
        order.add(Do.INPUT, _THERE)
    for _ in range(drained):
        order.weights()
    return order.actions
