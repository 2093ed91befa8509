"""``estimate --html``: the verdict, the plans and the runs behind them as one HTML file that loads no other file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

from zeroplan.core.plan import MemoryPlan, Report
from zeroplan.core.sizes import format_bytes, format_gib
from zeroplan.report.chart_html import at_peak, by_origin, chart
from zeroplan.report.html_parts import card, folded, gauge, items, mark_of, paragraphs, table, verdict_card
from zeroplan.report.page import page
from zeroplan.report.plans import asked_text, figures, fits_text, report_notes
from zeroplan.report.timeline import DrawnRun
from zeroplan.report.verdict import name_of, peak_sentence, relief_sentence, stages_sentence, verdict

_FITS = {True: "fits", False: "does not fit", None: ""}


def html_report(report: Report, runs: Mapping[int, DrawnRun] | None = None) -> str:
    """Return the page.

    Args:
        report: the answer.
        runs: the run behind each simulated plan, by the plan's index among the report's.
    """
    runs, plans = runs or {}, report.plans
    at = _chosen(report)
    scale = _scale(report)
    body = [_verdict(report, at)]
    if at is not None:
        body.append(_details(plans[at], at, runs.get(at), opened=True))
    body.append(_knobs(report))
    if len(plans) > 1:
        body.append(card("All plans", _overview(report, at, scale)))
        body.append(_beside(report, at))
        body += [_details(plan, index, runs.get(index), opened=False) for index, plan in enumerate(plans) if index != at]
    body.append(card("Notes", items(list(dict.fromkeys(report_notes(report)))), mark="notes"))
    lead = asked_text(report).removeprefix(f"{report.model.name}: ")
    return page(report.model.name, lead, body, scripts=("timeline.js", "beside.js"))


def _chosen(report: Report) -> int | None:
    """Return the index of the plan that is open: the one that the verdict is about, else the one that needs the least."""
    plans, decisive = report.plans, report.decisive
    if decisive is None:
        return min(range(len(plans)), key=lambda at: plans[at].gpu.needed, default=None)
    return next(at for at, plan in enumerate(plans) if plan is decisive)


def _scale(report: Report) -> int:
    """Return the bytes at the right end of every bar: those of the largest plan, but at most two and a half cards."""
    most = max((plan.gpu.at_most for plan in report.plans), default=1)
    usable = next((plan.gpu.usable for plan in report.plans if plan.gpu.usable), None)
    return max(usable, min(most, 5 * usable // 2)) if usable else max(most, 1)


def _verdict(report: Report, at: int | None) -> str:
    plan = None if at is None else report.plans[at]
    bar = ""
    if plan is not None and plan.gpu.usable:  # without a limit a single bar says nothing
        most = plan.gpu.at_most
        bar = gauge(plan, round(1.06 * max(most, plan.gpu.usable)))
    sentences = [relief_sentence(report.reliefs)]
    if plan is not None:
        sentences = [peak_sentence(plan), stages_sentence(plan), *sentences]
    return verdict_card(verdict(report), mark_of(report.decisive), bar, paragraphs(*sentences))


def _knobs(report: Report) -> str:
    """Return the options that lower the plan's memory, the cheapest in speed first."""
    rows = [
        [
            escape(one.what),
            f"−{format_gib(one.saves, digits=1)}",
            format_gib(one.total, digits=1),
            f"<span class='{'yes' if one.fits else 'no'}'>{_FITS[one.fits]}</span>" if one.fits is not None else "",
            f"<code>{escape(one.flags)}</code>",
        ]
        for one in report.reliefs
    ]
    head = ["knob", "saves GiB", "then GPU", "", "flags"]
    return card("What lowers it, the cheapest in speed first", table(head, rows, figures=(1, 2)) if rows else "")


def _fits(plan: MemoryPlan) -> str:
    word = plan.verdict.value if plan.undecided else _FITS[plan.fits]
    return f"<span class='{mark_of(plan)}'>{escape(word)}</span>"


