"""A simulated run over time: totals at each mark, the buffers alive at the peak, curves to draw."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress, pairwise
from typing import Protocol, TypeVar

from zeroplan.core.buffers import Buffer
from zeroplan.simulate.allocator import native
from zeroplan.simulate.allocator.config import AllocatorConfig
from zeroplan.simulate.allocator.events import OP_BITS, AllocatorOp, AllocatorResult, OutOfMemory
from zeroplan.simulate.allocator.run import run_allocator

#: Who asked for a block: a module's index or name.
Note = int | str
#: What the bytes of an allocation are, and who asked for them.
Label = tuple[Buffer, Note]

_OP_MASK = (1 << OP_BITS) - 1
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class TimelineMark:
    """Bytes at a named point of a run.

    Attributes:
        name: the point's name.
        allocated, reserved: bytes at this point.
        peak, peak_reserved: the most bytes allocated and reserved since the mark before.
        active: allocated bytes, and those of freed blocks that still wait for a stream.
        largest_free: bytes of the largest cached block.
    """

    name: str
    allocated: int
    peak: int
    reserved: int
    peak_reserved: int
    active: int
    largest_free: int


@dataclass(frozen=True, slots=True)
class Curve:
    """A run in a few hundred points. Each point is the event with the highest allocated total in its slice of events.

    Events have an order but no times. The part between two marks is drawn as wide as the square root of its number of events,
    so that an optimizer step of fifty events is visible beside a backward of fifty thousand.

    Attributes:
        events: the index of the event at each point.
        positions: where to draw each point, from 0 (the first event) to 1 (the last).
        allocated, reserved: bytes at each point; `reserved` is the most within the slice.
        marks: each mark's position and name, in order.
    """

    events: tuple[int, ...]
    positions: tuple[float, ...]
    allocated: tuple[int, ...]
    reserved: tuple[int, ...]
    marks: tuple[tuple[float, str], ...]


class Labels(Protocol):
    """The names that a recording gives to its marks and handles."""

    @property
    def marks(self) -> Sequence[str]:
        """The marks' names, in order."""

    def labels_of(self, handles: Iterable[int]) -> list[Label]:
        """Return the label of each handle."""


