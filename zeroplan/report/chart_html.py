"""A plan's run as a chart that its page draws: the data beside it, and what is alive at the peak, largest first."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape

from zeroplan.core.families import Family
from zeroplan.core.plan import MemoryPlan
from zeroplan.core.sizes import format_bytes
from zeroplan.report.html_parts import folded, table
from zeroplan.report.palette import FAMILY_COLORS, OTHER_COLOR
from zeroplan.report.plans import LEAST_SHARE, peak_parts
from zeroplan.report.table import Table
from zeroplan.report.timeline import DrawnRun, Layer, layers, phase_name

#: Points of a curve. A phone has about as many pixels.
_POINTS = 320
#: A size is written in whole parts of the most that is reserved, of which there are this many.
_PARTS = 1 << 16
_NAMES = frozenset(Family)
#: Most rows in the table of what is alive at the peak.
_MOST_ROWS = 14


def chart(plan: MemoryPlan, run: DrawnRun, name: str) -> str:
    """Return the chart's place with its data: families of buffers, the lowest first, that add up to what is allocated.

    A list of sizes is written as text in which a size that equals the one before is left out: ``"5,,,7"``.
    """
    curve = run.timeline.curve(_POINTS)
    stack = layers(run, curve)
    unit = max(1, max(curve.reserved, default=0) // _PARTS)

    def packed(sizes: Sequence[int]) -> str:
        whole = [round(size / unit) for size in sizes]
        return ",".join(str(now) if at == 0 or now != whole[at - 1] else "" for at, now in enumerate(whole))

    data = {
        "unit": unit,
        "usable": plan.gpu.usable,
        "positions": ",".join(f"{position:.4f}".lstrip("0") for position in curve.positions),
        "allocated": packed(curve.allocated),
        "reserved": packed(curve.reserved),
        "layers": [[one.name, one.color, packed(one.bytes)] for one in stack],
        "marks": [[round(position, 4), phase_name(mark)] for position, mark in curve.marks],
    }
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    label = f"GPU memory over the run of {name}: allocated by family, reserved, and the card's line"
    return (
        f"<div class='plot' role='img' tabindex='0' aria-label='{escape(label)}'>"
        f"<script type='application/json'>{text}</script></div>{_elsewhere(plan, stack)}"
    )


def _elsewhere(plan: MemoryPlan, stack: Sequence[Layer]) -> str:
    """Name the families that the picture shows and the table of the peak does not, each with the most that it has."""
    listed, whole = {what for what, _, _ in peak_parts(plan)}, sum(one.bytes for one in plan.gpu.at_peak)
    others = [(one, max(one.bytes)) for one in stack if one.name not in listed and max(one.bytes) >= LEAST_SHARE * whole]
    named = [f"{_chip(one.color)}{escape(one.name)} up to {format_bytes(most, digits=1)}" for one, most in others]
    return f"<p class='words'>Elsewhere in the run: {', '.join(named)}.</p>" if named else ""


def _chip(color: str) -> str:
    return f"<i class='chip' style='--c:{color}'></i>"


def at_peak(plan: MemoryPlan) -> str:
    """Return a row for each family at the peak: its colour in the chart, its bytes, and its share as a bar."""
    parts = peak_parts(plan)
    if not parts:
        return ""
    colors = [FAMILY_COLORS[Family(what)] if what in _NAMES else OTHER_COLOR for what, _, _ in parts]
    rows = [[what, format_bytes(size, digits=1), f"{100 * share:.0f} %"] for what, size, share in parts]
    chips = [f"{_chip(color)}{escape(row[0])}" for color, row in zip(colors, rows, strict=True)]
    bars = [
        f"<div class='share'><i style='--c:{color};width:{100 * share:.1f}%'></i></div>"
        for color, (_, _, share) in zip(colors, parts, strict=True)
    ]
    whole = format_bytes(sum(size for _, size, _ in parts), digits=1)
    where = f", in the {plan.gpu.peak_phase}" if plan.gpu.peak_phase else ""
    found = table("Alive at the peak", Table(["family", "bytes", "share"], rows), {"family": chips, "bar": bars})
    return f"<h3>Alive at the peak of {whole}{escape(where)}</h3>{found}"


def by_origin(run: DrawnRun) -> str:
    """Return a folded table of the modules and parameters that most of the peak belongs to."""
    totals: dict[str, int] = {}
    for (buffer, note), size in run.timeline.alive_by_buffer_and_note().items():
        name = f"{buffer.value} of {run.origin(buffer, note)}"
        totals[name] = totals.get(name, 0) + size
    return folded(
        "At the peak, by module and parameter",
        table("By module and parameter", Table(["buffer", "bytes", "share"], _largest(totals))),
    )


def _largest(totals: Mapping[str, int]) -> list[list[str]]:
    whole = sum(totals.values()) or 1
    ranked = sorted(totals.items(), key=lambda item: -item[1])
    shown, others = ranked[:_MOST_ROWS], ranked[_MOST_ROWS:]
    if others:
        shown.append((f"{len(others)} smaller", sum(size for _, size in others)))
    return [[name, format_bytes(size), f"{100 * size / whole:.1f} %"] for name, size in shown]
