"""What the captured process hands over: the events on its GPU, and what was learnt of the script. Plain data, as JSON.

Note [Captured events]
    Three columns of integers, compressed. ``op`` is a :class:`zeroplan.tape.expanded.Op` or :data:`WORKSPACE`; storages are
    numbered in the order of their ALLOC events. Sizes are bytes, or a function of :data:`zeroplan.tape.sizes.FUNCTIONS` with
    its arguments, which the GPU's properties decide.
"""

from __future__ import annotations

import base64
import json
import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroplan.core.errors import BadInput

if TYPE_CHECKING:
    from zeroplan.core.plan import CaptureInfo

#: A thread's first call of cuBLAS (arg 0: the forward's, 1: the backward's) or of cuBLASLt (2, 3).
WORKSPACE = 50
#: An event: ``torch.cuda.empty_cache``.
EMPTY_CACHE = 51
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Stop:
    """Where a script could not go on, and why."""

    file: str
    line: int
    why: str


@dataclass(slots=True)
class Captured:
    """What was captured.

    Attributes:
        op, arg, aux: the events.
        sizes: each storage's size.
        buffers: what storages are, where known; by number.
        lines, line_of: lines of code, and of each storage the one that asked for it.
        phases: of each storage the phase in which it was made: 0 none, 1 a forward, 2 a backward.
        steps: optimizer steps taken.
        stopped: where the script could not go on; None where it came through.
        ended: the line at which a loop was ended after its steps; empty where the script ended by itself.
        notes: values that were invented and branched on, each with its line.
        unmodelled: what no figure holds: key, effect, sentence.
        engine: what an engine was told, where one was; see :mod:`zeroplan.capturing.engines`.
        model: name, parameters and trainable parameters of the largest module.
        workload: what the script's own run is, for the report's head.
        seconds: what it took, imports included.
        collectives: whether the process joined a process group.
    """

    op: array[int] = field(default_factory=lambda: array("b"))
    arg: array[int] = field(default_factory=lambda: array("l"))
    aux: array[int] = field(default_factory=lambda: array("q"))
    sizes: list[Any] = field(default_factory=list)
    buffers: dict[int, str] = field(default_factory=dict)
    phases: bytes = b""
    steps: int = 0
    stopped: Stop | None = None
    ended: str = ""
    notes: list[str] = field(default_factory=list)
    unmodelled: list[tuple[str, str, str]] = field(default_factory=list)
    engine: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    workload: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    collectives: bool = False
    command: str = ""
    machine: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    line_of: array[int] = field(default_factory=lambda: array("q"))

    @property
    def way(self) -> str:
        """``engine`` where the script called one, else ``loop``."""
        return "engine" if self.engine else "loop"


def info_of(captured: Captured) -> CaptureInfo:
    """Return what a plan says of its capture."""
    from zeroplan.core.plan import CaptureInfo

    stopped = None if captured.stopped is None else asdict(captured.stopped)
    return CaptureInfo(way=captured.way, command=captured.command, steps=captured.steps, stopped=stopped, ended=captured.ended)


def _packed(values: Iterable[int], kind: str) -> str:
    return base64.b85encode(zlib.compress(array(kind, values).tobytes(), 6)).decode()


def _unpacked(text: str, kind: str) -> array[int]:
    found = array(kind)
    found.frombytes(zlib.decompress(base64.b85decode(text)))
    return found


def as_data(captured: Captured) -> dict[str, Any]:
    """Return it as plain data for JSON."""
    whole = [size if isinstance(size, int) else -1 for size in captured.sizes]
    computed = {str(at): list(size) for at, size in enumerate(captured.sizes) if not isinstance(size, int)}
    held = {
        "format": FORMAT,
        "op": _packed(captured.op, "b"),
        "arg": _packed(captured.arg, "q"),
        "aux": _packed(captured.aux, "q"),
        "sizes": _packed(whole, "q"),
        "computed": computed,
        "buffers": {str(key): value for key, value in captured.buffers.items()},
        "phases": base64.b85encode(zlib.compress(captured.phases, 6)).decode(),
        "stopped": None if captured.stopped is None else asdict(captured.stopped),
        "lines": captured.lines,
        "line_of": _packed(captured.line_of, "q"),
    }
    names = ("way", "steps", "ended", "notes", "unmodelled", "engine", "model", "workload", "seconds", "collectives",
             "command", "machine")  # fmt: skip
    return held | {name: getattr(captured, name) for name in names}


def write(captured: Captured, path: str | Path) -> None:
    """Write it to a file."""
    Path(path).write_text(json.dumps(as_data(captured)), encoding="utf-8")


def of_data(data: Any, where: str) -> Captured:
    """Return what :func:`as_data` made.

    Raises:
        BadInput: data that it did not make.
    """
    try:
        if data["format"] != FORMAT:
            raise BadInput(f"was written by another version (format {data['format']})", where=where, remedy="capture again")
        sizes: list[Any] = list(_unpacked(data["sizes"], "q"))
        for at, size in data["computed"].items():
            sizes[int(at)] = (str(size[0]), *(int(one) for one in size[1:]))
        stopped = data["stopped"]
        return Captured(
            _unpacked(data["op"], "b"),
            _unpacked(data["arg"], "q"),
            _unpacked(data["aux"], "q"),
            sizes,
            {int(key): str(value) for key, value in data["buffers"].items()},
            zlib.decompress(base64.b85decode(data["phases"])),
            int(data["steps"]),
            None if stopped is None else Stop(str(stopped["file"]), int(stopped["line"]), str(stopped["why"])),
            str(data["ended"]),
            [str(one) for one in data["notes"]],
            [(str(a), str(b), str(c)) for a, b, c in data["unmodelled"]],
            dict(data["engine"]),
            dict(data["model"]),
            dict(data["workload"]),
            float(data["seconds"]),
            bool(data["collectives"]),
            str(data["command"]),
            dict(data["machine"]),
            [str(one) for one in data.get("lines", ())],
            _unpacked(data["line_of"], "q") if "line_of" in data else array("q"),
        )
    except BadInput:
        raise
    except (KeyError, TypeError, ValueError, zlib.error) as error:
        raise BadInput(
            f"is no file of zeroplan capture ({type(error).__name__})", where=where, remedy="capture again"
        ) from None


def sizes_on(sizes: Sequence[Any], device: Any) -> list[int]:
    """Return the bytes of each storage on a device (:class:`zeroplan.tape.sizes.KernelDevice`)."""
    from zeroplan.tape.sizes import FUNCTIONS

    return [size if isinstance(size, int) else FUNCTIONS[size[0]](device, *size[1:]) for size in sizes]