class Timeline:
    """A recording with what the allocator did. All sizes are bytes; blocks are as the allocator rounded them.

    Attributes:
        marks: the named points that the run reached, in order.
        peak_allocated, peak_reserved: the most bytes over the whole run.
        oom: the request that could not be served; None if all were served.
    """

    def __init__(
        self,
        code: array[int],
        value: array[int],
        labels: Labels,
        result: AllocatorResult,
    ) -> None:
        self._code, self._value, self._labels = code, value, labels
        self.result = result
        self.marks = tuple(
            TimelineMark(name, at.allocated, at.peak_allocated, at.reserved, at.peak_reserved, at.active, at.largest_free)
            for name, at in zip(labels.marks, result.marks, strict=False)
        )
        self.peak_allocated = result.peak_allocated
        self.peak_reserved = result.peak_reserved
        self.oom: OutOfMemory | None = result.oom

    @property
    def recorded(self) -> tuple[array[int], array[int], Labels]:
        """The events' code and value, and their labels."""
        return self._code, self._value, self._labels

    def under(self, limit: int, config: AllocatorConfig | None = None, *, device_memory: int | None = None) -> Timeline:
        """Return the timeline of the same events where the device gives the allocator `limit` bytes; arguments as of
        :func:`simulate`.
        """
        result = run_allocator(
            self._code, self._value, config or AllocatorConfig(), limit=limit, device_memory=device_memory or limit
        )
        return Timeline(self._code, self._value, self._labels, result)

    def peak_mark(self) -> str:
        """Return the name of the first mark after the peak of allocated memory; empty if none follows."""
        for mark, totals in zip(self.marks, self.result.marks, strict=True):
            if totals.event > self.result.peak_event:
                return mark.name
        return ""

    def alive(self, event: int | None = None) -> list[int]:
        """The handles that are alive after an event, or at the peak of allocated memory if None, in order of allocation."""
        last = self.result.peak_event if event is None else event
        made = len(self.result.block_sizes)
        flags = native.alive(self._code, self._value, last + 1, made)
        if flags is None:
            flags = self._alive(last + 1, made)
        return list(compress(range(made), flags))

    def _alive(self, events: int, made: int) -> bytearray:
        flags = bytearray(made)
        handle = 0
        free, alloc = int(AllocatorOp.FREE), int(AllocatorOp.ALLOC)
        for word, value in zip(self._code[:events], self._value[:events], strict=True):
            op = word & _OP_MASK
            if op == alloc:
                flags[handle] = 1
                handle += 1
            elif op == free:
                flags[value] = 0
        return flags

    def alive_by_buffer(self, event: int | None = None) -> dict[Buffer, int]:
        """Return the bytes alive after an event, or at the peak if None, by buffer, largest first; they add up to allocated."""
        handles, labels = self._at_peak if event is None else self._with_labels(self.alive(event))
        return self._grouped([buffer for buffer, _ in labels], handles)

    def alive_by_buffer_and_note(self) -> dict[Label, int]:
        """Return the bytes alive at the peak by buffer and by the note of who asked for the block."""
        handles, labels = self._at_peak
        return self._grouped(labels, handles)

    @cached_property
    def _at_peak(self) -> tuple[list[int], list[Label]]:
        return self._with_labels(self.alive())

    def _with_labels(self, handles: list[int]) -> tuple[list[int], list[Label]]:
        return handles, self._labels.labels_of(handles)

    def _grouped(self, keys: Sequence[_Key], handles: Sequence[int]) -> dict[_Key, int]:
        sizes = self.result.block_sizes
        totals: dict[_Key, int] = {}
        for key, handle in zip(keys, handles, strict=True):
            totals[key] = totals.get(key, 0) + sizes[handle]
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def curve(self, points: int = 600) -> Curve:
        """Sample the run at about `points` points, for drawing."""
        allocated = self.allocated_by_event()
        slices, positions, marks = self._slices(len(allocated), points)
        chosen = [max(range(start, end), key=allocated.__getitem__) for start, end in slices]
        return Curve(
            tuple(chosen),
            tuple(positions),
            tuple(allocated[event] for event in chosen),
            tuple(self._reserved(slices)),
            tuple(marks),
        )

    def _slices(self, count: int, points: int) -> tuple[list[tuple[int, int]], list[float], list[tuple[float, str]]]:
        """Divide the events into slices; returns them with the position of each, and the marks' positions. See
        :class:`Curve`.
        """
        names = {totals.event: mark.name for mark, totals in zip(self.marks, self.result.marks, strict=True)}
        bounds = sorted({0, count, *(event + 1 for event in names)})
        spans = [(start, end) for start, end in pairwise(bounds) if end > start]
        whole = sum(math.sqrt(end - start) for start, end in spans) or 1.0
        slices: list[tuple[int, int]] = []
        positions: list[float] = []
        marks: list[tuple[float, str]] = []
        left = 0.0
        for start, end in spans:
            width = math.sqrt(end - start) / whole
            parts = min(end - start, max(1, round(points * width)))
            for part in range(parts):
                slices.append((start + (end - start) * part // parts, start + (end - start) * (part + 1) // parts))
                positions.append(left + width * (part + 0.5) / parts)
            left += width
            if end - 1 in names:
                marks.append((left, names[end - 1]))
        return slices, positions, marks

    def allocated_by_event(self) -> list[int]:
        """Return the bytes allocated after each event."""
        sizes, free, alloc = self.result.block_sizes, int(AllocatorOp.FREE), int(AllocatorOp.ALLOC)
        now = handle = 0
        totals = []
        for at in range(self.result.events):
            op = self._code[at] & _OP_MASK
            if op == alloc:
                now += sizes[handle]
                handle += 1
            elif op == free:
                now -= sizes[self._value[at]]
            totals.append(now)
        return totals

    def requested(self) -> list[tuple[int, int]]:
        """Return for each mark the bytes as requested, not rounded: the most alive since the mark before, and those alive at
        it.
        """
        sizes: list[int] = []
        ends = {mark.event for mark in self.result.marks}
        alloc, free = int(AllocatorOp.ALLOC), int(AllocatorOp.FREE)
        now = peak = 0
        totals: list[tuple[int, int]] = []
        for at in range(self.result.events):
            op = self._code[at] & _OP_MASK
            if op == alloc:
                sizes.append(self._value[at])
                now += sizes[-1]
                peak = max(peak, now)
            elif op == free:
                now -= sizes[self._value[at]]
            if at in ends:
                totals.append((peak, now))
                peak = now
        return totals

    def _reserved(self, slices: Sequence[tuple[int, int]]) -> list[int]:
        """Return the most bytes reserved within each slice of events."""
        changes = self.result.segments
        now = at = 0
        most = []
        for _, end in slices:
            top = now
            while at < len(changes) and changes[at].event < end:
                now += changes[at].size
                top = max(top, now)
                at += 1
            most.append(top)
        return most

    def stacked(self, chosen: Sequence[int], group: Callable[[Buffer, Note], _Key]) -> dict[_Key, tuple[int, ...]]:
        """Return for each group of allocations its bytes after each of the chosen events, which ascend; `group` names an
        allocation's group by its label. They add up to what is allocated.
        """
        sizes, free, alloc = self.result.block_sizes, int(AllocatorOp.FREE), int(AllocatorOp.ALLOC)
        groups = [group(buffer, note) for buffer, note in self._labels.labels_of(range(len(sizes)))]
        now: dict[_Key, int] = {}
        rows: list[dict[_Key, int]] = []
        handle = start = 0
        for event in chosen:
            for at in range(start, event + 1):
                op = self._code[at] & _OP_MASK
                if op == alloc:
                    key = groups[handle]
                    now[key] = now.get(key, 0) + sizes[handle]
                    handle += 1
                elif op == free:
                    now[groups[self._value[at]]] -= sizes[self._value[at]]
            start = event + 1
            rows.append(dict(now))
        return {key: tuple(row.get(key, 0) for row in rows) for key in now}
