"""Recorded histories of a real allocator, replayed: the same segments in the same order, the same totals at every mark."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.simulate.history import HistoryEvent, from_columns, from_snapshot, read_history, replay
from zeroplan.core.sizes import MIB
from zeroplan.simulate.allocator.config import AllocatorConfig

FIXTURES = sorted((Path(__file__).parent.parent / "fixtures" / "allocator").glob("*.json.gz"))


def load(path: Path):
    """A stored history in the simulation's terms, its marks by event, and the settings it ran with."""
    stored = json.loads(gzip.decompress(path.read_bytes()))
    marks = {mark["event"]: mark for mark in stored["marks"]}  # of marks without an event between them, the last
    history = read_history(from_columns(stored), {event: mark["at"] for event, mark in marks.items()})
    shared = len(stored["marks"]) != len(marks)
    return history, [marks[event] for event in sorted(marks)], stored["meta"]["alloc_conf"] or "", shared


def test_there_are_histories_of_every_kind():
    kinds = {path.name.split(".")[0] for path in FIXTURES}
    assert {"x2_L4_fsdp2", "x2_L4_s3", "L4_s2_expandable", "L4_s2_lora_ckpt", "x2_L4_ddp"} <= kinds


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.name.split(".")[0])
def test_a_replay_equals_the_history(path):
    history, marks, settings, shared = load(path)
    result = replay(history, AllocatorConfig.parse(settings))
    assert history.unknown_frees == 0
    assert [change.size for change in result.segments] == history.segments
    assert len(result.marks) == len(marks) >= 9
    for simulated, real in zip(result.marks, marks, strict=True):
        assert (simulated.allocated, simulated.reserved) == (real["alloc"], real["reserved"]), real["at"]
        assert (simulated.requested, simulated.active) == (real["requested"], real["active"]), real["at"]
        if real["at"] == "init":  # DeepSpeed's own memory reports reset the peaks while it initialises
            assert simulated.peak_allocated >= real["peak"]
            assert simulated.peak_reserved >= real["reserved_peak"]
        elif not shared:
            assert (simulated.peak_allocated, simulated.peak_reserved) == (real["peak"], real["reserved_peak"]), real["at"]
    assert result.peak_allocated == max(mark["peak"] for mark in marks)
    assert result.peak_reserved == max(mark["reserved_peak"] for mark in marks)


def test_the_settings_matter():
    """The history of expandable segments replayed without them reserves other segments."""
    history, *_ = load(next(path for path in FIXTURES if "expandable" in path.name))
    assert [change.size for change in replay(history, AllocatorConfig()).segments] != history.segments


def entries(*rows):
    return [HistoryEvent(*row) for row in rows]


def test_a_snapshot_is_read():
    """The form of torch's own snapshot; a free that lasted until later is deferred."""
    trace = [
        {"action": "segment_alloc", "addr": 0, "size": 30 * MIB, "stream": 7},
        {"action": "alloc", "addr": 0, "size": 30 * MIB, "stream": 7},
        {"action": "snapshot", "addr": 0, "size": 0, "stream": 0},
        {"action": "free_requested", "addr": 0, "size": 30 * MIB, "stream": 7},
        {"action": "segment_alloc", "addr": 30 * MIB, "size": 30 * MIB, "stream": 7},
        {"action": "alloc", "addr": 30 * MIB, "size": 30 * MIB, "stream": 7},
        {"action": "free_completed", "addr": 0, "size": 30 * MIB, "stream": 7},
        {"action": "alloc", "addr": 0, "size": 30 * MIB, "stream": 7},
    ]
    history = read_history(from_snapshot({"device_traces": [trace]}))
    assert [change.size for change in replay(history, AllocatorConfig()).segments] == history.segments == [30 * MIB] * 2


def test_frees_of_older_blocks_are_counted_and_left_out():
    history = read_history(entries(("free_requested", 5, 512, 0), ("free_completed", 5, 512, 0), ("alloc", 5, 512, 0)))
    assert (history.unknown_frees, len(history.recorder)) == (1, 1)


def test_segments_returned_when_the_device_ran_out_are_the_allocator_s_doing():
    rows = entries(
        ("segment_alloc", 0, 60 * MIB, 0),
        ("alloc", 0, 60 * MIB, 0),
        ("free_requested", 0, 60 * MIB, 0),
        ("free_completed", 0, 60 * MIB, 0),
        ("segment_free", 0, 60 * MIB, 0),
        ("segment_alloc", 0, 80 * MIB, 0),
        ("alloc", 0, 80 * MIB, 0),
    )
    history = read_history(rows, ran_out=True)
    result = replay(history, AllocatorConfig(), limit=100 * MIB)
    assert [change.size for change in result.segments] == history.segments == [60 * MIB, -60 * MIB, 80 * MIB]
    assert result.retries == 1
    failed = read_history([*rows, HistoryEvent("oom", 0, 30 * MIB, 0), *rows], ran_out=True)
    assert replay(failed, AllocatorConfig(), limit=100 * MIB).oom.requested == 30 * MIB
    assert [change.size for change in replay(read_history(rows), AllocatorConfig()).segments] == history.segments
