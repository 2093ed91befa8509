"""Text of what ``verify`` answers: plan beside measurement, buffer by buffer and in total."""

from __future__ import annotations

from zeroplan.core.sizes import format_bytes
from zeroplan.report.plans import notes
from zeroplan.report.table import render
from zeroplan.report.terminal import PLAIN, Terminal
from zeroplan.report.words import work_text
from zeroplan.validate.results import Comparison, Drift, DriftRow

_HEADERS = ["buffer", "place", "planned", "measured", "difference", "drift", ""]
_NARROW = ["buffer", "place", "planned", "measured", "off by", "verdict"]
_MOST_MISMATCHES = 10


def drift_text(drift: Drift, style: str = "plain", *, terminal: Terminal = PLAIN, quiet: bool = False) -> str:
    """Return the conclusion, a table and a verdict for each configuration, and the notes.

    Args:
        drift: plans and measurements.
        style: plain, github, html or csv. But for plain, tables have all columns.
        terminal: where it goes. Without a width, tables have all columns as well.
        quiet: the conclusion alone.

    Raises:
        BadInput: `style` is not one of :data:`zeroplan.report.table.FORMATS`.
    """
    if style != "plain":
        terminal = Terminal(width=None)
    lines = terminal.verdict(_conclusion(drift), drift.within)
    if quiet:
        return "\n".join(lines)
    lines += ["", *_heading(drift, terminal)]
    for comparison in drift.comparisons:
        lines += ["", comparison_text(comparison, style, terminal)]
    return "\n".join([*lines, *notes(drift.warnings, terminal)])


def comparison_text(comparison: Comparison, style: str = "plain", terminal: Terminal = PLAIN) -> str:
    """Return the verdict and the table of one configuration, or only the verdict where its run failed."""
    plan, measured = comparison.plan, comparison.measurement
    title = f"{plan.engine} {plan.engine_version}, {plan.label} ({plan.depth} plan)"
    if measured.failure or measured.out_of_memory is not None:
        return "\n".join([*map(terminal.bold, terminal.wrap(title)), *terminal.wrap(comparison.verdict)])
    lines = [*map(terminal.bold, terminal.wrap(title)), *_verdict(comparison, terminal)]
    if not comparison.stages:
        return "\n".join([*lines, *_table(comparison, style, terminal)])
    for one in comparison.stages:
        lines += ["", *map(terminal.bold, terminal.wrap(_stage(comparison, one))), *_verdict(one, terminal)]
        lines += _table(one, style, terminal)
    return "\n".join(lines)


def _verdict(comparison: Comparison, terminal: Terminal) -> list[str]:
    seconds = comparison.measurement.step_seconds
    mark = "Within" if comparison.within else "OUTSIDE"
    speed = f"; {seconds:.2f} s a step" if seconds is not None else ""
    return terminal.verdict(f"{mark}: {comparison.verdict}{speed}", comparison.within)


def _stage(whole: Comparison, one: Comparison) -> str:
    """Name a pipeline's rank and its blocks: ``"pipeline rank 1 of 2: blocks 4 to 7, on 2 ranks"``."""
    blocks = next((stage.blocks for stage in whole.plan.stages if stage.stage == one.pp_rank), ())
    named = " and ".join(f"{first} to {end - 1}" if end - first > 1 else f"{first}" for first, end in blocks if end > first)
    many = one.measurement.ranks
    held = f"blocks {named}" if named else "no blocks"
    return f"pipeline rank {one.pp_rank} of {len(whole.stages)}: {held}, on {many} {'rank' if many == 1 else 'ranks'}"


def _table(comparison: Comparison, style: str, terminal: Terminal) -> list[str]:
    """Return what differs, and plan beside measurement."""
    measured = comparison.measurement
    lines = [line for text in comparison.mismatches[:_MOST_MISMATCHES] for line in terminal.wrap(f"differs: {text}")]
    wide = terminal.width is None
    row = _row if wide else _narrow_row
    rest = ["unattributed", _place(measured.device), "-", format_bytes(comparison.unattributed), ""]
    rows = [row(one) for one in comparison.rows]
    rows.append([*rest, "", _rest(comparison)] if wide else [*rest, ""])
    rows += [row(one) for one in comparison.totals]
    lines.append(render(_HEADERS if wide else _NARROW, rows, style, width=terminal.width))
    if not wide and comparison.unattributed:
        lines += map(terminal.dim, terminal.wrap(f"unattributed: {_rest(comparison)}"))
    return lines


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


_JUDGED = {"exact": {True: "exact", False: "DIFFERS"}, "tolerance": {True: "within", False: "OUTSIDE"}}


def _judged(row: DriftRow) -> str:
    return _JUDGED.get(row.judged, {}).get(row.within, "") if row.within is not None else ""


def _row(row: DriftRow) -> list[str]:
    difference = row.difference
    return [
        row.name,
        row.place,
        format_bytes(row.planned),
        format_bytes(row.measured),
        "" if difference is None else f"{difference:+,}",
        _share(row),
        "; ".join(part for part in (_judged(row), row.note) if part),
    ]


def _narrow_row(row: DriftRow) -> list[str]:
    """Return a row that fits a terminal: how far it is off as a share, or in bytes where that is next to nothing."""
    off = "" if row.difference is None else "0" if not row.difference else _share(row) or f"{row.difference:+,} B"
    return [row.name, row.place, format_bytes(row.planned), format_bytes(row.measured), off, _judged(row)]


def _share(row: DriftRow) -> str:
    """Return what the difference is of the plan: ``"+1.23%"``; nothing where nothing is planned."""
    return f"{row.difference / row.planned:+.2%}" if row.difference is not None and row.planned else ""


def _heading(drift: Drift, terminal: Terminal) -> list[str]:
    work, machine, params = drift.workload, drift.machine, drift.model.params
    count = f"{params:,} parameter" if params == 1 else f"{params:,} parameters"
    worst = "each stage's worst rank" if any(c.stages for c in drift.comparisons) else "the worst rank"
    return [
        *terminal.wrap(
            f"{drift.model.name}: {count} · {machine['ranks']} × {machine['name']} ({machine['backend']}) · {work_text(work)}"
        ),
        terminal.dim(f"Bytes of {worst}; differences are measured less planned."),
    ]


def _conclusion(drift: Drift) -> str:
    outside = [c for c in drift.comparisons if not c.within]
    if not drift.comparisons:
        return "Nothing was run."
    if not outside:
        count = len(drift.comparisons)
        owned = "owned buffers equal" if all(part.measurement.owned for c in drift.comparisons for part in c.parts) else ""
        judged = sum(all(any(row.judged for row in part.totals) for part in c.parts) for c in drift.comparisons)
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
