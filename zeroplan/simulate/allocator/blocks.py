"""Blocks of device memory, and the free ones of a pool, as the allocator's Python twin keeps them."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Block:
    """A range of addresses: handed out, waiting for streams, cached, or, in an expandable segment, not mapped."""

    address: int
    size: int
    pool: Pool
    prev: Block | None = None
    next: Block | None = None
    handle: int = -1  # of the latest allocation
    allocated: bool = False
    mapped: bool = True
    pending: int = 0  # streams that the free waits for
    streams: set[int] | None = None  # recorded on the block
    requested: int = 0
    age_base: int = 0
    range_base: int = -1  # start of its expandable segment, -1 if it is in none

    @property
    def free(self) -> bool:
        """Whether the block is neither handed out nor waiting for a stream."""
        return not self.allocated and self.pending == 0

    @property
    def split(self) -> bool:
        """Whether its segment has other blocks."""
        return self.prev is not None or self.next is not None


class Pool:
    """Free blocks of one size class and stream."""

    def __init__(self, small: bool, stream: int, page: int) -> None:
        self.small, self.stream, self.page = small, stream, page
        self.cached: list[tuple[int, int, Block]] = []  # by size, then address
        self.unmapped: list[tuple[int, Block]] = []  # by address

    def insert(self, block: Block) -> None:
        """Add a free block."""
        insort(self.cached, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        """Remove a free block."""
        del self.cached[bisect_left(self.cached, (block.size, block.address))]

    def insert_unmapped(self, block: Block) -> None:
        """Add a range that is not mapped."""
        insort(self.unmapped, (block.address, block))

    def remove_unmapped(self, block: Block) -> None:
        """Remove a range that is not mapped."""
        del self.unmapped[bisect_left(self.unmapped, (block.address,))]


def growable(block: Block) -> int:
    """Return the bytes of the block and of the unmapped range behind it."""
    return block.size + (block.next.size if block.next is not None and not block.next.mapped else 0)
