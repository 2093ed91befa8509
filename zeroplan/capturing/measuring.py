"""Runs a command unchanged on this machine's GPU, and returns what it took, beside what capture plans of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zeroplan.capturing.measured import ORDERS
from zeroplan.capturing.replay import FIRST_MARK, MARKS
from zeroplan.core.errors import BadInput
from zeroplan.core.plan import MemoryPlan, Report
from zeroplan.engines.simulation import phase_of_mark

#: Imported by every Python process of the command; one that was there before is run, too.
_STARTUP = """import importlib.machinery, importlib.util, os, sys
from zeroplan.capturing.measured import begin
begin()
_here = os.path.dirname(os.path.abspath(__file__))
_rest = [path for path in sys.path if os.path.abspath(path or ".") != _here]
_next = importlib.machinery.PathFinder.find_spec("sitecustomize", _rest)
if _next is not None and _next.loader is not None:
    _next.loader.exec_module(importlib.util.module_from_spec(_next))
"""
#: Seconds between two looks at the GPU's memory.
_PAUSE = 0.02


@dataclass(frozen=True, slots=True)
class Orders:
    """What every process of the command is told.

    Attributes:
        steps: optimizer steps, after which loops end.
        seconds: the longest that the script may take.
        limit: bytes that torch's allocator may reserve; 0 for no limit.
        answer: the file for what was measured.
    """

    steps: int
    seconds: float
    limit: int
    answer: str


@dataclass(frozen=True, slots=True)
class Measured:
    """What the command took on the GPU of one rank. Sizes are bytes.

    Attributes:
        allocated, reserved: the allocator's peaks over the whole script.
        total: the most that NVML counted beyond what was used before; None where it cannot tell.
        outside: used on the card at the end beyond what torch had reserved, which is the process's own where it is alone.
        phases: the peak of each part of the script.
        steps: optimizer steps taken.
        retries: how often the allocator emptied its cache to serve a request.
        code: the command's exit code.
        gpu, torch: the card's name and torch's version.
        failure: the last lines of the command's output where its exit code is not 0.
    """

    allocated: int
    reserved: int
    total: int | None
    outside: int
    phases: Mapping[str, int]
    steps: int
    retries: int
    code: int
    gpu: str
    torch: str
    failure: str = ""

    @property
    def out_of_memory(self) -> bool:
        """Whether it ended for want of memory."""
        return self.code != 0 and "out of memory" in self.failure.lower()


@dataclass(frozen=True, slots=True)
class ScriptDrift:
    """The plan of a captured script beside its measurement.

    Attributes:
        report: the plan.
        measured: what it took.
        tolerance: how far allocated memory may be off, as a part of what was measured.
    """

    report: Report
    measured: Measured
    tolerance: float

    @property
    def plan(self) -> MemoryPlan:
        """The script's own plan."""
        return self.report.plans[0]

    @property
    def rows(self) -> list[tuple[str, int, int]]:
        """What was planned and measured, by name."""
        gpu, measured = self.plan.gpu, self.measured
        rows = [(f"peak in {name}", gpu.phases.get(name, 0), count) for name, count in measured.phases.items() if count]
        rows.append(("peak allocated", gpu.peak_allocated or 0, measured.allocated))
        rows.append(("peak reserved", gpu.peak_reserved or 0, measured.reserved))
        rows.append(("outside torch", gpu.outside_torch or 0, measured.outside))
        return rows if measured.total is None else [*rows, ("total by NVML", gpu.total or 0, measured.total)]

    @property
    def within(self) -> bool:
        """Whether the script came through, and allocated memory is within the tolerance."""
        measured = self.measured
        planned = self.plan.gpu.peak_allocated or 0
        return measured.code == 0 and abs(planned - measured.allocated) <= self.tolerance * measured.allocated

    def to_dict(self) -> dict[str, Any]:
        """Return it as values that JSON can hold; sizes are bytes."""
        info = self.plan.capture
        return {
            "schema": 1,
            "command": "" if info is None else info.command,
            "within": self.within,
            "tolerance": self.tolerance,
            "measured": asdict(self.measured),
            "plan": json.loads(self.plan.model_dump_json()),
        }


