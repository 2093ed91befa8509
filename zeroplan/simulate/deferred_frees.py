"""Frees that wait for another stream, and the points at which the host polls that stream.

Note [Another lag]
    A schedule does not depend on when a freed block can be used again. So runs that differ only in how far the device is
    behind the host share one recording, with the completions of deferred frees at other events.
    :meth:`DeferredFrees.completions_with_lag` says at which, in far less time than playing the tape again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

_ALL = 1 << 62


class Completions(Protocol):
    """The part of a :class:`~zeroplan.simulate.recorder.Recorder` that records completions."""

    @property
    def stored(self) -> int:
        """The number of events so far; an event block counts as one."""
        ...

    def complete(self, handle: int) -> None:
        """Record that the deferred free of `handle` takes effect."""
        ...


class DeferredFrees:
    """The deferred frees of one recording, on a clock whose ticks the schedule counts.

    Args:
        recorder: records the completions.
        behind: the number of ticks after a free at which it completes.
    """

    __slots__ = ("_began", "_behind", "_chances", "_clock", "_freed", "_recorder", "_waiting")

    def __init__(self, recorder: Completions, behind: int) -> None:
        self._recorder, self._behind = recorder, behind
        self._clock = self._began = 0
        self._waiting: deque[tuple[int, int]] = deque()  # (due, block)
        self._freed: list[tuple[int, int, int]] = []  # (clock, clock at the micro batch's begin, block)
        self._chances: list[tuple[int, int, int, int]] = []  # (event, clock, completed there, freed before)

    def begin(self) -> None:
        """Note that a micro batch begins."""
        self._began = self._clock

    def tick(self) -> None:
        """Advance the clock by one."""
        self._clock += 1

    def free(self, handle: int) -> None:
        """Free a block that another stream uses."""
        self._waiting.append((self._clock + self._behind, handle))
        self._freed.append((self._clock, self._began, handle))

    def poll(self) -> None:
        """Complete the frees that are due, as the host does when it polls the stream's events."""
        self._complete(self._clock)

    def complete_all(self) -> None:
        """Complete every free, as when the host has waited for the stream."""
        self._complete(_ALL)

    def _complete(self, until: int) -> None:
        event, before = self._recorder.stored, len(self._waiting)
        while self._waiting and self._waiting[0][0] <= until:
            self._recorder.complete(self._waiting.popleft()[1])
        self._chances.append((event, until, before - len(self._waiting), len(self._freed)))

    def completions_with_lag(self, back: Sequence[int]) -> list[tuple[int, int, list[int]]]:
        """The completions of the same run where the device is further behind.

        Args:
            back: for each tick of a micro batch, the tick at which a free after it completes.

        Returns:
            For each stored event with a change, in order: the event, how many completions are recorded there, and the handles
            that complete there instead.
        """
        due: deque[tuple[int, int]] = deque()
        points: list[tuple[int, int, list[int]]] = []
        taken = latest = 0
        for event, until, there, freed in self._chances:
            for clock, began, handle in self._freed[taken:freed]:
                at = clock - began - 1
                known = began + 1 + back[at] if 0 <= at < len(back) else 0
                latest = max(latest, clock + self._behind, known)  # a stream goes in order
                due.append((latest, handle))
            taken = freed
            returned: list[int] = []
            while due and due[0][0] <= until:
                returned.append(due.popleft()[1])
            if until == _ALL:
                latest = 0
            if returned or there:
                points.append((event, there, returned))
        return points
