"""``estimate --html``: plans and the timelines behind them as one HTML file that loads no other file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from zeroplan.core.buffers import Buffer
from zeroplan.core.units import format_bytes, format_count
from zeroplan.report.page import page
from zeroplan.report.timeline import Frame, timeline_svg
from zeroplan.report.words import gpus_text
from zeroplan.simulate.timeline import Curve, Note, Timeline

_FITS = {True: "<span class='yes'>fits</span>", False: "<span class='no'>does not fit</span>", None: ""}
#: Most rows in the tables of what is alive at the peak.
_MOST_ROWS = 14


def html_report(
    report: Mapping[str, Any],
    timelines: Mapping[int, Timeline] | None = None,
    origin: Callable[[Buffer, Note], str] | None = None,
) -> str:
    """Return the page.

    Args:
        report: the object that ``--json`` prints (see :class:`zeroplan.core.plan.Report`).
        timelines: the simulated run of each plan, by the plan's index among the report's plans.
        origin: names the module or parameter of an allocation, given its buffer and note (see :func:`.peak.origin_in`).
    """
    plans = report["plans"]
    timelines = timelines or {}
    single = len(plans) == 1
    body = [
        f"<h1>{escape(report['model']['name'])}</h1>",
        f"<p class='lead'>{escape(_lead(report))}</p>",
        _warnings(report.get("warnings", ())),
        "" if single else f"<section class='card'><h2>Plans</h2>{_overview(plans)}</section>",
    ]
    for index, plan in enumerate(plans):
        timeline = timelines.get(index)
        body.append(_plan(plan, timeline, origin or _plain_origin, opened=single or timeline is not None))
    body.append(
        "<footer>Made by zeroplan. Sizes are binary: 1 GiB = 2<sup>30</sup> bytes, on the GPU that needs the most.</footer>"
    )
    return page(f"{report['model']['name']}: memory", body, script="timeline.js")


def _plain_origin(_: Buffer, note: Note) -> str:
    return "unnamed" if note == -1 else str(note)


def _lead(report: Mapping[str, Any]) -> str:
    model, workload, cluster = report["model"], report["workload"], report["cluster"]
    parts = [f"{format_count(model['params'])} parameters"]
    if model["trainable"] != model["params"]:
        parts.append(f"{format_count(model['trainable'])} trainable")
    parts.append(f"micro batch {workload.get('micro_batch')} × {workload.get('seq_len')} tokens")
    parts += [str(workload[key]) for key in ("dtype", "optimizer", "attn") if workload.get(key)]
    if workload.get("gradient_checkpointing"):
        policy = workload.get("checkpoint_policy", "full")
        parts.append("gradient checkpointing" + (f" ({policy})" if policy != "full" else ""))
    parts.append(gpus_text(cluster.get("nodes", 1), cluster.get("gpus", 1)))
    if cluster.get("gpu"):
        parts[-1] += f" ({cluster['gpu']})"
    return " · ".join(parts)


def _warnings(warnings: Sequence[str]) -> str:
    if not warnings:
        return ""
    return f"<section class='card warning'><ul>{''.join(f'<li>{escape(text)}</li>' for text in warnings)}</ul></section>"


def _label(plan: Mapping[str, Any]) -> str:
    text = f"{plan['engine']} {plan['engine_version']}, stage {plan['stage']}"
    for key, what in (("offload_optimizer", "optimizer"), ("offload_param", "parameters")):
        if plan[key] != "none":
            text += f", {what} on {plan[key]}"
    return text


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]], *, figures: Sequence[int] = ()) -> str:
    """Return a table. The cells are HTML already; the columns whose indices are in `figures` align right."""

    def cell(tag: str, at: int, content: str) -> str:
        return f"<{tag}{' class=figure' if at in figures else ''}>{content}</{tag}>"

    head = "".join(cell("th", at, escape(header)) for at, header in enumerate(headers))
    lines = ["".join(cell("td", at, content) for at, content in enumerate(row)) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _fits(plan: Mapping[str, Any]) -> str:
    return "<span class='unknown'>unknown</span>" if plan.get("settle") else _FITS[plan.get("fits")]


def _left_out(plan: Mapping[str, Any]) -> str:
    """Return what the figures leave out, and what would settle whether the plan fits."""
    texts = [f"Not in the figures: {one['key']} ({one['effect']}): {one['says']}" for one in plan.get("unmodelled", ())]
    return _warnings([*texts, *([f"To settle whether it fits, {plan['settle']}."] if plan.get("settle") else [])])


def _needed(plan: Mapping[str, Any]) -> int:
    gpu = plan["gpu"]
    return int(gpu["total"] if gpu.get("total") is not None else max([gpu["live_after_step"], *gpu.get("phases", {}).values()]))


def _overview(plans: Sequence[Mapping[str, Any]]) -> str:
    most = max((max(_needed(plan), plan["gpu"].get("usable") or 0) for plan in plans), default=0) or 1
    rows = []
    for plan in plans:
        gpu, needed = plan["gpu"], _needed(plan)
        usable = gpu.get("usable")
        over = " class='over'" if usable and needed > usable else ""
        rows.append(
            [
                escape(_label(plan)),
                *(format_bytes(gpu.get(key)) for key in ("model_states", "activations", "peak_allocated", "peak_reserved")),
                format_bytes(needed),
                f"<div class='bar'><i{over} style='width:{100 * needed / most:.1f}%'></i></div>",
                format_bytes(plan["cpu"]["per_node"] or None),
                format_bytes(plan["nvme"]["per_node"] or None),
                _fits(plan),
            ]
        )
    headers = ["plan", "states", "activations", "allocated", "reserved", "needed", "", "host a node", "disk a node", ""]
    return _table(headers, rows, figures=(1, 2, 3, 4, 5, 7, 8))


def _plan(plan: Mapping[str, Any], timeline: Timeline | None, origin: Callable[[Buffer, Note], str], *, opened: bool) -> str:
    parts = [_tiles(plan), _left_out(plan), _warnings(plan.get("warnings", ()))]
    if timeline is not None:
        parts += [_plot(plan, timeline.curve()), _alive(timeline, origin)]
    parts.append(_host(plan["cpu"]))
    parts.append(_lines(plan["lines"]))
    title = f"<h2>{escape(_label(plan))}</h2><span>{_fits(plan)}</span><b>{format_bytes(_needed(plan))}</b>"
    head = f"<summary>{title}</summary>"
    return f"<details class='card'{' open' if opened else ''}>{head}{''.join(parts)}</details>"


def _tiles(plan: Mapping[str, Any]) -> str:
    gpu = plan["gpu"]
    known = [
        ("model states", gpu["model_states"]),
        ("activations", gpu.get("activations")),
        ("live after a step", gpu["live_after_step"]),
        ("peak allocated" + (f", in {gpu['peak_phase']}" if gpu.get("peak_phase") else ""), gpu.get("peak_allocated")),
        ("peak reserved", gpu.get("peak_reserved")),
        ("up to, with activations, in 19 of 20 models", gpu.get("bound")),
        ("total on the GPU" + _interval(gpu.get("interval")), gpu.get("total")),
        ("host memory a node", plan["cpu"]["per_node"] or None),
        ("of it pinned", plan["cpu"]["pinned"] or None),
        ("disk a node", plan["nvme"]["per_node"] or None),
    ]
    tiles = [
        f"<div class='tile'><b>{format_bytes(value)}</b><span>{escape(name)}</span></div>" for name, value in known if value
    ]
    return f"<div class='tiles'>{''.join(tiles)}</div>"


def _interval(interval: Sequence[int] | None) -> str:
    return f", {format_bytes(interval[0])} to {format_bytes(interval[1])}" if interval else ""


def _plot(plan: Mapping[str, Any], curve: Curve) -> str:
    frame = Frame()
    data = {
        "frame": {
            "width": frame.width,
            "left": frame.left,
            "plot": frame.plot_width,
            "top": frame.top,
            "height": frame.plot_height,
        },
        "positions": [round(position, 5) for position in curve.positions],
        "allocated": curve.allocated,
        "reserved": curve.reserved,
        "buffers": {buffer.value: values for buffer, values in curve.by_buffer.items()},
        "marks": curve.marks,
    }
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    picture = timeline_svg(curve, title="GPU memory over the run", limit=plan["gpu"].get("usable"), frame=frame)
    return (
        f"<div class='plot'>{picture}<div class='rule'></div><div class='hover'></div>"
        f"<script type='application/json'>{text}</script></div>"
    )


def _alive(timeline: Timeline, origin: Callable[[Buffer, Note], str]) -> str:
    whole = timeline.peak_allocated or 1

    def rows(totals: Mapping[str, int]) -> list[list[str]]:
        shown = list(totals.items())[:_MOST_ROWS]
        rest = sum(totals.values()) - sum(value for _, value in shown)
        shown += [(f"{len(totals) - _MOST_ROWS} smaller", rest)] if rest else []
        return [[escape(name), format_bytes(value), f"{100 * value / whole:.1f} %"] for name, value in shown]

    by_buffer = {buffer.value: value for buffer, value in timeline.alive_by_buffer().items()}
    by_note: dict[str, int] = {}
    for (buffer, note), value in timeline.alive_by_buffer_and_note().items():
        name = origin(buffer, note)
        by_note[name] = by_note.get(name, 0) + value
    by_note = dict(sorted(by_note.items(), key=lambda item: -item[1]))
    headers = ["", "bytes", "share"]
    return (
        f"<h3>Alive at the peak of {format_bytes(timeline.peak_allocated)}"
        f"{', before ' + escape(timeline.peak_mark()) + ' ends' if timeline.peak_mark() else ''}</h3><div class='columns'>"
        f"<div>{_table(['by buffer', *headers[1:]], rows(by_buffer), figures=(1, 2))}</div>"
        f"<div>{_table(['by origin', *headers[1:]], rows(by_note), figures=(1, 2))}</div></div>"
    )


def _host(cpu: Mapping[str, Any]) -> str:
    """Return a table of host memory by phase, with a bar for each phase's peak and the buffers alive there."""
    peaks = cpu.get("peaks") or ()
    if not peaks:
        return ""
    most = max(peak["bytes"] for peak in peaks) or 1
    rows = []
    for peak in peaks:
        parts = [f"{one['buffer']} ({one['place']}) {format_bytes(one['bytes'])}" for one in peak["alive"]]
        over = " class='over'" if peak["phase"] == cpu.get("peak_phase") else ""
        rows.append(
            [
                escape(peak["phase"]),
                format_bytes(peak["bytes"]),
                format_bytes(peak["pinned"] or None),
                f"<div class='bar'><i{over} style='width:{100 * peak['bytes'] / most:.1f}%'></i></div>",
                f"<span class='words'>{escape(', '.join(parts))}</span>",
            ]
        )
    return f"<h3>Host memory of a node</h3>{_table(['phase', 'most', 'pinned', '', 'alive there'], rows, figures=(1, 2))}"


def _lines(lines: Sequence[Mapping[str, Any]]) -> str:
    if not lines:
        return ""
    rows = [
        [
            escape(line["buffer"]),
            escape(line["place"]),
            format_bytes(line["bytes"]),
            f"<span class='words'>{escape(', '.join(line['phases']))}</span>",
            f"<code>{escape(line['formula'])}</code>" if line.get("formula") else "",
        ]
        for line in sorted(lines, key=lambda line: -line["bytes"])
    ]
    return f"<h3>Every line</h3>{_table(['buffer', 'place', 'bytes', 'alive during', 'formula'], rows, figures=(2,))}"
