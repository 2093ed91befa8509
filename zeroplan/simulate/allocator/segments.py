"""Segments of device memory: taken from the device, searched for free blocks, and returned. The base of the Python twin.

Note [Caching allocator]
    Requests are rounded to 512 bytes and served by the small pool (up to 1 MiB) or the large one. Each pool keeps, for each
    stream, its free blocks ordered by size, then address; the first that is large enough is taken (best fit) and split when
    the rest is worth keeping: at least 512 bytes in the small pool, more than 1 MiB in the large one. A freed block merges
    with free neighbours of its segment. When nothing fits, the device is asked for a segment of 2 MiB, 20 MiB or the
    request rounded to 2 MiB. When the device has no more, unsplit cached segments are returned and the request is retried.

Note [Expandable segments]
    A pool has for each stream one range of addresses, larger than the device, of which pages of 2 or 20 MiB are mapped as
    needed. Unmapped ranges are blocks, too, kept by address. A request that no free block holds takes the lowest range of
    free and unmapped neighbours that does, and maps what is missing. Returning memory unmaps whole pages within free
    blocks, in the middle of a segment as well.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

from zeroplan.simulate.allocator.config import SMALL_SEGMENT, UNLIMITED, AllocatorConfig
from zeroplan.simulate.allocator.rules import Addresses


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


class Segments:
    """The device memory that the allocator holds.

    Args:
        config: the allocator's settings.
        limit: bytes that the device can give; UNLIMITED for no limit.
        device_memory: the device's whole memory in bytes, of which `config.memory_fraction` may be reserved.
        addresses: the addresses of the first segments, where they are known.
    """

    def __init__(self, config: AllocatorConfig, limit: int, device_memory: int, addresses: Sequence[int] = ()) -> None:
        self.config, self.limit, self.device_memory = config, limit, device_memory
        self.allowed = config.allowed(device_memory)
        self.collect_above = config.collect_above(device_memory)
        self.addresses = Addresses(addresses)
        self.pools: dict[tuple[bool, int], Pool] = {}  # by (small, stream)
        self.searches = {True: 0, False: 0}  # per size class, over all streams: the clock of garbage collection
        self.next_range = 1 << 50  # expandable segments lie above all others
        self.event = 0
        self.reserved = 0
        self.peak_reserved = 0  # since the latest mark
        self.top_reserved = 0
        self.changes = array("q")

    def _note(self, size: int, address: int) -> None:
        self.reserved += size
        self.changes.extend((self.event, size, address))
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self.top_reserved = max(self.top_reserved, self.reserved)

    def _pool(self, small: bool, stream: int) -> Pool:
        pool = self.pools.get((small, stream))
        if pool is None:
            pool = self.pools[small, stream] = Pool(small, stream, SMALL_SEGMENT if small else self.config.large_segment_size)
        return pool

    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        self.searches[pool.small] += 1
        cached = pool.cached
        at = bisect_left(cached, (size,))
        if at == len(cached):
            return None
        block = cached[at][2]
        if block.range_base >= 0:
            # A block that can still grow counts as large as it can become, so that whole blocks are taken first.
            while at + 1 < len(cached) and growable(cached[at + 1][2]) < growable(block):
                at += 1
                block = cached[at][2]
        most = self.config.max_split_size
        if size < most <= block.size:
            return None
        if size >= most and block.size >= size + self.config.max_non_split_rounding:
            return None
        del cached[at]
        return block

    def _cache(self, block: Block) -> None:
        block.age_base = self.searches[block.pool.small]
        block.pool.insert(block)

    def _merge(self, block: Block, other: Block | None) -> None:
        """Merge a free neighbour of the same kind into the block, which is in no list itself."""
        if other is None or not other.free or other.mapped != block.mapped:
            return
        if other.mapped:
            other.pool.remove(other)
        else:
            other.pool.remove_unmapped(other)
        if block.prev is other:
            block.address = other.address
            block.prev = other.prev
            if block.prev is not None:
                block.prev.next = block
        else:
            block.next = other.next
            if block.next is not None:
                block.next.prev = block
        block.size += other.size

    # Growing and giving back

    def _grow(self, pool: Pool, size: int, segment: int) -> Block | None:
        if self.reserved + segment > self.allowed:
            return None
        if self.config.expandable_segments:
            return self._grow_range(pool, size)
        if self.reserved + segment > self.limit:
            return None
        block = Block(self.addresses.take(segment), segment, pool)
        self._note(segment, block.address)
        return block

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        self.addresses.give_back(block.address)
        self._note(-block.size, block.address)

    def _release_unused(self) -> None:
        """Return unsplit segments to the device, and the whole pages within free blocks."""
        for small in (False, True):
            for key in sorted(key for key in self.pools if key[0] is small):
                pool = self.pools[key]
                for block in [block for _, _, block in pool.cached]:
                    if block.range_base >= 0:
                        self._unmap(block)
                    elif not block.split:
                        self._release(block)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Return blocks of at least `max_split_size`, as few as make room for `size`. True if they do."""
        most = self.config.max_split_size
        if most == UNLIMITED:
            return False
        size = max(size, most)
        at = bisect_left(pool.cached, (size,))
        if at < len(pool.cached) and pool.cached[at][2].range_base < 0:
            self._release(pool.cached[at][2])
            return True
        released = 0
        for block_size, _, block in reversed(pool.cached[:at]):
            if released >= size or block_size < most:
                break
            if block.range_base < 0:
                self._release(block)
                released += block_size
        return released >= size

    def _collect_garbage(self) -> None:
        """Return unsplit large blocks older than the average until reserved memory is below the threshold, or none is left."""
        if self.reserved <= self.collect_above:
            return
        target = self.reserved - self.collect_above
        clock = self.searches[False]
        pools = [self.pools[key] for key in sorted(key for key in self.pools if not key[0])]
        old = [(clock - block.age_base, block) for pool in pools for _, _, block in pool.cached if not block.split]
        freed = 0
        while old and freed < target:
            average = sum(age for age, _ in old) / len(old)
            for age, block in old:
                if age >= average:
                    freed += block.size
                    self._release(block)
            old = [(age, block) for age, block in old if age < average]

    # Expandable segments

    def _grow_range(self, pool: Pool, size: int) -> Block | None:
        block = self._find_range(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            assert following is not None
            if not self._map(following, min(size - block.size, following.size)):
                return None
            block = following
        pool.remove(block)
        return block

    def _find_range(self, pool: Pool, size: int) -> Block:
        for _, block in pool.unmapped:
            start = block.prev if block.prev is not None and block.prev.free else block
            room = 0
            at: Block | None = start
            while at is not None and at.free and room < size:
                room += at.size
                at = at.next
            if room >= size:
                return start
        # Without a limit a request may be larger than the device.
        room = -(-max(self.device_memory + self.device_memory // 8, size) // pool.page) * pool.page
        block = Block(self.next_range, room, pool, mapped=False, range_base=self.next_range)
        self.next_range += room
        pool.insert_unmapped(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Map whole pages from the block's start; False if the device has too few."""
        pool = block.pool
        size = -(-size // pool.page) * pool.page
        if self.reserved + size > self.limit:
            return False
        pool.remove_unmapped(block)
        start = block.address
        block.mapped = True
        if size < block.size:
            tail = Block(start + size, block.size - size, pool, block, block.next, mapped=False, range_base=block.range_base)
            if block.next is not None:
                block.next.prev = tail
            block.next = tail
            pool.insert_unmapped(tail)
            block.size = size
        self._merge(block, block.prev)
        self._merge(block, block.next)
        self._cache(block)
        self._note(size, start)
        return True

    def _unmap(self, block: Block) -> None:
        """Unmap the whole pages within a free block; what remains at either side stays cached."""
        pool, base = block.pool, block.range_base
        start = base - (base - block.address) // pool.page * pool.page  # rounded up to a page
        end = base + (block.address + block.size - base) // pool.page * pool.page
        if start >= end:
            return
        pool.remove(block)
        if start > block.address:
            head = Block(block.address, start - block.address, pool, block.prev, block, range_base=base)
            if block.prev is not None:
                block.prev.next = head
            block.prev = head
            self._cache(head)
        if block.address + block.size > end:
            tail = Block(end, block.address + block.size - end, pool, block, block.next, range_base=base)
            if block.next is not None:
                block.next.prev = tail
            block.next = tail
            self._cache(tail)
        block.address, block.size, block.mapped = start, end - start, False
        self._merge(block, block.prev)
        self._merge(block, block.next)
        if block.prev is not None or block.next is not None:
            pool.insert_unmapped(block)  # else the whole segment is given up
        self._note(start - end, start)
