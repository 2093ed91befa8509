"""The compiled allocator, called through ctypes on columns of 64-bit integers."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import cache

from zeroplan.core.plumbing.native import library
from zeroplan.simulate.allocator.config import AllocatorConfig
from zeroplan.simulate.allocator.events import AllocatorResult, BadStream, MarkTotals, OutOfMemory

# Layouts shared with csrc/cpu/allocator_types.hpp.
_MARK_FIELDS, _SEGMENT_FIELDS, _SUMMARY_FIELDS = 8, 3, 24
_DONE, _OUT_OF_MEMORY = 0, 1
_ZERO = array("q", [0])
_FAULTS = {
    2: "operation {0} is unknown",
    3: "a request of {0} bytes",
    4: "handle {0} is not live",
    5: "handle {0} is not awaiting a stream",
}


@cache
def _library() -> ctypes.CDLL | None:
    loaded = library()
    if loaded is None:
        return None
    column, count = ctypes.c_void_p, ctypes.c_int64
    loaded.zeroplan_allocator_run.restype = count
    loaded.zeroplan_allocator_run.argtypes = [
        column, column, column, count, column, count, column, column, column, count, column,
    ]  # fmt: skip
    loaded.zeroplan_allocator_count.argtypes, loaded.zeroplan_allocator_count.restype = [column, count, column], None
    loaded.zeroplan_event_blocks_write_out.argtypes = [column, column, count, *[column] * 9]
    loaded.zeroplan_event_blocks_write_out.restype = None
    loaded.zeroplan_stream_repeat.argtypes = [column, column, count, count, count, column, column]
    loaded.zeroplan_stream_repeat.restype = None
    loaded.zeroplan_stream_alive.argtypes, loaded.zeroplan_stream_alive.restype = [column, column, count, column], None
    return loaded


def available() -> bool:
    """Return whether there is a compiled library."""
    return _library() is not None


def run_allocator(
    code: array[int],
    value: array[int],
    config: AllocatorConfig,
    limit: int,
    device_memory: int,
    addresses: Sequence[int],
) -> AllocatorResult:
    """Run :meth:`PythonAllocator.run` in the compiled library, with equal results.

    Raises:
        BadStream: for events that no program could produce.
        RuntimeError: when there is no library.
        MemoryError: when this machine has too little memory.
    """
    loaded = _library()
    if loaded is None:
        raise RuntimeError("the compiled allocator is not at hand")
    if code.typecode != "q" or value.typecode != "q" or len(code) != len(value):
        raise ValueError("expected two columns of 64-bit integers of equal length")
    counts = _zeros(2)
    loaded.zeroplan_allocator_count(_pointer(code), len(code), _pointer(counts))
    allocs, marks = counts
    settings = _settings(config, limit, device_memory)
    given = array("q", addresses)
    block_sizes = _zeros(allocs)
    mark_rows = _zeros(marks * _MARK_FIELDS)
    summary = _zeros(_SUMMARY_FIELDS)
    capacity = 1024
    while True:
        segments = _zeros(capacity * _SEGMENT_FIELDS)
        needed: int = loaded.zeroplan_allocator_run(
            _pointer(settings), _pointer(code), _pointer(value), len(code), _pointer(given), len(given),
            _pointer(block_sizes), _pointer(mark_rows), _pointer(segments), capacity, _pointer(summary),
        )  # fmt: skip
        if needed < 0:
            raise MemoryError("the allocator's simulation ran out of host memory")
        if needed <= capacity:
            break
        capacity = needed
    return _result(summary, block_sizes, mark_rows, segments, needed)


def _result(
    summary: array[int], block_sizes: array[int], marks: array[int], segments: array[int], changes: int
) -> AllocatorResult:
    status, event, operand, segment, top, top_event, top_reserved, retries, made, marked = summary[:10]
    if status not in (_DONE, _OUT_OF_MEMORY):
        raise BadStream(f"event {event}: {_FAULTS[status].format(operand)}")
    final = MarkTotals(*summary[10 : 10 + _MARK_FIELDS])
    oom = None
    if status == _OUT_OF_MEMORY:
        oom = OutOfMemory(event, made - 1, operand, segment, final.allocated, final.reserved, final.largest_free)
    rows = [MarkTotals(*marks[at : at + _MARK_FIELDS]) for at in range(0, marked * _MARK_FIELDS, _MARK_FIELDS)]
    return AllocatorResult(
        event,
        tuple(rows),
        block_sizes[:made],
        segments[: changes * _SEGMENT_FIELDS],
        top,
        top_event,
        top_reserved,
        final,
        retries,
        oom,
    )


def write_out(
    code: array[int], value: array[int], event_blocks: Sequence[array[int]], sizes: array[int], events: int
) -> tuple[array[int], array[int]]:
    """Run :func:`zeroplan.simulate.event_blocks.write_out` in the compiled library.

    Args:
        code, value: a recording's columns.
        event_blocks: the columns `begins`, `allocations`, `op`, `home` and `index` of EventBlocks.
        sizes: each storage's bytes.
        events: the number of events in the result.
    """
    loaded = _library()
    if loaded is None:
        raise RuntimeError("the compiled library is not at hand")
    whole_code, whole_value, bases = _ZERO * events, _ZERO * events, _ZERO * len(event_blocks[0])
    loaded.zeroplan_event_blocks_write_out(
        _pointer(code), _pointer(value), len(code), *map(_pointer, event_blocks), _pointer(sizes),
        _pointer(bases), _pointer(whole_code), _pointer(whole_value),
    )  # fmt: skip
    return whole_code, whole_value


def repeated(code: array[int], value: array[int], begin: int, end: int, times: int) -> tuple[array[int], array[int]] | None:
    """Repeat the events from `begin` to `end`, with handles and marks counted on; None without the library."""
    loaded = _library()
    if loaded is None:
        return None
    more_code, more_value = _ZERO * ((end - begin) * times), _ZERO * ((end - begin) * times)
    loaded.zeroplan_stream_repeat(
        _pointer(code), _pointer(value), begin, end, times, _pointer(more_code), _pointer(more_value)
    )  # fmt: skip
    return more_code, more_value


def alive(code: array[int], value: array[int], events: int, handles: int) -> Sequence[int] | None:
    """A flag for each handle: 1 if it is alive after so many events. None without the library."""
    loaded = _library()
    if loaded is None:
        return None
    flags = array("B", bytes(handles))
    loaded.zeroplan_stream_alive(_pointer(code), _pointer(value), events, _pointer(flags))
    return flags


def _settings(config: AllocatorConfig, limit: int, device_memory: int) -> array[int]:
    return array(
        "q",
        [
            config.max_split_size,
            config.max_non_split_rounding,
            config.collect_above(device_memory),
            config.allowed(device_memory),
            limit,
            device_memory,
            config.expandable_segments,
            config.large_segment_size,
            *config.roundup_power2_divisions,
        ],
    )


def _zeros(count: int) -> array[int]:
    return _ZERO * max(count, 1)


def _pointer(column: array[int]) -> int:
    return column.buffer_info()[0]
