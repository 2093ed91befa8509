"""The CUDA caching allocator in plain Python: the readable twin of ``csrc/cpu/allocator.hpp``, with equal results.

Rules read from torch's ``c10/cuda/CUDACachingAllocator.cpp`` and ``c10/core/CachingDeviceAllocator.h``; the notes at the
head of allocator_segments.py sum them up.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

from zeroplan.simulate.allocator.config import MIN_BLOCK, SMALL_SIZE, UNLIMITED, AllocatorConfig
from zeroplan.simulate.allocator.events import (
    OP_BITS,
    AllocatorOp,
    AllocatorResult,
    BadStream,
    MarkTotals,
    OutOfMemory,
)
from zeroplan.simulate.allocator.rules import round_size, segment_size
from zeroplan.simulate.allocator.segments import Block, Segments

_OP_MASK = (1 << OP_BITS) - 1


class PythonAllocator(Segments):
    """One device's allocator. Arguments as of :class:`Segments`."""

    def __init__(self, config: AllocatorConfig, limit: int, device_memory: int, addresses: Sequence[int] = ()) -> None:
        super().__init__(config, limit, device_memory, addresses)
        self.divisions = config.roundup_power2_divisions if any(config.roundup_power2_divisions) else ()
        self.live: dict[int, Block] = {}  # by handle, until freed
        self.pending: dict[int, deque[tuple[int, Block]]] = {}  # by stream: deferred frees in order
        self.ready: dict[int, int] = {}  # by stream: how many of them are done
        self.deferred: dict[int, Block] = {}  # by handle
        self.completed_early: set[int] = set()  # handles reclaimed by waiting for the device, before their COMPLETE
        self.retries = self.allocated = self.requested = self.active = 0
        self.peak_allocated = 0  # since the latest mark
        self.top_allocated, self.top_event = 0, -1
        self.block_sizes = array("q")
        self.marks: list[MarkTotals] = []

    def run(self, code: Sequence[int], value: Sequence[int]) -> AllocatorResult:
        """Handle all events, or those before the first request that cannot be served. Raises BadStream: see there."""
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
                block = None if operand in self.completed_early else self._take(self.deferred, operand)
                if block is not None:
                    self._reclaim(block)
            elif op == AllocatorOp.EMPTY_CACHE:
                self._release_all()
            elif op == AllocatorOp.MARK:
                self.marks.append(self._totals())
                self.peak_allocated, self.peak_reserved = self.allocated, self.reserved
            else:
                raise BadStream(f"event {self.event}: operation {op} is unknown")
        else:
            self.event = len(code)
        return AllocatorResult(
            self.event,
            tuple(self.marks),
            self.block_sizes,
            self.changes,
            self.top_allocated,
            self.top_event,
            self.top_reserved,
            self._totals(),
            self.retries,
            oom,
        )

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

    def _take(self, blocks: dict[int, Block], handle: int) -> Block | None:
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

    def _hand_out(self, block: Block, size: int, requested: int, handle: int) -> None:
        pool, rest = block.pool, block.size - size
        if pool.small or self.config.expandable_segments:
            split = rest >= MIN_BLOCK
        else:
            split = size < self.config.max_split_size and rest > SMALL_SIZE
        if split:
            tail = Block(block.address + size, rest, pool, block, block.next, range_base=block.range_base)
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

    def _free(self, block: Block | None) -> None:
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

    def _reclaim(self, block: Block) -> None:
        block.pending = 0
        self.active -= block.size
        self.requested -= block.requested
        self._merge(block, block.prev)
        self._merge(block, block.next)
        self._cache(block)

    def _process_events(self, everything: bool = False) -> None:
        """Reclaim the blocks whose recorded streams are done."""
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
                        if everything:
                            self.completed_early.add(handle)
        self.ready.clear()

    def _release_all(self) -> None:
        self._process_events(everything=True)
        self._release_unused()
