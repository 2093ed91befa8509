"""Records every event of the CUDA caching allocator and writes it as compact columns.

One file is one gzipped JSON object::

    format   "zeroplan-history/1"
    columns  one entry an event, all of equal length:
             op      index into ops
             addr    bytes above base (the lowest address seen; a multiple of 512 is common)
             size    bytes: as requested for alloc and free_*, whole segments for segment_*
             stream  index into streams
             stack   index into stacks
             dt_us   microseconds since the event before
    ops, streams, stacks, frames   tables; a stack is a list of indices into frames, innermost
             first, a frame is "file:function:line"
    marks    the probe's marks, each with ``event``: how many events came before it
    meta     the spec, rank, versions, device, allocator settings
"""

from __future__ import annotations

import bisect
import gzip
import json
from pathlib import Path
from typing import Any

FORMAT = "zeroplan-history/1"
MAX_FRAMES = 10
# Frames that every stack shares and that say nothing about who allocates.
_BORING_FILES = (
    "torch/nn/modules/module.py",
    "torch/utils/_contextlib.py",
    "torch/autograd/graph.py",
    "torch/autograd/__init__.py",
    "torch/_ops.py",
    "deepspeed/utils/nvtx.py",
    "torch/distributed/c10d_logger.py",
    "runpy",
    "importlib",
)
_CPP_NAMES = (
    ("at::_ops::", "aten:"),
    ("torch::autograd::generated::", "grad:"),
    ("torch::autograd::AccumulateGrad", "grad:AccumulateGrad"),
    ("c10d::", "c10d:"),
)


def start(cpp_stacks: bool, free_stacks: bool = True) -> None:
    """Record from here on. Call before the first allocation, so that a replay starts empty.

    ``free_stacks=False`` leaves out who frees: taking a Python stack while an exception unwinds
    loses the exception, and checkpointing without reentry stops its recomputation by one.
    """
    import torch

    torch.cuda.memory._record_memory_history(
        "all",
        context="all" if free_stacks else "alloc",
        stacks="all" if cpp_stacks else "python",
        max_entries=4_000_000,
    )


def collect(marks: list[dict[str, Any]], meta: dict[str, Any]) -> dict[str, Any]:
    """Return the events recorded so far on this process' device, as the columns described above."""
    import torch

    snapshot = torch.cuda.memory._snapshot()
    trace = snapshot["device_traces"][torch.cuda.current_device()]
    torch.cuda.memory._record_memory_history(None)
    return compact(trace, marks, meta | {"segments_at_end": _segments(snapshot)})


def compact(trace: list[dict[str, Any]], marks: list[dict[str, Any]], meta: dict[str, Any]) -> dict[str, Any]:
    """Turn torch's list of trace entries into columns; see the module's docstring."""
    events = [e for e in trace if e["action"] != "snapshot"]
    base = min((e["addr"] for e in events if e["addr"]), default=0)
    ops, streams, frames, stacks = _Table(), _Table(), _Table(), _Table()
    columns: dict[str, list[int]] = {k: [] for k in ("op", "addr", "size", "stream", "stack", "dt_us")}
    known: dict[tuple[Any, ...], int] = {}
    before = events[0]["time_us"] if events else 0
    times: list[int] = []
    for event in events:
        raw = event.get("frames") or ()
        key = tuple((f["filename"], f["line"], f["name"]) for f in raw)
        if key not in known:
            known[key] = stacks.index(tuple(frames.index(f) for f in reduce_stack(key)))
        columns["op"].append(ops.index(event["action"]))
        columns["addr"].append(event["addr"] - base if event["addr"] else -1)
        columns["size"].append(event["size"])
        columns["stream"].append(streams.index(event["stream"]))
        columns["stack"].append(known[key])
        columns["dt_us"].append(event["time_us"] - before)
        before = event["time_us"]
        times.append(before)
    placed = [m | {"event": bisect.bisect_right(times, m["time_us"])} for m in marks]
    return {
        "format": FORMAT,
        "meta": meta | {"base": base},
        "marks": placed,
        "ops": ops.rows,
        "streams": streams.rows,
        "frames": frames.rows,
        "stacks": [list(s) for s in stacks.rows],
        "columns": columns,
    }


def reduce_stack(stack: tuple[tuple[str, int, str], ...]) -> list[str]:
    """Return the innermost telling frames of one stack, each once in a row.

    Python frames are "file:function:line", operators "aten:mm", autograd nodes "grad:MmBackward0".
    """
    kept: list[str] = []
    for filename, line, name in stack:
        if filename.endswith(".py"):
            boring = any(part in filename for part in _BORING_FILES)
            frame = "" if boring else f"{Path(filename).name}:{name}:{line}"
        else:
            frame = _cpp_frame(name)
        if frame and kept[-1:] != [frame]:
            kept.append(frame)
        if len(kept) == MAX_FRAMES:
            break
    return kept


def _cpp_frame(symbol: str) -> str:
    """Return a short name for a C++ frame worth keeping, else ""."""
    symbol = symbol.split("(")[0]
    for prefix, short in _CPP_NAMES:
        if symbol.startswith(prefix):
            rest = symbol.removeprefix(prefix)
            return short + (rest if short == "c10d:" else rest.split("::")[0])
    return ""


def check(history: dict[str, Any]) -> list[str]:
    """Compare a replay of the events with each mark's own figures; empty when all agree.

    Reserved bytes and the requested bytes of blocks not yet free for reuse must agree exactly.
    """
    columns, ops = history["columns"], history["ops"]
    problems: list[str] = []
    requested = reserved = at = 0
    for mark in history["marks"]:
        for i in range(at, mark["event"]):
            op, size = ops[columns["op"][i]], columns["size"][i]
            requested += size * ((op == "alloc") - (op == "free_completed"))
            reserved += size * ((op in ("segment_alloc", "segment_map")) - (op in ("segment_free", "segment_unmap")))
        at = mark["event"]
        for name, replayed in (("reserved", reserved), ("requested", requested)):
            if replayed != mark[name]:
                problems.append(f"{mark['at']}: {name} {mark[name]}, replayed {replayed}")
    return problems


def write(history: dict[str, Any], path: Path) -> None:
    """Write one history as gzipped JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(history, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), 6, mtime=0))


def read(path: Path) -> dict[str, Any]:
    """Read one history. Raises ``ValueError`` for a file of another format."""
    history: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    if history.get("format") != FORMAT:
        raise ValueError(f"{path}: expected format {FORMAT}, got {history.get('format')}")
    return history


class _Table:
    """Values in order of first sight, each stored once."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self._index: dict[Any, int] = {}

    def index(self, value: Any) -> int:
        if value not in self._index:
            self._index[value] = len(self.rows)
            self.rows.append(value)
        return self._index[value]


def _segments(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    """Segments at the end: where each block lies and whether it is in use."""
    return [
        {
            "address": s["address"],
            "size": s["total_size"],
            "stream": s["stream"],
            "pool": s["segment_type"],
            "expandable": s.get("is_expandable", False),
            "blocks": [[b["size"], b["requested_size"], b["state"]] for b in s["blocks"]],
        }
        for s in snapshot["segments"]
    ]
