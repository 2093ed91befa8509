"""What the allocator gives back to a full device and takes again, step after step.

Note [Emptying the cache]
    When the device has no memory left, the allocator waits for all streams, returns every cached segment that nothing lives in
    (``cudaFree``, which waits for the device), and asks again. A run near the card's limit gets through in this way, and does
    so anew in each step: the host waits for the GPU, and the GPU for each ``cudaFree`` and ``cudaMalloc``.
    Source: c10/cuda/CUDACachingAllocator.cpp, release_cached_blocks
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from zeroplan.simulate.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Churn:
    """Of one optimizer step: how often the cache was emptied; segments returned and taken; bytes of them, both ways."""

    emptied: int = 0
    segments: int = 0
    bytes: int = 0

    def __bool__(self) -> bool:
        """Whether there is any."""
        return self.segments > 0

    @classmethod
    def of(cls, timeline: Timeline, micro_batches: int = 1) -> Churn:
        """Of a timeline's last step, in which steps repeat.

        Args:
            timeline: with the marks of :func:`zeroplan.engines.player.play`, which plays a few micro batches of a window.
            micro_batches: those of the whole window; the last but one that was played stands for those left out.
        """
        ends = [-1, *(mark.event for mark in timeline.result.marks)]
        stretches = [(mark.name, span) for mark, span in zip(timeline.marks, pairwise(ends), strict=True)]
        steps = [at for at, (name, _) in enumerate(stretches) if name.startswith("step")]
        if not steps:
            return cls()
        last = stretches[(steps[-2] if len(steps) > 1 else -1) + 1 : steps[-1] + 1]
        played = sum(name == "fwd" for name, _ in last)
        left_out = max(0, micro_batches - played)
        total = cls()
        for micro, (_, span) in enumerate(last):
            total += cls._within(timeline, span)
            if left_out and played > 1 and micro // 2 == played - 2:  # a forward and a backward each
                repeated = cls._within(timeline, span)
                total += cls(repeated.emptied * left_out, repeated.segments * left_out, repeated.bytes * left_out)
        return total if total.emptied else cls()  # what only grows is not yet steady

    @classmethod
    def _within(cls, timeline: Timeline, span: tuple[int, int]) -> Churn:
        changes = [change for change in timeline.result.segments if span[0] < change.event <= span[1]]
        emptied = {change.event for change in changes if change.size < 0}
        return cls(len(emptied), len(changes), sum(abs(change.size) for change in changes))

    def __add__(self, other: Churn) -> Churn:
        """Both together."""
        return Churn(self.emptied + other.emptied, self.segments + other.segments, self.bytes + other.bytes)

    @classmethod
    def most(cls, runs: Iterable[Churn]) -> Churn:
        """That of the run that gives back the most."""
        return max(runs, key=lambda one: (one.bytes, one.segments), default=cls())


NO_CHURN = Churn()