def _overview(report: Report, at: int | None, scale: int) -> str:
    rows = []
    for index, plan in enumerate(report.plans):
        name = f"<a href='#plan-{index}'>{escape(name_of(plan))}</a>"
        says = f"<span class='{mark_of(plan)}'>{escape(fits_text(plan))}</span>"
        host, disk = (format_gib(size, digits=1) if size else "-" for size in (plan.cpu.per_node, plan.nvme.per_node))
        shown = f"<b>{name}</b>" if index == at else name
        rows.append([shown, format_gib(plan.gpu.needed, digits=1), says, gauge(plan, scale), host, disk])
    head = ["plan", "GPU", "fits", "", "host", "disk"]
    return table(head, rows, figures=(1, 4, 5)) + "<p class='words'>GiB a GPU, and of a node's host and disk.</p>"


def _beside(report: Report, at: int | None) -> str:
    """Return the place where two plans stand side by side, with the figures that the page compares."""
    data = [_compared(plan) for plan in report.plans]
    first = at or 0
    second = first + 1 if first + 1 < len(data) else first - 1
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")

    def choice(name: str, chosen: int) -> str:
        options = [
            f"<option value='{index}'{' selected' if index == chosen else ''}>{escape(plan['name'])}</option>"
            for index, plan in enumerate(data)
        ]
        return f"<select id='{name}' aria-label='plan'>{''.join(options)}</select>"

    return (
        "<details class='card' id='beside'><summary><h2>Plan beside plan</h2></summary>"
        f"<div class='choices'>{choice('left', first)}{choice('right', second)}</div>"
        "<div class='scroll' id='differences'></div>"
        f"<script type='application/json'>{text}</script></details>"
    )


def _compared(plan: MemoryPlan) -> dict[str, Any]:
    rows = [["", name, size] for name, size, _ in figures(plan)]
    rows += [["At the peak", one.what, one.bytes] for one in plan.gpu.at_peak if one.bytes]
    return {"name": name_of(plan), "fits": fits_text(plan), "mark": mark_of(plan), "rows": rows}


def _details(plan: MemoryPlan, index: int, run: DrawnRun | None, *, opened: bool) -> str:
    parts = [] if run is None else [chart(plan, run, name_of(plan))]
    parts.append(at_peak(plan))
    rows = [
        [escape(name), format_gib(size), f"<span class='words'>{escape(what)}</span>"] for name, size, what in figures(plan)
    ]
    parts.append("<h3>Figures of one GPU, GiB</h3>" + table(["", "GiB", ""], rows, figures=(1,)))
    parts.append(items(list(dict.fromkeys(plan.warnings))))
    if run is not None:
        parts.append(by_origin(run))
    parts += [folded("Host memory of a node, by phase", _host(plan)), folded("Every line with its formula", _lines(plan))]
    engine = f"<small>{escape(plan.engine)} {escape(plan.engine_version)}</small>"
    needed = f"<b>{format_bytes(plan.gpu.needed, digits=1)}</b>"
    head = f"<summary><h2>{escape(name_of(plan))} {engine}</h2>{_fits(plan)}{needed}</summary>"
    return f"<details class='card plan' id='plan-{index}'{' open' if opened else ''}>{head}{''.join(parts)}</details>"


def _host(plan: MemoryPlan) -> str:
    """Return a table of host memory by phase, with a bar for each phase's peak and the buffers alive there."""
    cpu = plan.cpu
    if not cpu.peaks:
        return ""
    most = max(peak.bytes for peak in cpu.peaks) or 1
    rows = []
    for peak in cpu.peaks:
        parts = [f"{one.buffer} ({one.place}) {format_bytes(one.bytes)}" for one in peak.alive]
        over = " class='most'" if peak.phase == cpu.peak_phase else ""
        rows.append(
            [
                escape(peak.phase),
                format_bytes(peak.bytes),
                format_bytes(peak.pinned or None),
                f"<div class='share'><i{over} style='width:{100 * peak.bytes / most:.1f}%'></i></div>",
                f"<span class='words'>{escape(', '.join(parts))}</span>",
            ]
        )
    return table(["phase", "most", "pinned", "", "alive there"], rows, figures=(1, 2))


def _lines(plan: MemoryPlan) -> str:
    rows = [
        [
            escape(line.buffer),
            escape(line.place),
            format_bytes(line.bytes),
            f"<code>{escape(line.formula)}</code>" if line.formula else "",
            f"<span class='words'>{escape(', '.join(line.phases))}</span>",
        ]
        for line in sorted(plan.lines, key=lambda line: -line.bytes)
    ]
    return table(["buffer", "place", "bytes", "formula", "alive during"], rows, figures=(2,)) if rows else ""
