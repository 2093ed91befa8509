"""The reported runs as requests. Facts alone: sources and settings; no sentence is anybody else's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroplan.core.workload import OptimizerKind, Precision
from zeroplan.run.ask import Ask

HERE = Path(__file__).resolve().parent
#: What was asked of the search, in this order.
QUERIES = HERE / "queries.json"
#: Each thread or page that came back: whether its facts are complete, and if not, why it is left out.
THREADS = HERE / "threads.jsonl"
#: The runs of threads that were kept.
CASES = HERE / "cases.jsonl"


@dataclass(frozen=True, slots=True)
class Figure:
    """One reported figure in bytes.

    Attributes:
        what: the plan's name of it: ``peak_allocated``, ``peak_reserved``, ``total`` or ``host``.
        low: its lower end; the figure itself, if the report gives one number.
        high: its upper end.
        tool: by which it was read.
    """

    what: str
    low: int
    high: int
    tool: str

    def error(self, planned: int) -> float:
        """Return planned / reported − 1, from the nearer end; zero between the ends."""
        end = min(max(planned, self.low), self.high)
        return planned / end - 1


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """One run that a thread or a page tells of.

    Attributes:
        id: its name here.
        source: ``owner/name#thread``, ``owner/name:file``, or a page's address.
        request: the fields of a :class:`Ask` that the report gives.
        fits: whether it ran.
        short: what it ran out of, ``gpu`` or ``cpu``; None if it ran.
        phase: where: ``training`` or ``saving``.
        figures: what was measured.
        of_program: facts that the report gives by naming the program whose defaults they are.
        missing: facts that it does not give; complete without any.
    """

    id: str
    source: str
    request: dict[str, Any]
    fits: bool
    short: str | None
    phase: str
    figures: tuple[Figure, ...]
    of_program: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether every fact that decides is told."""
        return not self.missing


def load_cases(path: Path = CASES) -> list[ReportedRun]:
    """Load the runs in the order of the file."""
    return [_run(json.loads(line)) for line in path.read_text().splitlines()]


def _run(row: dict[str, Any]) -> ReportedRun:
    outcome = row["outcome"]
    return ReportedRun(
        id=row["id"],
        source=row["source"],
        request=row["request"],
        fits=outcome["fits"],
        short=outcome["short"],
        phase=outcome["phase"],
        figures=tuple(Figure(**one) for one in row["figures"]),
        of_program=tuple(row["of_program"]),
        missing=tuple(row["missing"]),
    )


def request_of(run: ReportedRun) -> Ask:
    """Return what a user would have asked before that run."""
    fields = dict(run.request)
    for name, kind in (("precision", Precision), ("optimizer_kind", OptimizerKind)):
        if name in fields:
            fields[name] = kind(fields[name])
    return Ask(**fields, offline=True)
