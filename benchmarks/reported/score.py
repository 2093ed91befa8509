"""Plans each reported run, and says whether the plan told what happened."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from benchmarks.reported.cases import Figure, ReportedRun, request_of
from zeroplan.core.errors import BadInput
from zeroplan.core.plan import MemoryPlan
from zeroplan.planner.estimate import estimate_report

#: A figure is right within this share of what was reported.
CLOSE = 0.10


class Verdict(StrEnum):
    """A plan beside what happened."""

    RIGHT = "right"
    FALSE_SAFE = "false-safe"  # it was said to fit and did not
    FALSE_ALARM = "false alarm"  # it was said not to fit and did
    UNKNOWN = "unknown"  # the plan does not say, or the run is refused


@dataclass(frozen=True, slots=True)
class FigureScore:
    """A reported figure and the plan's, in bytes."""

    what: str
    reported: int
    planned: int
    error: float


@dataclass(frozen=True, slots=True)
class CaseScore:
    """One run: what the plan said, and why where it said nothing. `verdict` is None where no limit is told."""

    id: str
    source: str
    complete: bool
    fits: bool
    verdict: Verdict | None
    said: str
    figures: list[FigureScore] = field(default_factory=list)
    seconds: float = 0.0


def score(run: ReportedRun) -> CaseScore:
    """Plan one run and compare."""
    start = time.perf_counter()
    try:
        plans = estimate_report(request_of(run)).plans
    except BadInput as error:
        seconds = time.perf_counter() - start
        return CaseScore(run.id, run.source, run.complete, run.fits, Verdict.UNKNOWN, f"refused: {error}", [], seconds)
    assert len(plans) == 1, f"{run.id}: {len(plans)} plans"
    figures = [_figure(plans[0], one) for one in run.figures]
    return CaseScore(
        run.id,
        run.source,
        run.complete,
        run.fits,
        _verdict(run, plans[0]),
        _said(plans[0]),
        [one for one in figures if one is not None],
        time.perf_counter() - start,
    )


def _verdict(run: ReportedRun, plan: MemoryPlan) -> Verdict | None:
    if plan.fits is None:
        return Verdict.UNKNOWN if plan.undecided else None
    if plan.fits is run.fits:
        return Verdict.RIGHT
    return Verdict.FALSE_SAFE if plan.fits else Verdict.FALSE_ALARM


def _said(plan: MemoryPlan) -> str:
    if plan.fits is not None:
        return "fits" if plan.fits else f"does not fit: {', '.join(plan.misfits)}"
    return "; ".join(f"{one.key}: {one.says}" for one in plan.unmodelled) or "no limit is told"


def _figure(plan: MemoryPlan, figure: Figure) -> FigureScore | None:
    """Return the plan's figure beside the reported one; None where the plan has none."""
    planned: Any = plan.cpu.per_node if figure.what == "host" else getattr(plan.gpu, figure.what)
    if planned is None:
        return None
    return FigureScore(figure.what, figure.low, planned, figure.error(planned))


def summary(scores: Iterable[CaseScore]) -> dict[str, Any]:
    """Return counts by verdict, and the share of figures that are close."""
    every = list(scores)
    verdicts = Counter(one.verdict.value for one in every if one.verdict is not None)
    errors = [one.error for run in every for one in run.figures]
    close = sum(abs(error) <= CLOSE for error in errors)
    return {
        "runs": len(every),
        "sources": len({one.source for one in every}),
        "verdicts": {kind.value: verdicts[kind.value] for kind in Verdict},
        "figures": len(errors),
        "close": close,
        "share": close / len(errors) if errors else None,
    }


def by_source(scores: Sequence[CaseScore]) -> dict[str, dict[str, Any]]:
    """Return the summary of each source, in order: one table with many rows shall not hide the others."""
    return {
        source: summary(one for one in scores if one.source == source) for source in dict.fromkeys(s.source for s in scores)
    }
