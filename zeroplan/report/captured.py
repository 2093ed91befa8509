"""The answer of ``capture`` as text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zeroplan.core.errors import BadInput
from zeroplan.core.plan import MemoryPlan, Report
from zeroplan.core.sizes import format_bytes
from zeroplan.report.peak import origin_in
from zeroplan.report.plans import notes, report_notes
from zeroplan.report.table import render
from zeroplan.report.terminal import PLAIN, Terminal
from zeroplan.report.verdict import name_of, peak_sentence, verdict
from zeroplan.report.words import machine_text, model_text

if TYPE_CHECKING:
    from zeroplan.capturing.answer import CapturedRun
    from zeroplan.capturing.cards import CardPlan, FittingCards

_WAYS = {
    "loop": "what the script itself allocates and frees, in its order",
    "engine": "the engine's schedule over the script's own step and loss",
    "arguments": "the engine's schedule of the model that its arguments describe, as it resolved them; its loop was not run",
}


def captured_text(report: Report, terminal: Terminal = PLAIN, *, quiet: bool = False, phases: bool = True) -> str:
    """Return the whole answer: verdict, peak, what was run, the peak of each part, and the notes.

    Args:
        report: the plans of a captured script.
        terminal: where it goes.
        quiet: the verdict alone.
        phases: whether the peak of each part is shown.
    """
    plan = report.plans[0]
    lines = terminal.verdict(verdict(report), plan.fits)
    if quiet:
        return "\n".join(lines)
    lines += terminal.wrap(peak_sentence(plan))
    lines += ["", *terminal.wrap(_what(report, plan))]
    lines += ["", *_phases(plan)] if phases else []
    lines += notes(report_notes(report), terminal)
    return "\n".join(lines)


def _what(report: Report, plan: MemoryPlan) -> str:
    info, model = plan.capture, report.model
    assert info is not None
    text = (
        f"Captured: {info.command}; {model_text(model.name, model.params, model.trainable)}; {machine_text(report.cluster)}. "
    )
    way = "arguments" if info.way == "engine" and not info.steps else info.way
    text += f"{info.steps} optimizer steps. Figures are {_WAYS[way]}."
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


def peak_rows(run: CapturedRun, buffer: str | None = None) -> list[dict[str, Any]]:
    """Return what is alive at the peak by what it is and the line of code that asked for it: the largest first, bytes.

    Args:
        run: a captured script's; under an engine's schedule the module or the parameter asks.
        buffer: one buffer alone.
    """
    origin = None if run.tape is None else origin_in(run.tape)
    found: dict[tuple[str, str], int] = {}
    for (kind, line), count in run.timeline.alive_by_buffer_and_note().items():
        if buffer in (None, kind.value):
            key = kind.value, str(line or "") if origin is None else origin(kind, line)
            found[key] = found.get(key, 0) + count
    rows = [{"buffer": kind, "line": line, "bytes": count} for (kind, line), count in found.items()]
    return sorted(rows, key=lambda row: -row["bytes"])


def peak_lines_text(run: CapturedRun, terminal: Terminal = PLAIN, *, buffer: str | None = None, quiet: bool = False) -> str:
    """Return ``explain``'s answer to a captured script: what is alive at the peak, and the lines of code that asked for it.

    Args:
        run: its plan and its simulated run.
        terminal: where it goes.
        buffer: one buffer alone.
        quiet: the table alone.

    Raises:
        BadInput: a buffer of which nothing is alive at the peak.
    """
    rows = peak_rows(run, buffer)
    if not rows:
        known = sorted({row["buffer"] for row in peak_rows(run)})
        raise BadInput(
            f"nothing of {str(buffer)[:40]!r} is alive at the peak", where="--line", remedy=f"use {', '.join(known)}"
        )
    plan = run.report.plans[0]
    cells = [[row["buffer"], row["line"] or "-", format_bytes(row["bytes"])] for row in rows[:_MOST_ROWS]]
    table = render(["buffer", "asked for by", "bytes"], cells, "plain", width=terminal.width)
    if quiet:
        return table
    rest = sum(row["bytes"] for row in rows[_MOST_ROWS:])
    more = [f"{len(rows) - _MOST_ROWS} smaller ones: {format_bytes(rest)}"] if rest else []
    head = terminal.wrap(f"{peak_sentence(plan)} Alive then, as torch's allocator rounds it:")
    outside = terminal.wrap(
        f"Outside torch's allocator: {format_bytes(plan.gpu.outside_torch or 0)}, as measured of a process."
    )
    return "\n".join([*head, "", table, *more, "", *outside, *notes(report_notes(run.report), terminal)])


#: Rows of a table of what is alive.
_MOST_ROWS = 30


def cards_text(found: FittingCards, terminal: Terminal = PLAIN, *, quiet: bool = False) -> str:
    """Return ``recommend``'s answer to a captured script: the cards on which it runs."""
    report = found.run.report
    plan, first = report.plans[0], found.first
    if plan.gpu.usable is not None:
        lines = terminal.verdict(verdict(report), plan.fits)
    elif first is not None:
        lines = terminal.verdict(f"Fits: the script as it runs, from {_card(first)} on.", True)
    else:
        lines = terminal.verdict(verdict(report), plan.fits)
    if quiet:
        return "\n".join(lines)
    if not plan.undecided:
        lines += terminal.wrap(f"Smallest card on which the plan says that it fits: {format_bytes(found.least)}.")
    says = "Only the card is open in a recording; batch, lengths, precision and what else saves memory are the script's own: "
    lines += terminal.wrap(says + "change them there, and capture again.")
    rows = [
        [
            one.gpu.name,
            format_bytes(one.gpu.memory, digits=1),
            format_bytes(one.plan.gpu.total or 0, digits=1),
            str(one.plan.verdict),
        ]
        for one in found.cards
    ]
    table = render(["card", "memory", "needs", "verdict"], rows, "plain", width=terminal.width)
    return "\n".join([*lines, "", table, *notes(report_notes(report), terminal)])


