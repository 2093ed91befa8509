"""Memory that the allocator returns to a full device and allocates again in every optimizer step.

Note [Emptying the cache]
    When the device has no memory left, the allocator waits for all streams, returns every cached segment that nothing lives in
    (``cudaFree``, which waits for the device), and asks again. A run near the card's limit gets through in this way, and does
    so anew in each step: the host waits for the GPU, and the GPU for each ``cudaFree`` and ``cudaMalloc``. A range of an
    expandable segment is unmapped and mapped page by page, and each page is a piece of memory of its own.
    Source: c10/cuda/CUDACachingAllocator.cpp, release_cached_blocks, ExpandableSegment
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from zeroplan.simulate.allocator.events import SegmentChange
from zeroplan.simulate.timeline import Timeline


@dataclass(frozen=True, slots=True)
class CacheRelease:
    """Calls and bytes that one optimizer step releases and allocates again.

    Attributes:
        emptied: how often the cache was emptied.
        segments: calls that free or allocate a segment, or map or unmap a range of one.
        bytes: bytes freed and allocated, together.
        pages: pages of expandable segments among them.
    """

    emptied: int = 0
    segments: int = 0
    bytes: int = 0
    pages: int = 0

    def __bool__(self) -> bool:
        """Return whether anything was released."""
        return self.segments > 0

    @classmethod
    def of(cls, timeline: Timeline, micro_batches: int = 1, page: int = 0) -> CacheRelease:
        """Measure the release of a timeline's last step, which later steps repeat.

        Args:
            timeline: a run with the marks of :func:`zeroplan.engines.player.play`, which plays a few micro batches a step.
            micro_batches: micro batches of a step; the last but one that was played stands for those left out.
            page: bytes of a page of an expandable segment; 0 where segments are not expandable.
        """
        ends = [-1, *(mark.event for mark in timeline.result.marks)]
        spans = [(mark.name, span) for mark, span in zip(timeline.marks, pairwise(ends), strict=True)]
        steps = [at for at, (name, _) in enumerate(spans) if name.startswith("step")]
        if not steps:
            return cls()
        last = spans[(steps[-2] if len(steps) > 1 else -1) + 1 : steps[-1] + 1]
        played = sum(name == "fwd" for name, _ in last)
        left_out = max(0, micro_batches - played)
        total = cls()
        changes = timeline.result.segments
        for micro, (_, span) in enumerate(last):
            once = cls._within(changes, span, page)
            total += once
            if left_out and played > 1 and micro // 2 == played - 2:  # a forward and a backward each
                total += cls(*(count * left_out for count in (once.emptied, once.segments, once.bytes, once.pages)))
        return total if total.emptied else cls()  # what only grows is not yet steady

    @classmethod
    def _within(cls, changes: Sequence[SegmentChange], span: tuple[int, int], page: int) -> CacheRelease:
        inside = [change for change in changes if span[0] < change.event <= span[1]]
        emptied = {change.event for change in inside if change.size < 0}
        pages = sum(max(1, abs(change.size) // page) for change in inside) if page else 0
        return cls(len(emptied), len(inside), sum(abs(change.size) for change in inside), pages)

    def __add__(self, other: CacheRelease) -> CacheRelease:
        """Return the sum of both."""
        return CacheRelease(
            self.emptied + other.emptied, self.segments + other.segments, self.bytes + other.bytes, self.pages + other.pages
        )

    @classmethod
    def most(cls, runs: Iterable[CacheRelease]) -> CacheRelease:
        """The release of the run that returns the most bytes; an empty one if there is no run."""
        return max(runs, key=lambda one: (one.bytes, one.segments), default=cls())


NO_RELEASE = CacheRelease()
