"""``estimate --html``: the verdict, the plans and the runs behind them as one HTML file that loads no other file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

from zeroplan.core.plan import MemoryPlan, Report
from zeroplan.core.sizes import format_bytes, format_gib
from zeroplan.report.chart_html import at_peak, by_origin, chart
from zeroplan.report.host import host_rows
from zeroplan.report.html_parts import (
    MARKS,
    card,
    classed,
    folded,
    gauge,
    items,
    judged,
    mark_of,
    paragraphs,
    table,
)
from zeroplan.report.plans import figures, fits_text, knob_rows, line_rows, narrow_rows, plans_sheet
from zeroplan.report.table import Table
from zeroplan.report.timeline import DrawnRun
from zeroplan.report.verdict import name_of, reserved_sentence

_FITS = {True: "fits", False: "does not fit", None: ""}


def html_report(report: Report, runs: Mapping[int, DrawnRun] | None = None, *, made: Mapping[str, str] | None = None) -> str:
    """Return the page.

    Args:
        report: the answer.
        runs: the run behind each simulated plan, by the plan's index among the report's.
        made: of :func:`~zeroplan.report.page.page`.
    """
    runs, plans = runs or {}, report.plans
    at = report.opened
    scale = _scale(report)
    body = []
    if at is not None:
        body.append(_details(plans[at], at, runs.get(at), opened=True))
    body.append(_knobs(report))
    if len(plans) > 1:
        body.append(card("All plans", _overview(report, at, scale)))
        body.append(_side_by_side(report, at))
        body += [_details(plan, index, runs.get(index), opened=False) for index, plan in enumerate(plans) if index != at]
    scripts = ("plot.js", "timeline.js", "beside.js")
    return plans_sheet(report).page(*body, bar=_bar(report, at), made=made, scripts=scripts)


def _scale(report: Report) -> int:
    """Return the bytes at the right end of every bar: those of the largest plan, but at most two and a half cards."""
    most = max((plan.gpu.at_most for plan in report.plans), default=1)
    usable = next((plan.gpu.usable for plan in report.plans if plan.gpu.usable), None)
    return max(usable, min(most, 5 * usable // 2)) if usable else max(most, 1)


def _bar(report: Report, at: int | None) -> str:
    plan = None if at is None else report.plans[at]
    if plan is None or not plan.gpu.usable:  # without a limit a single bar says nothing
        return ""
    return gauge(plan, round(1.06 * max(plan.gpu.at_most, plan.gpu.usable)))


def _knobs(report: Report) -> str:
    """Return the options that lower the plan's memory, the cheapest in speed first."""
    found = knob_rows(report)
    fits = [f"<span class='{MARKS[one.fits]}'>{row[3]}</span>" for one, row in zip(report.reliefs, found.rows, strict=True)]
    flags = classed("", [row[4] for row in found.rows], "code")
    return card("What lowers it, the cheapest in speed first", table("Knobs", found, {"fits": fits, "flags": flags}))


def _fits(plan: MemoryPlan) -> str:
    word = plan.verdict.value if plan.undecided else _FITS[plan.fits]
    return f"<span class='{mark_of(plan)}'>{escape(word)}</span>"


def _overview(report: Report, at: int | None, scale: int) -> str:
    plans, found = report.plans, narrow_rows(report.plans)
    links = [f"<a href='#plan-{index}'>{escape(name_of(plan))}</a>" for index, plan in enumerate(plans)]
    links = [f"<b>{link}</b>" if index == at else link for index, link in enumerate(links)]
    disks = [format_gib(plan.nvme.per_node, digits=1) if plan.nvme.per_node else "-" for plan in plans]
    rows = [["", gpu, fits, host, disk] for (_, _, gpu, host, _, fits), disk in zip(found.rows, disks, strict=True)]
    cells = {"plan": links, "fits": judged(plans, [row[2] for row in rows]), "bar": [gauge(plan, scale) for plan in plans]}
    legend = "<p class='words'>GiB a GPU, and of a node's host and disk.</p>"
    return table("All plans", Table(["plan", "GPU", "fits", "host", "disk"], rows), cells) + legend


def _side_by_side(report: Report, at: int | None) -> str:
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
        return f"<select id='{name}' aria-label='{name} plan'>{''.join(options)}</select>"

    return (
        "<details class='card' id='beside'><summary><h2>Plan beside plan</h2></summary>"
        f"<div class='choices'>{choice('left', first)}{choice('right', second)}</div>"
        "<div class='scroll' id='differences' tabindex='0' role='group' aria-label='Differences'></div>"
        f"<script type='application/json'>{text}</script></details>"
    )


def _compared(plan: MemoryPlan) -> dict[str, Any]:
    rows = [["", name, size] for name, size, _ in figures(plan)]
    rows += [["At the peak", one.what, one.bytes] for one in plan.gpu.at_peak if one.bytes]
    return {"name": name_of(plan), "fits": fits_text(plan), "mark": mark_of(plan), "rows": rows}


def _details(plan: MemoryPlan, index: int, run: DrawnRun | None, *, opened: bool) -> str:
    parts = [] if run is None else [chart(plan, run, name_of(plan))]
    parts.append(at_peak(plan))
    rows = [[name, format_gib(size), what] for name, size, what in figures(plan)]
    words = classed("words", [row[2] for row in rows])
    found = table("Figures", Table(["figure", "GiB", "what it is"], rows), {"what it is": words})
    parts.append(f"<h3>Figures of one GPU</h3>{found}")
    parts.append(paragraphs(reserved_sentence(plan) if run is not None else ""))
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
    peaks = plan.cpu.peaks
    found = host_rows(plan, max((len(peak.alive) for peak in peaks), default=0))
    most = max((peak.bytes for peak in peaks), default=0) or 1
    kinds = ["most" if peak.phase == plan.cpu.peak_phase else "" for peak in peaks]
    widths = [100 * peak.bytes / most for peak in peaks]
    bars = [
        f"<div class='share'><i class='{kind}' style='width:{width:.1f}%'></i></div>"
        for kind, width in zip(kinds, widths, strict=True)
    ]
    return table("Host by phase", found, {"alive there": classed("words", [row[3] for row in found.rows]), "bar": bars})


def _lines(plan: MemoryPlan) -> str:
    found = line_rows(plan)
    phases, formulas = classed("words", [row[3] for row in found.rows]), classed("", [row[4] for row in found.rows], "code")
    return table("Every line", found, {"phases": phases, "formula": formulas})
