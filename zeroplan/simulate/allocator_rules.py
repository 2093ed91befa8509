"""How sizes are rounded, and where the device puts segments."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from zeroplan.simulate.allocator_config import (
    MIN_BLOCK,
    MIN_LARGE_ALLOC,
    ROUND_LARGE,
    ROUNDUP_INTERVALS,
    SMALL_SEGMENT,
    SMALL_SIZE,
)


def round_size(size: int, divisions: Sequence[int] = ()) -> int:
    """Bytes of the block for a request: the next multiple of 512, or the next division between two powers of two."""
    if size < MIN_BLOCK:
        return MIN_BLOCK
    if divisions:
        # Intervals are counted from 1 MiB, in powers of two.
        count = divisions[min(max(size.bit_length() - 21, 0), ROUNDUP_INTERVALS - 1)]
        if count > 0 and size > MIN_BLOCK * count:
            if count == 1:
                return size
            floor = 1 << (size.bit_length() - 1)
            step = floor >> (count.bit_length() - 1)
            return size if size % step == 0 else size - size % step + step
    return -(-size // MIN_BLOCK) * MIN_BLOCK


def segment_size(size: int, large_segment: int) -> int:
    """Bytes asked of the device for a block of `size` bytes."""
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    return large_segment if size < MIN_LARGE_ALLOC else -(-size // ROUND_LARGE) * ROUND_LARGE


class Addresses:
    """Where the device puts segments: at the lowest gap that holds them, in granules of 2 MiB."""

    def __init__(self, given: Sequence[int]) -> None:
        self.given = deque(given)
        self.taken: list[tuple[int, int]] = []  # (start, end), ordered

    def take(self, size: int) -> int:
        """Address of a new segment of `size` bytes."""
        if self.given:
            return self.given.popleft()
        size = -(-size // ROUND_LARGE) * ROUND_LARGE
        start = 0
        for at, (first, end) in enumerate(self.taken):
            if first - start >= size:
                self.taken.insert(at, (start, start + size))
                return start
            start = end
        self.taken.append((start, start + size))
        return start

    def give_back(self, address: int) -> None:
        """Frees the segment at `address`, if it was put there by :meth:`take` itself."""
        at = bisect_left(self.taken, (address,))
        if at < len(self.taken) and self.taken[at][0] == address:
            del self.taken[at]
