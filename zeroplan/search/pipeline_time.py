"""How long the ranks of a pipeline take for a step, by playing their actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeroplan.core.pipeline_order import Action, Do, PipelineSchedule


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of one micro batch's forward and backward on one stage."""

    forward: float
    backward: float


def play(
    orders: Sequence[Sequence[Action]],
    stages: Sequence[StageTime],
    sending: float,
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B,
) -> float:
    """Return the seconds from the first forward to the last backward of a step.

    A rank works off its actions in their order. A forward waits for the stage before it, a backward for the stage behind it,
    and both for what these send. The halves of a backward take as long as each other: as many products make the gradients of
    inputs as those of weights. A first stage runs both in the second. A stage's own rank sends it nothing.

    Args:
        sending: seconds that a micro batch's hidden states are on their way.
        schedule: says which stage a rank has as which of its chunks.

    Raises:
        ValueError: orders in which ranks wait for each other.
    """
    ranks = len(orders)
    ends: dict[tuple[Do, int, int], float] = {}
    free, at = [0.0] * ranks, [0] * ranks
    own = [{schedule.stage_of(chunk, rank, ranks) for _, chunk, _ in actions} for rank, actions in enumerate(orders)]
    left = sum(map(len, orders))
    while left:
        before = left
        for rank, actions in enumerate(orders):
            while at[rank] < len(actions):
                do, chunk, number = actions[at[rank]]
                stage = schedule.stage_of(chunk, rank, ranks)
                sent = _sent(do, stage, number, len(stages), ends)
                if sent is None:
                    break
                begin, other = sent
                taken = stages[stage].forward if do is Do.FORWARD else stages[stage].backward * _part(do, stage)
                delay = sending if other >= 0 and other not in own[rank] else 0.0
                free[rank] = ends[_sends(do), stage, number] = max(free[rank], begin + delay) + taken
                at[rank] += 1
                left -= 1
        if left == before:
            raise ValueError("the ranks of a pipeline wait for each other")
    return max(free)


def _part(do: Do, stage: int) -> float:
    """Return the part of a stage's backward that an action runs."""
    if do is Do.BACKWARD:
        return 1.0
    if not stage:
        return float(do is Do.WEIGHT)
    return 0.5


def _sends(do: Do) -> Do:
    """Return the kind of action that another stage waits for: of a halved backward its first half is like a whole one."""
    return Do.BACKWARD if do is Do.INPUT else do


def _sent(do: Do, stage: int, number: int, stages: int, ends: dict[tuple[Do, int, int], float]) -> tuple[float, int] | None:
    """Return when an action's input is made, and by which stage (-1 for its own); None where that is not known yet."""
    if do is Do.WEIGHT or (do is Do.FORWARD and not stage):
        return 0.0, -1  # its rank has run the first half
    if do is not Do.FORWARD and stage == stages - 1:
        made, other = ends.get((Do.FORWARD, stage, number)), -1
    else:
        other = stage - 1 if do is Do.FORWARD else stage + 1
        made = ends.get((_sends(do), other, number))
    return None if made is None else (made, other)
