"""The CUDA caching allocator in plain Python: the readable twin of ``csrc/cpu/allocator.cpp``, equal to it event by event.

Rules read from torch's ``c10/cuda/CUDACachingAllocator.cpp`` and ``c10/core/CachingDeviceAllocator.h``.

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
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from zeroplan.simulate.allocator_config import MIN_BLOCK, SMALL_SEGMENT, SMALL_SIZE, UNLIMITED, AllocatorConfig
from zeroplan.simulate.allocator_events import (
    OP_BITS,
    AllocatorOp,
    AllocatorResult,
    BadStream,
    MarkTotals,
    OutOfMemory,
    SegmentChange,
)
from zeroplan.simulate.allocator_rules import Addresses, round_size, segment_size

_OP_MASK = (1 << OP_BITS) - 1


@dataclass(slots=True, eq=False)
class _Block:
    address: int
    size: int
    pool: _Pool
    prev: _Block | None = None
    next: _Block | None = None
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
        return not self.allocated and self.pending == 0

    @property
    def split(self) -> bool:
        return self.prev is not None or self.next is not None


class _Pool:
    """Free blocks of one size class and stream."""

    def __init__(self, small: bool, stream: int, page: int) -> None:
        self.small, self.stream, self.page = small, stream, page
        self.cached: list[tuple[int, int, _Block]] = []  # by size, then address
        self.unmapped: list[tuple[int, _Block]] = []  # by address

    def insert(self, block: _Block) -> None:
        insort(self.cached, (block.size, block.address, block))

    def remove(self, block: _Block) -> None:
        del self.cached[bisect_left(self.cached, (block.size, block.address))]

    def insert_unmapped(self, block: _Block) -> None:
        insort(self.unmapped, (block.address, block))

    def remove_unmapped(self, block: _Block) -> None:
        del self.unmapped[bisect_left(self.unmapped, (block.address,))]


class PythonAllocator:
    """One device's allocator.

    Args:
        config: its settings.
        limit: bytes that the device can give it, UNLIMITED if it never runs out.
        device_memory: the device's whole memory in bytes, of which `config.memory_fraction` may be reserved.
        addresses: where the device puts the first segments, if that is known.
    """

    def __init__(self, config: AllocatorConfig, limit: int, device_memory: int, addresses: Sequence[int] = ()) -> None:
        self.config, self.limit = config, limit
        self.allowed = int(config.memory_fraction * device_memory) if config.memory_fraction < 1 else UNLIMITED
        collects = config.garbage_collection_threshold > 0 and self.allowed != UNLIMITED
        self.collect_above = int(config.garbage_collection_threshold * self.allowed) if collects else UNLIMITED
        self.device_memory = device_memory
        self.divisions = config.roundup_power2_divisions if any(config.roundup_power2_divisions) else ()
        self.addresses = Addresses(addresses)
        self.pools: dict[tuple[bool, int], _Pool] = {}  # by (small, stream)
        self.searches = {True: 0, False: 0}  # per size class, over all streams: the clock of garbage collection
        self.live: dict[int, _Block] = {}  # by handle, until freed
        self.pending: dict[int, deque[tuple[int, _Block]]] = {}  # by stream: deferred frees in order
        self.ready: dict[int, int] = {}  # by stream: how many of them are done
        self.deferred: dict[int, _Block] = {}  # by handle
        self.next_range = 1 << 50  # expandable segments lie above all others
        self.event = self.retries = 0
        self.allocated = self.reserved = self.requested = self.active = 0
        self.peak_allocated = self.peak_reserved = 0  # since the latest mark
        self.top_allocated = self.top_reserved = 0
        self.top_event = self.top_reserved_event = -1
        self.segments: list[SegmentChange] = []
        self.block_sizes = array("q")
        self.marks: list[MarkTotals] = []

    def run(self, code: Sequence[int], value: Sequence[int]) -> AllocatorResult:
        """Handles all events, or those up to the first request that cannot be served.

        Raises:
            BadStream: see there.
        """
        oom = None
        for self.event, (word, operand) in enumerate(zip(code, value, strict=True)):
            op, stream = word & _OP_MASK, word >> OP_BITS
            if op == AllocatorOp.ALLOC:
                oom = self._alloc(operand, stream)
                if oom is not None:
                    break
            elif op == AllocatorOp.FREE:
                self._free(self._take(self.live, operand))
            elif op == AllocatorOp.RECORD_STREAM:
                self._record_stream(operand, stream)
            elif op == AllocatorOp.SYNC:
                self.ready[stream] = len(self.pending.get(stream, ()))
            elif op == AllocatorOp.COMPLETE:
                block = self._take(self.deferred, operand)
                if block is not None:
                    self._reclaim(block)
            elif op == AllocatorOp.EMPTY_CACHE:
                self._release_all()
            elif op == AllocatorOp.MARK:
                self.marks.append(self._totals())
                self._reset_peaks()
            elif op == AllocatorOp.RESET_PEAK:
                self._reset_peaks()
            else:
                raise BadStream(f"event {self.event}: operation {op} is unknown")
        else:
            self.event = len(code)
        return AllocatorResult(
            self.event,
            tuple(self.marks),
            self.block_sizes,
            tuple(self.segments),
            self.top_allocated,
            self.top_event,
            self.top_reserved,
            self.top_reserved_event,
            self._totals(),
            self.retries,
            oom,
        )

    def _reset_peaks(self) -> None:
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def _totals(self) -> MarkTotals:
        return MarkTotals(
            self.event,
            self.allocated,
            self.peak_allocated,
            self.reserved,
            self.peak_reserved,
            self.requested,
            self.active,
            max((pool.cached[-1][0] for pool in self.pools.values() if pool.cached), default=0),
        )

    def _take(self, blocks: dict[int, _Block], handle: int) -> _Block | None:
        if handle in blocks:
            return blocks.pop(handle)
        if 0 <= handle < len(self.block_sizes) and self.block_sizes[handle] == 0:
            return None  # a request of nothing has no block
        raise BadStream(f"event {self.event}: handle {handle} is not {'live' if blocks is self.live else 'awaiting a stream'}")

    # Allocating

    def _alloc(self, requested: int, stream: int) -> OutOfMemory | None:
        if requested < 0:
            raise BadStream(f"event {self.event}: a request of {requested} bytes")
        self._process_events()
        handle = len(self.block_sizes)
        self.block_sizes.append(0)
        if requested == 0:
            return None
        size = round_size(requested, self.divisions)
        small = size <= SMALL_SIZE
        pool = self._pool(small, stream)
        segment = segment_size(size, self.config.large_segment_size)
        block = self._best_fit(pool, size)
        if block is None:
            if self.collect_above != UNLIMITED:
                self._collect_garbage()
            block = self._grow(pool, size, segment)
            if block is None and self._release_oversize(pool, size):
                block = self._grow(pool, size, segment)
            if block is None:
                self._release_all()
                self.retries += 1
                block = self._grow(pool, size, segment)
            if block is None:
                totals = self._totals()
                return OutOfMemory(
                    self.event, handle, requested, segment, totals.allocated, totals.reserved, totals.largest_free
                )
        self._hand_out(block, size, requested, handle)
        return None

    def _pool(self, small: bool, stream: int) -> _Pool:
        pool = self.pools.get((small, stream))
        if pool is None:
            pool = self.pools[small, stream] = _Pool(small, stream, SMALL_SEGMENT if small else self.config.large_segment_size)
        return pool

    def _best_fit(self, pool: _Pool, size: int) -> _Block | None:
        self.searches[pool.small] += 1
        cached = pool.cached
        at = bisect_left(cached, (size,))
        if at == len(cached):
            return None
        block = cached[at][2]
        if block.range_base >= 0:
            # A block that can still grow counts as large as it can become, so that whole blocks are taken first.
            while at + 1 < len(cached) and _growable(cached[at + 1][2]) < _growable(block):
                at += 1
                block = cached[at][2]
        most = self.config.max_split_size
        if size < most <= block.size:
            return None
        if size >= most and block.size >= size + self.config.max_non_split_rounding:
            return None
        del cached[at]
        return block

    def _hand_out(self, block: _Block, size: int, requested: int, handle: int) -> None:
        pool, rest = block.pool, block.size - size
        if pool.small or self.config.expandable_segments:
            split = rest >= MIN_BLOCK
        else:
            split = size < self.config.max_split_size and rest > SMALL_SIZE
        if split:
            tail = _Block(block.address + size, rest, pool, block, block.next, range_base=block.range_base)
            if block.next is not None:
                block.next.prev = tail
            block.next = tail
            block.size = size
            self._cache(tail)
        block.allocated, block.requested, block.handle = True, requested, handle
        self.live[handle] = block
        self.block_sizes[handle] = block.size
        self.allocated += block.size
        self.active += block.size
        self.requested += requested
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        if self.allocated > self.top_allocated:
            self.top_allocated, self.top_event = self.allocated, self.event

    def _cache(self, block: _Block) -> None:
        block.age_base = self.searches[block.pool.small]
        block.pool.insert(block)

    # Freeing

    def _record_stream(self, handle: int, stream: int) -> None:
        block = self.live.get(handle)
        if block is None:
            if 0 <= handle < len(self.block_sizes) and self.block_sizes[handle] == 0:
                return
            raise BadStream(f"event {self.event}: handle {handle} is not live")
        if stream != block.pool.stream:
            if block.streams is None:
                block.streams = set()
            block.streams.add(stream)

    def _free(self, block: _Block | None) -> None:
        if block is None:
            return
        block.allocated = False
        self.allocated -= block.size
        if block.streams:
            for stream in block.streams:
                self.pending.setdefault(stream, deque()).append((block.handle, block))
            block.pending, block.streams = len(block.streams), None
            self.deferred[block.handle] = block
        else:
            self._reclaim(block)

    def _reclaim(self, block: _Block) -> None:
        block.pending = 0
        self.active -= block.size
        self.requested -= block.requested
        self._merge(block, block.prev)
        self._merge(block, block.next)
        self._cache(block)

    def _merge(self, block: _Block, other: _Block | None) -> None:
        """Makes a free neighbour of the same kind part of the block (which is in no list itself)."""
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

    def _process_events(self, everything: bool = False) -> None:
        """Reclaims what recorded streams are done with."""
        if not everything and not self.ready:
            return
        for stream in sorted(self.pending if everything else self.ready):
            waiting = self.pending.get(stream, deque())
            for _ in range(len(waiting) if everything else self.ready[stream]):
                handle, block = waiting.popleft()
                if self.deferred.get(handle) is block:
                    block.pending -= 1
                    if block.pending == 0:
                        del self.deferred[handle]
                        self._reclaim(block)
        self.ready.clear()

    # Segments

    def _note(self, size: int, address: int) -> None:
        self.reserved += size
        self.segments.append(SegmentChange(self.event, size, address))
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        if self.reserved > self.top_reserved:
            self.top_reserved, self.top_reserved_event = self.reserved, self.event

    def _grow(self, pool: _Pool, size: int, segment: int) -> _Block | None:
        if self.reserved + segment > self.allowed:
            return None
        if self.config.expandable_segments:
            return self._grow_range(pool, size)
        if self.reserved + segment > self.limit:
            return None
        block = _Block(self.addresses.take(segment), segment, pool)
        self._note(segment, block.address)
        return block

    def _release(self, block: _Block) -> None:
        block.pool.remove(block)
        self.addresses.give_back(block.address)
        self._note(-block.size, block.address)

    def _release_all(self) -> None:
        self._process_events(everything=True)
        for small in (False, True):
            for key in sorted(key for key in self.pools if key[0] is small):
                pool = self.pools[key]
                for block in [block for _, _, block in pool.cached]:
                    if block.range_base >= 0:
                        self._unmap(block)
                    elif not block.split:
                        self._release(block)

    def _release_oversize(self, pool: _Pool, size: int) -> bool:
        """Returns as few blocks of at least `max_split_size` as make room, or as there are. True if they make room."""
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
        """Returns unsplit large blocks older than the average until reserved is below the threshold, or none is left."""
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

    def _grow_range(self, pool: _Pool, size: int) -> _Block | None:
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

    def _find_range(self, pool: _Pool, size: int) -> _Block:
        for _, block in pool.unmapped:
            start = block.prev if block.prev is not None and block.prev.free else block
            room = 0
            at: _Block | None = start
            while at is not None and at.free and room < size:
                room += at.size
                at = at.next
            if room >= size:
                return start
        room = -(-(self.device_memory + self.device_memory // 8) // pool.page) * pool.page
        block = _Block(self.next_range, room, pool, mapped=False, range_base=self.next_range)
        self.next_range += room
        pool.insert_unmapped(block)
        return block

    def _map(self, block: _Block, size: int) -> bool:
        """Maps whole pages from the block's start; False if the device has too few."""
        pool = block.pool
        size = -(-size // pool.page) * pool.page
        if self.reserved + size > self.limit:
            return False
        pool.remove_unmapped(block)
        start = block.address
        block.mapped = True
        if size < block.size:
            tail = _Block(start + size, block.size - size, pool, block, block.next, mapped=False, range_base=block.range_base)
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

    def _unmap(self, block: _Block) -> None:
        """Unmaps the whole pages within a free block; what remains at either side stays cached."""
        pool, base = block.pool, block.range_base
        start = base - (base - block.address) // pool.page * pool.page  # rounded up to a page
        end = base + (block.address + block.size - base) // pool.page * pool.page
        if start >= end:
            return
        pool.remove(block)
        if start > block.address:
            head = _Block(block.address, start - block.address, pool, block.prev, block, range_base=base)
            if block.prev is not None:
                block.prev.next = head
            block.prev = head
            self._cache(head)
        if block.address + block.size > end:
            tail = _Block(end, block.address + block.size - end, pool, block, block.next, range_base=base)
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


def _growable(block: _Block) -> int:
    return block.size + (block.next.size if block.next is not None and not block.next.mapped else 0)
