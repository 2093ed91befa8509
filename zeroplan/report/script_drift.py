"""Text of what ``verify -- COMMAND`` answers: the captured script's plan beside what it took on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeroplan.core.sizes import format_bytes
from zeroplan.report.plans import notes, report_notes
from zeroplan.report.table import render
from zeroplan.report.terminal import PLAIN, Terminal

if TYPE_CHECKING:
    from zeroplan.capturing.measuring import ScriptDrift


def script_drift_text(drift: ScriptDrift, terminal: Terminal = PLAIN, *, quiet: bool = False) -> str:
    """Return the conclusion, a table of what was planned and measured, and the plan's notes."""
    lines = terminal.verdict(_conclusion(drift), drift.within)
    if quiet:
        return "\n".join(lines)
    measured, info = drift.measured, drift.plan.capture
    if measured.failure:
        lines += ["", *(terminal.dim(line) for line in measured.failure.splitlines())]
    command = "" if info is None else info.command
    says = f"Run: {command}; {measured.gpu or 'no GPU used'}, torch {measured.torch or 'unknown'}; {measured.steps} steps."
    cells = [[name, format_bytes(planned), format_bytes(taken), _off(planned, taken)] for name, planned, taken in drift.rows]
    table = render(["part", "planned", "measured", "off by"], cells, "plain", width=terminal.width)
    return "\n".join([*lines, "", *terminal.wrap(says), "", table, *notes(report_notes(drift.report), terminal)])


def _conclusion(drift: ScriptDrift) -> str:
    measured, gpu = drift.measured, drift.plan.gpu
    if measured.out_of_memory:
        return f"Out of memory: the command, of which the plan says: {drift.plan.verdict}."
    if measured.code:
        return f"Failed: the command, with exit code {measured.code}."
    if not measured.allocated:
        return "Nothing measured: the command put nothing on the GPU."
    planned = gpu.peak_allocated or 0
    mark = "Within" if drift.within else "OUTSIDE"
    return (
        f"{mark}: {format_bytes(planned)} planned, {format_bytes(measured.allocated)} measured at the peak "
        f"({_off(planned, measured.allocated)}; {100 * drift.tolerance:g} % allowed)."
    )


def _off(planned: int, taken: int) -> str:
    return f"{100 * (planned / taken - 1):+.2f} %" if taken else "-"
