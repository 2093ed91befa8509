"""The operations that the simulated allocator reads, and its result.

Note [Event columns]
    Events are two columns of 64-bit integers, which the compiled allocator reads as they are. ``code`` holds the operation in
    its low four bits and a CUDA stream (0 is the default one) above them; ``value`` holds the operation's operand:

    =============  =====================  =======================================================================
    operation      value                  meaning
    =============  =====================  =======================================================================
    ALLOC          bytes                  the n-th ALLOC makes handle n
    FREE           handle                 deferred if streams were recorded on the block
    RECORD_STREAM  handle                 the block is in use on the stream until that stream reaches the free
    SYNC           0                      the work enqueued on the stream so far is done; the next ALLOC reclaims it
    COMPLETE       handle                 this one deferred free takes effect now, unless an emptied cache was waited for first
    EMPTY_CACHE    0                      waits for all streams, then returns unused segments to the device
    MARK           index of the mark      totals are reported, and the peaks begin anew
    =============  =====================  =======================================================================
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import IntEnum


class AllocatorOp(IntEnum):
    """The operations; see Note [Event columns]."""

    ALLOC = 0
    FREE = 1
    RECORD_STREAM = 2
    SYNC = 3
    COMPLETE = 4
    EMPTY_CACHE = 5
    MARK = 6


#: Bits of a code that hold the operation; the stream lies above them.
OP_BITS = 4


@dataclass(frozen=True, slots=True)
class MarkTotals:
    """Totals at one mark, in bytes; the peaks are those since the mark before it.

    Attributes:
        event: index of the MARK event.
        allocated: blocks handed out, as ``torch.cuda.memory_allocated`` counts them.
        peak_allocated: ``torch.cuda.max_memory_allocated`` if the peak was reset at the mark before.
        reserved: segments held, as ``torch.cuda.memory_reserved`` counts them.
        peak_reserved: the most of it since the mark before.
        requested: what the blocks' owners asked for, before rounding (deferred frees included, as torch counts it).
        active: blocks handed out or freed but awaiting a recorded stream.
        largest_free: the largest cached block.
    """

    event: int
    allocated: int
    peak_allocated: int
    reserved: int
    peak_reserved: int
    requested: int
    active: int
    largest_free: int


@dataclass(frozen=True, slots=True)
class SegmentChange:
    """Device memory that was taken (size above 0) or returned (below 0) while an event was handled. Bytes."""

    event: int
    size: int
    address: int


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The request that could not be served, after all cached segments were returned.

    Attributes:
        event: index of the ALLOC event.
        handle: the handle it would have made.
        requested: bytes asked for.
        segment: bytes asked of the device (what torch's message gives).
        allocated, reserved, largest_free: totals at that moment, in bytes.
    """

    event: int
    handle: int
    requested: int
    segment: int
    allocated: int
    reserved: int
    largest_free: int


@dataclass(frozen=True, slots=True)
class AllocatorResult:
    """Effects of a sequence of events on the allocator. All sizes are bytes.

    Attributes:
        events: events handled: all, or those before the one that ran out of memory.
        marks: totals at each mark.
        block_sizes: by handle, the size of the block it got (0 for a request of nothing); an array of 64-bit integers.
        changes: every change of reserved memory, in order: event, size and address in turn, 64-bit integers.
        peak_allocated, peak_event: the highest allocated total, and the event that first reached it (-1: none did).
        peak_reserved: the highest reserved total.
        retries: how often the cache had to be emptied to serve a request.
        oom: the request that failed, if one did.
    """

    events: int
    marks: tuple[MarkTotals, ...]
    block_sizes: array[int]
    changes: array[int]
    peak_allocated: int
    peak_event: int
    peak_reserved: int
    final: MarkTotals
    retries: int
    oom: OutOfMemory | None

    @property
    def segments(self) -> tuple[SegmentChange, ...]:
        """Every change of reserved memory, in order."""
        return tuple(map(SegmentChange, self.changes[::3], self.changes[1::3], self.changes[2::3]))


class BadStream(ValueError):
    """Events that no program could produce, such as a free of a handle that is not live."""
