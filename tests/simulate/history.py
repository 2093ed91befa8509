"""Replays what ``torch.cuda.memory._record_memory_history`` recorded of a real allocator.

A history holds the requests that a program made and what the allocator did about them. :func:`replay` hands the requests
alone to the simulated allocator; what it does about them can then be held against the rest.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from zeroplan.core.buffers import Buffer
from zeroplan.simulate.allocator.config import AllocatorConfig
from zeroplan.simulate.allocator.events import AllocatorResult
from zeroplan.simulate.allocator.run import run_allocator
from zeroplan.simulate.recorder import Recorder

#: Stands for whichever streams a deferred free waited for; a history does not name them.
_SOME_STREAM = -1

_GROWS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_ACTIONS = frozenset({"alloc", "free_requested", "free_completed", "oom", *_GROWS})
_RELEASES = ("segment_free", "segment_unmap")


@dataclass(frozen=True, slots=True)
class HistoryEvent:
    """One entry of a history, by torch's names: action, address, size in bytes, stream."""

    action: str
    address: int
    size: int
    stream: int


@dataclass(slots=True)
class History:
    """A history in the simulation's terms.

    Attributes:
        recorder: the requests. An ALLOC's note is its index in the history.
        segments: changes of reserved memory that were recorded, in bytes, in order.
        addresses: of the segments that were allocated, in order.
        origin: for each event of the recorder, its index in the history.
        unknown_frees: frees of blocks from before the history began.
    """

    recorder: Recorder = field(default_factory=Recorder)
    segments: list[int] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    origin: array[int] = field(default_factory=lambda: array("q"))
    unknown_frees: int = 0


def from_snapshot(snapshot: Mapping[str, Any], device: int = 0) -> list[HistoryEvent]:
    """One device's entries of what ``torch.cuda.memory._snapshot()`` returns. Other kinds of entries are left out."""
    return [
        HistoryEvent(entry["action"], entry["addr"], entry["size"], entry["stream"])
        for entry in snapshot["device_traces"][device]
        if entry["action"] in _ACTIONS
    ]


def from_columns(stored: Mapping[str, Any]) -> list[HistoryEvent]:
    """The entries of a stored history: ``columns`` of equal length, and the tables ``ops`` and ``streams`` they index."""
    columns, ops, streams = stored["columns"], stored["ops"], stored["streams"]
    rows = zip(columns["op"], columns["addr"], columns["size"], columns["stream"], strict=True)
    return [HistoryEvent(ops[op], address, size, streams[stream]) for op, address, size, stream in rows]


def read_history(events: Iterable[HistoryEvent], marks: dict[int, str] | None = None, *, ran_out: bool = False) -> History:
    """Turns a recorded history into a stream of requests.

    Args:
        events: one device's entries in order, from :func:`from_snapshot` or :func:`from_columns`.
        marks: names of marks by the index of the event that they precede.
        ran_out: whether the device ran out of memory meanwhile. Segments returned to it mean that the program emptied the
            cache; if it ran out, those followed by a new segment are the allocator's doing and left to the simulation, and
            the first request that could not be served is the last event.
    """
    entries = list(events)
    marks = marks or {}
    history = History()
    recorder = history.recorder
    streams: dict[int, int] = {}
    handles: dict[int, int] = {}  # by address
    for at, entry in enumerate(entries):
        before = len(recorder)
        if at in marks:
            recorder.mark(marks[at])
        stream = streams.setdefault(entry.stream, len(streams))
        if entry.action == "alloc":
            handles[entry.address] = recorder.alloc(entry.size, Buffer.UNATTRIBUTED, stream=stream, note=at)
        elif entry.action == "free_requested":
            if entry.address not in handles:
                history.unknown_frees += 1
            else:
                done = at + 1 < len(entries) and entries[at + 1].action == "free_completed"
                at_once = done and entries[at + 1].address == entry.address
                if not at_once:
                    recorder.record_stream(handles[entry.address], _SOME_STREAM)
                recorder.free(handles[entry.address])
                if at_once:
                    del handles[entry.address]
        elif entry.action == "free_completed":
            if entry.address in handles:
                recorder.complete(handles.pop(entry.address))
        elif entry.action in _GROWS:
            history.segments.append(_GROWS[entry.action] * entry.size)
            if entry.action == "segment_alloc":
                history.addresses.append(entry.address)
            elif _GROWS[entry.action] < 0 and _begins_flush(entries, at, ran_out):
                recorder.empty_cache()
        elif entry.action == "oom" and ran_out:
            recorder.alloc(entry.size, Buffer.UNATTRIBUTED, stream=stream, note=at)
            history.origin.append(at)
            return history
        history.origin.extend([at] * (len(recorder) - before))
    for at, name in sorted(marks.items()):
        if at >= len(entries):
            recorder.mark(name)
            history.origin.append(len(entries))
    return history


def _begins_flush(entries: list[HistoryEvent], at: int, ran_out: bool) -> bool:
    """Whether the segments returned from here on were returned by emptying the cache."""
    if at and entries[at - 1].action in _RELEASES:
        return False
    while at < len(entries) and entries[at].action in _RELEASES:
        at += 1
    return not ran_out or at == len(entries) or entries[at].action not in ("segment_alloc", "segment_map", "oom")


def replay(
    history: History, config: AllocatorConfig, *, limit: int | None = None, known_addresses: bool = False
) -> AllocatorResult:
    """Serves a history's requests with the simulated allocator.

    Args:
        history: from :func:`read_history`.
        config: the settings that the program ran with.
        limit: bytes that the device could give; needed only where it ran out.
        known_addresses: put segments where the device did, instead of where the simulation would.
    """
    recorder = history.recorder
    addresses = history.addresses if known_addresses else ()
    return run_allocator(*recorder.columns(), config, limit=limit, addresses=addresses)
