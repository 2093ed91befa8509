"""Runs held to a memory cap: the simulated allocator gives back the segments that the real one did, unasked."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.simulate.history import from_columns, read_history
from zeroplan.simulate.allocator.config import AllocatorConfig
from zeroplan.simulate.allocator.run import run_allocator

CAPPED = sorted((Path(__file__).parent.parent / "fixtures" / "allocator" / "capped").glob("*.json.gz"))


@pytest.mark.parametrize("path", CAPPED, ids=lambda path: path.name.split(".")[0])
def test_the_cap_is_kept_as_it_was(path):
    stored = json.loads(gzip.decompress(path.read_bytes()))
    meta, asked = stored["meta"], set(stored["emptied"])
    events = from_columns(stored)
    own = {i for i, e in enumerate(events) if e.action == "segment_free" and i not in asked}
    assert own, "the fixture must hold segments that the allocator returned by itself"
    shift = [0]
    for index in range(len(events)):
        shift.append(shift[-1] + (index in own))
    marks = {mark["event"] - shift[mark["event"]]: mark for mark in stored["marks"]}
    history = read_history([e for i, e in enumerate(events) if i not in own], {at: mark["at"] for at, mark in marks.items()})
    config = replace(AllocatorConfig.parse(meta["alloc_conf"]), memory_fraction=meta["cap"] / meta["total_memory"])
    result = run_allocator(
        history.recorder.code,
        history.recorder.value,
        config,
        device_memory=meta["total_memory"],
        addresses=[e.address for e in events if e.action == "segment_alloc"],
    )
    changes = [
        e.size if e.action == "segment_alloc" else -e.size for e in events if e.action in ("segment_alloc", "segment_free")
    ]
    assert [change.size for change in result.segments] == changes
    for simulated, (_, real) in zip(result.marks, sorted(marks.items()), strict=True):
        assert (simulated.allocated, simulated.reserved) == (real["alloc"], real["reserved"]), real["at"]
    assert result.peak_reserved == max(mark["reserved_peak"] for mark in stored["marks"]) <= meta["cap"]
