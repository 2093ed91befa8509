"""``scale --html`` and ``--svg``: the speed and the memory of one GPU among ever more of them, as pictures."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from zeroplan.core.families import Family
from zeroplan.core.sizes import GIB
from zeroplan.report import svg
from zeroplan.report.html_parts import card, scrolling, table
from zeroplan.report.palette import FAMILY_COLORS
from zeroplan.report.plans import offload_text
from zeroplan.report.scaling import scaling_rows, scaling_sheet
from zeroplan.search.scaling import ScalePoint, Scaling

_WIDTH, _PANEL, _LEFT, _RIGHT = 760, 230, 64, 16
_TITLE, _GAP, _FOOT = 40, 58, 44
_STATES, _REST = FAMILY_COLORS[Family.PARAMETERS], FAMILY_COLORS[Family.ACTIVATIONS]


def scaling_page(found: Scaling, *, made: Mapping[str, str] | None = None) -> str:
    """Return the whole page; `made` is of :func:`~zeroplan.report.page.page`."""
    return scaling_sheet(found).page(
        card("Speed and memory of one GPU", scrolling("Pictures", scaling_svg(found, alone=False))),
        card("By number of GPUs", table("By number of GPUs", scaling_rows(found))),
        made=made,
    )


def scaling_svg(found: Scaling, *, alone: bool = True) -> str:
    """Return two pictures as one SVG: tokens a second of one GPU, and GiB of one GPU, over the number of GPUs.

    Args:
        found: the answer.
        alone: whether the SVG is a file of its own and not a part of a page.
    """
    height = 2 * _PANEL + _TITLE + _GAP + _FOOT
    parts = [
        *_speed_panel(found, _TITLE),
        *_memory_panel(found, _TITLE + _PANEL + _GAP),
        svg.text(_LEFT + _plot() / 2, height - 8, "GPUs", anchor="middle", color="faint"),
    ]
    return svg.picture(_WIDTH, height, f"{found.model['name']} on more GPUs", parts, alone=alone)


def _speed_panel(found: Scaling, top: int) -> list[str]:
    """Bars of one GPU's speed with their micro batch, and the line of linear speed-up."""
    first = found.first
    base = 0.0 if first is None else first.rank_tokens_per_second or 0.0
    most = max([1.0, *(point.rank_tokens_per_second or 0.0 for point in found.points)])
    scale = _round_top(1.12 * most)
    parts = [svg.text(_LEFT, top - 14, "Tokens a second of one GPU, and its micro batch", size=13, weight=600)]
    parts += _axis(top, scale, "{:,.0f}")
    for at, point in enumerate(found.points):
        x, width = _place(at, len(found.points))
        speed = point.rank_tokens_per_second
        if speed is None:
            parts.append(svg.text(x + width / 2, top + _PANEL - 6, "does not fit", anchor="middle", color="bad", size=10))
        else:
            height = _PANEL * speed / scale
            parts.append(_bar(x, top + _PANEL - height, width, height, _STATES, _what(point)))
            label = str(point.shown.workload.batch.micro_batch)
            parts.append(svg.text(x + width / 2, top + _PANEL - height - 5, label, anchor="middle"))
        parts.append(svg.text(x + width / 2, top + _PANEL + 15, f"{point.ranks:,}", anchor="middle", color="faint"))
    if base:
        y = top + _PANEL * (1 - base / scale)
        parts.append(_rule(y, "ink", dashes="5 3"))
        parts.append(_label(y, "linear speed-up", "ink"))
    return parts


def _memory_panel(found: Scaling, top: int) -> list[str]:
    """Bars of one GPU's memory, its model states below, and the line of what is usable."""
    usable = found.points[-1].cluster.usable_vram or 0
    most = max(usable, *(point.shown.plan.gpu.at_most for point in found.points if point.best is not None), 1)
    scale = _round_top(1.12 * most / GIB)
    parts = [
        svg.text(_LEFT, top - 14, "GiB of one GPU", size=13, weight=600),
        f"<rect x='{_LEFT + 130}' y='{top - 24}' width='11' height='11' rx='2' {svg.area(_STATES)}/>",
        svg.text(_LEFT + 146, top - 14, "model states"),
        f"<rect x='{_LEFT + 232}' y='{top - 24}' width='11' height='11' rx='2' {svg.area(_REST)}/>",
        svg.text(_LEFT + 248, top - 14, "activations, buffers and the rest, at most"),
    ]
    parts += _axis(top, scale, "{:g}")
    for at, point in enumerate(found.points):
        x, width = _place(at, len(found.points))
        states, high = point.shown.plan.gpu.model_states / GIB, point.shown.plan.gpu.at_most / GIB
        for value, color in ((high, _REST), (states, _STATES)):
            height = _PANEL * min(value / scale, 1.0)
            parts.append(_bar(x, top + _PANEL - height, width, height, color, _what(point)))
        if high > scale:
            parts.append(svg.text(x + width / 2, top + 14, f"{high:,.0f}", anchor="middle", color="ink", rim=True))
        parts.append(svg.text(x + width / 2, top + _PANEL + 15, f"{point.ranks:,}", anchor="middle", color="faint"))
    if usable:
        y = top + _PANEL * (1 - usable / GIB / scale)
        parts.append(_rule(y, "bad"))
        parts.append(_label(y, f"usable {usable / GIB:.1f}", "bad"))
    return parts


def _what(point: ScalePoint) -> str:
    one = point.shown
    offload = "" if (words := offload_text(one.plan)) == "none" else f", offload {words}"
    again = ", checkpointing" if one.workload.gradient_checkpointing else ""
    again += f", {one.workload.compile} compiled" if one.workload.compile is not None else ""
    return f"{point.ranks:,} GPUs: ZeRO-{one.zero.stage}{offload}{again}, micro batch {one.workload.batch.micro_batch}"


def _plot() -> float:
    return _WIDTH - _LEFT - _RIGHT


def _place(at: int, count: int) -> tuple[float, float]:
    """Left edge and width of a bar."""
    step = _plot() / count
    width = min(0.64 * step, 70)
    return _LEFT + at * step + (step - width) / 2, width


def _round_top(value: float) -> float:
    """The next round number of which four parts are round, too."""
    power = 10.0 ** (len(str(int(value))) - 1)
    return next(factor * power for factor in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 4.8, 6, 8, 10) if factor * power >= value)


def _axis(top: int, scale: float, form: str) -> list[str]:
    parts = []
    for part in range(5):
        y = top + _PANEL * (1 - part / 4)
        parts.append(_rule(y, "line"))
        parts.append(svg.text(_LEFT - 8, y + 4, form.format(scale * part / 4), anchor="end", color="faint"))
    return parts


def _rule(y: float, color: str, dashes: str = "") -> str:
    return svg.line(_LEFT, y, _WIDTH - _RIGHT, y, color, dash=dashes)


def _bar(x: float, y: float, width: float, height: float, color: str, what: str) -> str:
    return (
        f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height:.1f}' {svg.area(color)}>"
        f"<title>{escape(what)}</title></rect>"
    )


def _label(y: float, words: str, color: str) -> str:
    """Words at the right end of a line, on a rim, so that they are read over bars."""
    return svg.text(_WIDTH - _RIGHT - 4, y - 4, words, anchor="end", color=color, weight=600, rim=True)
