"""Frees that wait for another stream, and where the host looks whether that stream has passed them.

Note [Another pace]
    A schedule's decisions do not hang on when a freed block can be used again. So runs that differ only in how far a device
    is behind are one recording with its completions elsewhere: :meth:`DeferredFrees.completions_with_lag` says where, in a
    small part of the time that playing the tape again would take.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

_ALL = 1 << 62


class Completions(Protocol):
    """Where completions are recorded: a :class:`~zeroplan.simulate.recorder.Recorder`."""

    @property
    def stored(self) -> int:
        """Number of events so far, an event block counted as one."""
        ...

    def complete(self, handle: int) -> None:
        """Record that the deferred free of `handle` takes effect."""
        ...


class DeferredFrees:
    """The deferred frees of one recording, by a clock that the schedule moves.

    Args:
        recorder: where the completions go.
        behind: how many ticks after a free its block is back.
    """

    __slots__ = ("_began", "_behind", "_chances", "_clock", "_freed", "_recorder", "_waiting")

    def __init__(self, recorder: Completions, behind: int) -> None:
        self._recorder, self._behind = recorder, behind
        self._clock = self._began = 0
        self._waiting: deque[tuple[int, int]] = deque()  # (due, block)
        self._freed: list[tuple[int, int, int]] = []  # (clock, that of the micro batch's begin, block)
        self._chances: list[tuple[int, int, int, int]] = []  # (event, clock, completed there, freed before)

    def begin(self) -> None:
        """A micro batch begins."""
        self._began = self._clock

    def tick(self) -> None:
        """The clock moves."""
        self._clock += 1

    def free(self, handle: int) -> None:
        """A block that another stream uses is freed."""
        self._waiting.append((self._clock + self._behind, handle))
        self._freed.append((self._clock, self._began, handle))

    def look(self) -> None:
        """The host looks: blocks that are due are back."""
        self._complete(self._clock)

    def settle(self) -> None:
        """The host has waited for the stream: all are back."""
        self._complete(_ALL)

    def _complete(self, until: int) -> None:
        event, before = self._recorder.stored, len(self._waiting)
        while self._waiting and self._waiting[0][0] <= until:
            self._recorder.complete(self._waiting.popleft()[1])
        self._chances.append((event, until, before - len(self._waiting), len(self._freed)))

    def completions_with_lag(self, back: Sequence[int]) -> list[tuple[int, int, list[int]]]:
        """Where blocks come back if the device is further behind.

        Args:
            back: by tick of a micro batch, the tick from which what is freed after it is back.

        Returns:
            By stored event in order: how many completions stand there, and the handles that complete there instead.
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
