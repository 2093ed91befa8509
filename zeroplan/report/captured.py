"""The answer of ``capture`` as text."""

from __future__ import annotations

from zeroplan.core.plan import MemoryPlan, Report
from zeroplan.core.units import format_bytes
from zeroplan.report.plans import notes, report_notes
from zeroplan.report.terminal import PLAIN, Terminal
from zeroplan.report.verdict import peak_sentence, verdict
from zeroplan.report.words import machine_text, model_text

_WAYS = {
    "loop": "what the script itself allocates and frees, in its order",
    "engine": "the engine's schedule over the script's own step and loss",
}


def captured_text(report: Report, terminal: Terminal = PLAIN, *, quiet: bool = False) -> str:
    """Return the whole answer: verdict, peak, what was run, the peak of each part, and the notes.

    Args:
        report: the plans of a captured script.
        terminal: where it goes.
        quiet: the verdict alone.
    """
    plan = report.plans[0]
    lines = terminal.verdict(verdict(report), plan.fits)
    if quiet:
        return "\n".join(lines)
    lines += terminal.wrap(peak_sentence(plan))
    lines += ["", *terminal.wrap(_what(report, plan)), ""]
    lines += _phases(plan)
    lines += notes(report_notes(report), terminal)
    return "\n".join(lines)


def _what(report: Report, plan: MemoryPlan) -> str:
    info, model = plan.capture, report.model
    assert info is not None
    text = (
        f"Captured: {info.command}; {model_text(model.name, model.params, model.trainable)}; {machine_text(report.cluster)}. "
    )
    text += f"{info.steps} optimizer steps. Figures are {_WAYS[info.way]}."
    batches = report.workload.get("batches")
    if batches and not any(one.key == "batches" for one in plan.unmodelled):
        text += f" Of what follows: {batches}."
    if info.ended:
        text += f" The loop was ended after its steps, at {info.ended}."
    return text


def _phases(plan: MemoryPlan) -> list[str]:
    """A line for each part of the script with its peak, and the totals."""
    gpu = plan.gpu
    rows = [(f"peak in {phase}", count) for phase, count in gpu.phases.items()]
    rows += [("peak allocated", gpu.peak_allocated or 0), ("peak reserved", gpu.peak_reserved or 0)]
    rows += [("outside torch", gpu.outside_torch or 0), ("total", gpu.total or 0)]
    width = max(len(name) for name, _ in rows)
    return [f"  {name:<{width}}  {format_bytes(count):>12}" for name, count in rows]