def ranks_text(
    command: str, rows: Sequence[tuple[tuple[int, int], MemoryPlan]], terminal: Terminal = PLAIN, *, quiet: bool = False
) -> str:
    """Return ``scale``'s answer to a captured script that calls an engine: a row for each number of GPUs.

    Args:
        command: what was captured.
        rows: GPUs a node and nodes, and the plan there.
        terminal: where it goes.
        quiet: the table alone.
    """
    cells = [
        [
            str(gpus * nodes),
            str(nodes),
            format_bytes(plan.gpu.total or 0, digits=1),
            format_bytes(plan.gpu.live_after_step or 0, digits=1),
            format_bytes(plan.cpu.per_node, digits=1),
            str(plan.verdict),
        ]
        for (gpus, nodes), plan in rows
    ]
    table = render(["GPUs", "nodes", "a GPU", "between steps", "a host", "verdict"], cells, "plain", width=terminal.width)
    if quiet:
        return table
    says = f"{command}: {name_of(rows[0][1])}, each GPU with the micro batches that were captured. A recording has no times."
    unknown = next((plan.decides for _, plan in rows if plan.undecided), "")
    return "\n".join([*terminal.wrap(says), "", table, *notes([f"Not in the figures: {unknown}"] if unknown else [], terminal)])


def ranks_json(command: str, rows: Sequence[tuple[tuple[int, int], MemoryPlan]]) -> dict[str, Any]:
    """Return the same as values that JSON can hold; sizes are bytes."""
    found = [{"gpus": gpus, "nodes": nodes, "plan": json.loads(plan.model_dump_json())} for (gpus, nodes), plan in rows]
    return {"schema": 1, "command": command, "points": found}


def cards_json(found: FittingCards) -> dict[str, Any]:
    """Return the same as values that JSON can hold; sizes are bytes."""
    plan = found.run.report.plans[0]
    cards = [
        {"gpu": one.gpu.name, "memory": one.gpu.memory, "total": one.plan.gpu.total, "verdict": str(one.plan.verdict),
         "fits": one.plan.fits}
        for one in found.cards
    ]  # fmt: skip
    return {
        "schema": 1,
        "least": None if plan.undecided else found.least,
        "cards": cards,
        "plan": json.loads(plan.model_dump_json()),
    }


def _card(one: CardPlan) -> str:
    return f"{one.gpu.name} ({format_bytes(one.gpu.memory, digits=1)})"
