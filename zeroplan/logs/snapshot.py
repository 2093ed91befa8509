"""A memory snapshot of ``torch.cuda.memory._dump_snapshot``: what the allocator held when it was written, and from where.

A pickle can run any code when it is read. A snapshot is made of dicts, lists, strings and numbers alone, so this reader
refuses every pickle that names a class or a function; nothing of it is ever called.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from zeroplan.core.errors import BadInput
from zeroplan.core.plumbing.files import read_bytes

#: Snapshots with 100,000 events and their stacks have about 100 MB.
MOST_BYTES = 1 << 30
#: Frames that say nothing of where a tensor comes from: torch's own, and C++.
_TORCH = ("torch/nn/modules/module.py", "torch/_ops.py", "torch/_tensor.py", "torch/utils/")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Memory that one device's allocator held.

    Attributes:
        device: index of the GPU that holds most.
        reserved: bytes of its segments.
        allocated: bytes of its live blocks.
        largest: bytes of live blocks by the line that allocated them, ``file:line function``, largest first.
        oom: bytes that could not be had, of each out-of-memory event in the history.
    """

    device: int
    reserved: int
    allocated: int
    largest: tuple[tuple[str, int], ...]
    oom: tuple[int, ...]


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}"[:80])

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it refers to objects outside")


def is_snapshot(path: str) -> bool:
    """Return whether the file's name is that of a memory snapshot."""
    return path.lower().endswith((".pickle", ".pkl"))


def read_snapshot(path: str) -> Snapshot:
    """Read the allocator's state from a snapshot file.

    Raises:
        BadInput: when it cannot be read, names code to run, or is no snapshot.
    """
    data = read_bytes(path, MOST_BYTES, where="LOG")
    remedy = "give a file of torch.cuda.memory._dump_snapshot"
    try:
        found = _PlainUnpickler(io.BytesIO(data)).load()
    except MemoryError:
        raise BadInput(f"{path} is too large to read", where="LOG", remedy=remedy) from None
    except Exception as error:  # a damaged pickle can raise anything
        reason = str(error)[:80] or type(error).__name__
        raise BadInput(f"{path} is no plain memory snapshot ({reason}), and is not run", where="LOG", remedy=remedy) from None
    segments = found.get("segments") if isinstance(found, Mapping) else None
    if not isinstance(segments, list) or not all(isinstance(one, Mapping) for one in segments):
        raise BadInput(f"{path} holds no segments", where="LOG", remedy=remedy)
    try:
        return _summary(segments, found.get("device_traces") or [])
    except (TypeError, ValueError, KeyError, AttributeError):
        raise BadInput(f"{path} is no memory snapshot as torch writes it", where="LOG", remedy=remedy) from None


def _summary(segments: list[Mapping[str, Any]], traces: list[Any]) -> Snapshot:
    reserved: Counter[int] = Counter()
    for segment in segments:
        reserved[int(segment.get("device", 0))] += int(segment["total_size"])
    device = max(reserved, key=lambda key: reserved[key], default=0)
    places: Counter[str] = Counter()
    allocated = 0
    for segment in segments:
        if int(segment.get("device", 0)) != device:
            continue
        for block in segment["blocks"]:
            if str(block["state"]).startswith("active"):
                allocated += int(block["size"])
                places[_place(block)] += int(block["size"])
    events = traces[device] if device < len(traces) else []
    oom = tuple(int(event.get("size", 0)) for event in events if event.get("action") == "oom")
    return Snapshot(device, reserved[device], allocated, tuple(places.most_common(10)), oom)


def _place(block: Mapping[str, Any]) -> str:
    """Return the innermost line of the user's program, or of a library above torch, that allocated a block."""
    frames = block.get("frames") or next((one.get("frames") for one in block.get("history") or () if one.get("frames")), None)
    python = [frame for frame in frames or () if str(frame.get("filename", "")).endswith(".py")]
    own = next((f for f in python if not any(part in str(f["filename"]) for part in _TORCH)), python[0] if python else None)
    if own is None:
        return "without a stack (record_memory_history was off)"
    path = "/".join(str(own["filename"]).split("/")[-2:])
    return f"{path}:{own.get('line', 0)} {own.get('name', '')}".strip()[:120]
