"""Text of what ``verify`` answers: plan beside measurement, buffer by buffer and in total."""

from __future__ import annotations

from zeroplan.core.units import format_bytes
from zeroplan.report.table import render
from zeroplan.report.words import work_text
from zeroplan.validate.results import Comparison, Drift, DriftRow

_HEADERS = ["buffer", "place", "planned", "measured", "difference", "drift", ""]
_MOST_MISMATCHES = 10


def drift_text(drift: Drift, style: str = "plain") -> str:
    """Return a heading, a table and a verdict for each configuration, the warnings and the conclusion.

    Raises:
        BadInput: `style` is not one of :data:`zeroplan.report.table.FORMATS`.
    """
    parts = [_heading(drift)]
    for comparison in drift.comparisons:
        parts += ["", comparison_text(comparison, style)]
    parts += ["", *(f"warning: {text}" for text in drift.warnings), _conclusion(drift)]
    return "\n".join(parts)


def comparison_text(comparison: Comparison, style: str = "plain") -> str:
    """Return the table and the verdict of one configuration, or only the verdict where its run failed."""
    plan, measured = comparison.plan, comparison.measurement
    title = f"{plan.engine} {plan.engine_version}, {plan.label} ({plan.depth} plan)"
    if measured.failure or measured.out_of_memory is not None:
        return f"{title}\n{comparison.verdict}"
    rows = [_row(row) for row in comparison.rows]
    rows.append(
        ["unattributed", _place(measured.device), "-", format_bytes(comparison.unattributed), "", "", _rest(comparison)]
    )
    rows += [_row(row) for row in comparison.totals]
    lines = [title, render(_HEADERS, rows, style)]
    lines += [f"differs: {text}" for text in comparison.mismatches[:_MOST_MISMATCHES]]
    mark = "within" if comparison.within else "OUTSIDE"
    speed = f"; {measured.step_seconds:.2f} s a step" if measured.step_seconds is not None else ""
    return "\n".join([*lines, f"{mark}: {comparison.verdict}{speed}"])


def _place(device: str) -> str:
    return "hbm" if device == "cuda" else "dram"


def _rest(comparison: Comparison) -> str:
    if comparison.measurement.device == "cuda":
        outside = sum(
            line.bytes
            for line in comparison.plan.lines
            if line.buffer in ("device.context", "device.nccl") and line.formula != "measured: the CUDA context"
        )
        return f"the plan expects {format_bytes(outside)} of kernels and NCCL here"
    return "resident beyond the tensors at their peak: libraries, gloo; pages never touched count against it"


def _row(row: DriftRow) -> list[str]:
    judged = {"exact": {True: "exact", False: "DIFFERS"}, "tolerance": {True: "within", False: "OUTSIDE"}}
    said = judged.get(row.judged, {}).get(row.within, "") if row.within is not None else ""
    difference = row.difference
    share = f"{difference / row.planned:+.2%}" if difference is not None and row.planned else ""
    return [
        row.name,
        row.place,
        format_bytes(row.planned),
        format_bytes(row.measured),
        "" if difference is None else f"{difference:+,}",
        share,
        "; ".join(part for part in (said, row.note) if part),
    ]


def _heading(drift: Drift) -> str:
    work, machine, params = drift.workload, drift.machine, drift.model.params
    count = f"{params:,} parameter" if params == 1 else f"{params:,} parameters"
    return (
        f"{drift.model.name}: {count} · {machine['ranks']} × {machine['name']} ({machine['backend']}) · {work_text(work)}\n"
        "Bytes of the worst rank; differences are measured less planned."
    )


def _conclusion(drift: Drift) -> str:
    outside = [c for c in drift.comparisons if not c.within]
    if not drift.comparisons:
        return "Nothing was run."
    if not outside:
        count = len(drift.comparisons)
        owned = "owned buffers equal" if all(c.measurement.owned for c in drift.comparisons) else ""
        judged = sum(any(row.judged for row in c.totals) for c in drift.comparisons)
        totals = f"{judged} of {count} totals judged, within {drift.tolerance:.1%}"
        return f"{count} of {count} as planned: {'; '.join(part for part in (owned, totals) if part)}."
    ended = [c for c in outside if c.measurement.failure or c.measurement.out_of_memory is not None]
    others = [c for c in outside if c not in ended]
    parts = [
        f"{len(those)} of {len(drift.comparisons)} {how}: {', '.join(c.plan.label for c in those)}"
        for those, how in ((others, "outside the tolerance"), (ended, "ended early"))
        if those
    ]
    return "; ".join(parts) + "."
