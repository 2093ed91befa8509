"""Rounding of sizes, and the addresses at which the device puts segments."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from zeroplan.core.sizes import MIB
from zeroplan.simulate.allocator.config import (
    MIN_BLOCK,
    MIN_LARGE_ALLOC,
    ROUND_LARGE,
    ROUNDUP_INTERVALS,
    SMALL_SEGMENT,
    SMALL_SIZE,
)


def round_size(size: int, divisions: Sequence[int] = ()) -> int:
    """Return the bytes of the block for a request: the next multiple of 512, or the next division between two powers of two."""
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
    """Return the bytes asked of the device for a block of `size` bytes."""
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    return large_segment if size < MIN_LARGE_ALLOC else -(-size // ROUND_LARGE) * ROUND_LARGE


#: The device takes address space in regions of whole multiples of this.
REGION = 32 * MIB
#: Regions are placed downwards from here; expandable segments lie above.
REGIONS_END = 1 << 48


class Addresses:
    """Addresses of the device's segments. Of two free blocks of one size the allocator takes the lower one, so addresses
    matter.

    As recorded histories show, new regions of address space (whole multiples of 32 MiB) lie ever lower, and what is left of
    a region, or was given back, is filled first, from its lower end.

    Args:
        given: the first addresses, if they are known.
    """

    def __init__(self, given: Sequence[int]) -> None:
        self.given = deque(given)
        self.lowest = REGIONS_END
        self.taken: dict[int, int] = {}  # start: size
        self.gaps: list[tuple[int, int]] = []  # (start, end), ordered

    def take(self, size: int) -> int:
        """Return the address of a new segment of `size` bytes."""
        if self.given:
            return self.given.popleft()
        size = -(-size // ROUND_LARGE) * ROUND_LARGE
        for at, (start, end) in enumerate(self.gaps):
            if end - start >= size:
                self.gaps[at : at + 1] = [(start + size, end)] if end - start > size else []
                break
        else:
            end = self.lowest
            start = self.lowest = end - -(-size // REGION) * REGION
            if end - start > size:
                self._add_gap(start + size, end)
        self.taken[start] = size
        return start

    def give_back(self, address: int) -> None:
        """Free the segment at `address`, if :meth:`take` put it there."""
        if address in self.taken:
            self._add_gap(address, address + self.taken.pop(address))

    def _add_gap(self, start: int, end: int) -> None:
        at = bisect_left(self.gaps, (start,))
        if at < len(self.gaps) and self.gaps[at][0] == end:
            end = self.gaps.pop(at)[1]
        if at and self.gaps[at - 1][1] == start:
            at -= 1
            start = self.gaps.pop(at)[0]
        self.gaps.insert(at, (start, end))