def measure_command(
    words: Sequence[str],
    used: Callable[[], int | None],
    *,
    steps: int = 3,
    seconds: float = 600.0,
    limit: int = 0,
    rank: int = 0,
    environment: Mapping[str, str] | None = None,
) -> Measured:
    """Run a command on this machine's GPU, its own files and services included, until it has taken so many steps.

    Args:
        words: the command, as it is typed.
        used: returns the bytes in use on the rank's GPU, None where nobody tells.
        steps: optimizer steps.
        seconds: the longest that the script may take.
        limit: bytes that torch's allocator may reserve; 0 for no limit.
        rank: whose figures are returned.
        environment: more variables of the command.

    Raises:
        BadInput: a command that cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix="zeroplan-verify-") as folder:
        Path(folder, "sitecustomize.py").write_text(_STARTUP, encoding="utf-8")
        orders = Orders(steps, seconds, limit, os.path.join(folder, "answer.jsonl"))
        home = str(Path(__file__).resolve().parents[2])
        found = {**os.environ, **(environment or {}), ORDERS: json.dumps(asdict(orders))}
        found["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, found.get("PYTHONPATH"), home)))
        before = used()
        try:
            process = subprocess.Popen(list(words), env=found, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace")
        except OSError as error:
            raise BadInput(
                f"cannot be started: {error.strerror}", where=str(words[0]), remedy="give it as it is typed"
            ) from None
        most, tail = _watch(process, used, seconds)
        rows = []
        if os.path.isfile(orders.answer):
            rows = [json.loads(line) for line in Path(orders.answer).read_text(encoding="utf-8").splitlines()]
    return _of_rank(rows, rank, process.returncode, tail, before, most)


def _watch(process: subprocess.Popen[str], used: Callable[[], int | None], seconds: float) -> tuple[int | None, str]:
    """Wait for a process; returns the most bytes that the GPU had in use, and the last lines of what it printed as errors."""
    tail: list[str] = []

    def passed_on() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            sys.stderr.write(line)
            tail.append(line)
            del tail[:-12]

    reader = threading.Thread(target=passed_on, daemon=True)
    reader.start()
    most: int | None = None
    waited = 0.0
    while process.poll() is None:
        now = used()
        most = now if most is None else max(most, now or 0)
        try:
            process.wait(_PAUSE)
        except subprocess.TimeoutExpired:
            waited += _PAUSE
        if waited > seconds + 60:
            process.kill()
    reader.join(5)
    return most, "".join(tail)


def _of_rank(
    rows: Sequence[Mapping[str, Any]], rank: int, code: int, tail: str, before: int | None, most: int | None
) -> Measured:
    """Return the figures of a rank's process, the largest where it has several; zeros where none used the GPU."""
    mine = [row for row in rows if row["rank"] == rank]
    row = max(mine, key=lambda one: one["allocated"], default={})
    code = 0 if row.get("ended") else code
    phases: dict[str, int] = {}
    for mark, peak in row.get("parts", {}).items():
        name = MARKS[int(mark) - FIRST_MARK]
        phase = name if name == "end" else phase_of_mark(name).value
        phases[phase] = max(phases.get(phase, 0), peak)
    outside = row.get("used_at_end", 0) - row.get("reserved_at_end", 0)
    total = None if most is None or before is None else most - before
    names = ("allocated", "reserved", "steps", "retries")
    figures = {name: row.get(name, 0) for name in names} | {name: row.get(name, "") for name in ("gpu", "torch")}
    return Measured(total=total, outside=outside, phases=phases, code=code, failure=tail if code else "", **figures)
