"""The order of micro batches on a rank of a folded pipeline. See Note [Folded schedules] in ``pipeline_order.py``.

Chunk 0 of rank r is the stage on the way there, chunk 1 the one on the way back.
"""

from __future__ import annotations

from collections import Counter, deque

from zeroplan.core.pipeline_action import Action, Do

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
