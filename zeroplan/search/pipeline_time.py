"""How long a pipeline takes for a step: its schedule, played with times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeroplan.core.pipeline_order import Action, Do


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of one micro batch's forward and backward on one stage."""

    forward: float
    backward: float


def play(orders: Sequence[Sequence[Action]], stages: Sequence[StageTime], sending: float) -> float:
    """Return the seconds from the first forward to the last backward of a step.

    A rank works off its actions in their order. A forward waits for the stage before it, a backward for the stage behind it,
    and both for what these send. The halves of a backward take as long as each other: as many products make the gradients of
    inputs as those of weights. A first stage runs both in the second.

    Args:
        orders: each rank's forwards and backwards; chunk c of rank r is stage c × ranks + r.
        stages: the time of each stage.
        sending: seconds that a micro batch's hidden states are on their way.

    Raises:
        ValueError: orders in which ranks wait for each other.
    """
    ranks = len(orders)
    ends: dict[tuple[Do, int, int], float] = {}
    free, at = [0.0] * ranks, [0] * ranks
    left = sum(map(len, orders))
    while left:
        before = left
        for rank, actions in enumerate(orders):
            while at[rank] < len(actions):
                begin = _begin(actions[at[rank]], rank, ranks, len(stages), ends, sending)
                if begin is None:
                    break
                do, chunk, number = actions[at[rank]]
                stage = chunk * ranks + rank
                taken = stages[stage].forward if do is Do.FORWARD else stages[stage].backward * _part(do, stage)
                free[rank] = ends[do, stage, number] = max(free[rank], begin) + taken
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


def _begin(
    action: Action, rank: int, ranks: int, stages: int, ends: dict[tuple[Do, int, int], float], sending: float
) -> float | None:
    """Return when an action's input is there; None where that is not known yet."""
    do, chunk, number = action
    stage = chunk * ranks + rank
    if do is Do.WEIGHT:
        return 0.0  # its rank has run the first half
    if do is Do.FORWARD:
        if not stage:
            return 0.0
        sent = ends.get((do, stage - 1, number))
    elif stage == stages - 1:
        return ends.get((Do.FORWARD, stage, number))
    else:
        sent = ends.get((do, stage + 1, number))
    return None if sent is None else sent + sending
