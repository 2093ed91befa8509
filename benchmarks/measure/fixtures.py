"""Turns histories into the small fixtures that the simulated allocator is replayed against.

``python -m benchmarks.measure.fixtures OUT_DIR HISTORY.json.gz…`` leaves out stacks and times; the
form is described in ``tests/fixtures/allocator/README.md``.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.measure import history

_COLUMNS = ("op", "addr", "size", "stream")
_MARK_KEYS = ("at", "event", "alloc", "peak", "reserved", "reserved_peak", "requested", "active", "retries")


def fixture(source: dict[str, Any]) -> dict[str, Any]:
    """Return the allocator's requests and answers; ``meta`` keeps the device's size and the cap."""
    meta = source["meta"]
    kept = {key: meta[key] for key in ("gpu", "versions", "alloc_conf", "total_memory")}
    return {
        "format": history.FORMAT,
        "meta": kept | {"cap": meta["spec"]["cap"], "run": meta["spec"]},
        "ops": source["ops"],
        "streams": source["streams"],
        "columns": {name: source["columns"][name] for name in _COLUMNS},
        "emptied": emptied(source),
        "marks": [{key: mark[key] for key in _MARK_KEYS} for mark in source["marks"]],
    }


def emptied(source: dict[str, Any]) -> list[int]:
    """Return the events that returned a segment because the program called ``empty_cache``.

    The allocator returned the others itself: collecting garbage, or out of memory.
    """
    asked = {number for number, frame in enumerate(source["frames"]) if ":empty_cache:" in frame}
    stacks = [bool(asked.intersection(stack)) for stack in source["stacks"]]
    return [
        event
        for event, (op, stack) in enumerate(zip(source["columns"]["op"], source["columns"]["stack"], strict=True))
        if source["ops"][op] in ("segment_free", "segment_unmap") and stacks[stack]
    ]


def main(out: Path, sources: list[Path]) -> None:
    """Write one fixture a history, by the same name."""
    out.mkdir(parents=True, exist_ok=True)
    for path in sources:
        text = json.dumps(fixture(history.read(path)), separators=(",", ":"))
        (out / path.name).write_bytes(gzip.compress(text.encode(), 9, mtime=0))
        print(path.name, (out / path.name).stat().st_size, "bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(arg) for arg in sys.argv[2:]])
