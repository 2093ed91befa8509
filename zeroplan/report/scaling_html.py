"""``scale --html`` and ``--svg``: the speed and the memory of one GPU among ever more of them, as pictures."""

from __future__ import annotations

from html import escape

from zeroplan.core.units import GIB
from zeroplan.report.page import page
from zeroplan.report.plans import offload_text
from zeroplan.report.scaling import growth_sentence, heading, scaling_table, scaling_verdict
from zeroplan.search.scaling import ScalePoint, Scaling

_WIDTH, _PANEL, _LEFT, _RIGHT = 760, 230, 64, 16
_TITLE, _GAP, _FOOT = 40, 58, 44
_INK, _FAINT, _GRID = "#1b2733", "#5d6b7a", "#e1e6eb"
_SPEED, _STATES, _REST, _LIMIT = "#1d4f91", "#1d4f91", "#f2a65e", "#c0182f"
_FONT = "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'"


def scaling_page(found: Scaling) -> str:
    """Return the whole page."""
    growth, table = growth_sentence(found), scaling_table(found, "html")
    body = [
        f"<h1>{escape(str(found.model['name']))}</h1>",
        f"<p class='lead'>{escape(scaling_verdict(found))}{' ' + escape(growth) if growth else ''}</p>",
        f"<section class='card'><div class='plot'>{scaling_svg(found)}</div></section>",
        f"<section class='card'><p>{escape(heading(found))}</p><div class='scroll'>{table}</div></section>",
        *(f"<section class='card warning'>{escape(text)}</section>" for text in found.warnings),
    ]
    return page(f"{found.model['name']}: scaling", body)


def scaling_svg(found: Scaling) -> str:
    """Return two pictures as one SVG: tokens a second of one GPU, and GiB of one GPU, over the number of GPUs."""
    height = 2 * _PANEL + _TITLE + _GAP + _FOOT
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {height}' width='{_WIDTH}' height='{height}' "
        f"{_FONT} role='img'>",
        f"<title>{escape(str(found.model['name']))} on more GPUs</title>",
        f"<rect width='{_WIDTH}' height='{height}' fill='#ffffff'/>",
        *_speed_panel(found, _TITLE),
        *_memory_panel(found, _TITLE + _PANEL + _GAP),
        _text(_LEFT + _plot() / 2, height - 8, "GPUs", anchor="middle", color=_FAINT),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _speed_panel(found: Scaling, top: int) -> list[str]:
    """Bars of one GPU's speed with their micro batch, and the line of linear speed-up."""
    first = found.first
    base = 0.0 if first is None else first.rank_tokens_per_second or 0.0
    most = max([1.0, *(point.rank_tokens_per_second or 0.0 for point in found.points)])
    scale = _round_top(1.12 * most)
    parts = [_text(_LEFT, top - 14, "Tokens a second of one GPU, and its micro batch", size=13, weight=600)]
    parts += _axis(top, scale, "{:,.0f}")
    for at, point in enumerate(found.points):
        x, width = _place(at, len(found.points))
        speed = point.rank_tokens_per_second
        if speed is None:
            parts.append(_text(x + width / 2, top + _PANEL - 6, "does not fit", anchor="middle", color=_LIMIT, size=10))
        else:
            height = _PANEL * speed / scale
            parts.append(_bar(x, top + _PANEL - height, width, height, _SPEED, _what(point)))
            label = str(point.shown.workload.micro_batch)
            parts.append(_text(x + width / 2, top + _PANEL - height - 5, label, anchor="middle"))
        parts.append(_text(x + width / 2, top + _PANEL + 15, f"{point.ranks:,}", anchor="middle", color=_FAINT))
    if base:
        y = top + _PANEL * (1 - base / scale)
        parts.append(_rule(y, _INK, dashes="5 3"))
        parts.append(_halo(_WIDTH - _RIGHT - 4, y - 4, "linear speed-up", _INK))
    return parts


def _memory_panel(found: Scaling, top: int) -> list[str]:
    """Bars of one GPU's memory, its model states below, and the line of what is usable."""
    usable = found.points[-1].cluster.usable_vram or 0
    most = max(usable, *(_high(point) for point in found.points if point.best is not None), 1)
    scale = _round_top(1.12 * most / GIB)
    parts = [
        _text(_LEFT, top - 14, "GiB of one GPU", size=13, weight=600),
        f"<rect x='{_LEFT + 130}' y='{top - 24}' width='11' height='11' rx='2' fill='{_STATES}'/>",
        _text(_LEFT + 146, top - 14, "model states"),
        f"<rect x='{_LEFT + 232}' y='{top - 24}' width='11' height='11' rx='2' fill='{_REST}'/>",
        _text(_LEFT + 248, top - 14, "activations, buffers and the rest, at most"),
    ]
    parts += _axis(top, scale, "{:g}")
    for at, point in enumerate(found.points):
        x, width = _place(at, len(found.points))
        states, high = point.shown.plan.gpu.model_states / GIB, _high(point) / GIB
        for value, color in ((high, _REST), (states, _STATES)):
            height = _PANEL * min(value / scale, 1.0)
            parts.append(_bar(x, top + _PANEL - height, width, height, color, _what(point)))
        if high > scale:
            parts.append(_text(x + width / 2, top + 14, f"{high:,.0f}", anchor="middle", color="#ffffff"))
        parts.append(_text(x + width / 2, top + _PANEL + 15, f"{point.ranks:,}", anchor="middle", color=_FAINT))
    if usable:
        y = top + _PANEL * (1 - usable / GIB / scale)
        parts.append(_rule(y, _LIMIT))
        parts.append(_halo(_WIDTH - _RIGHT - 4, y - 4, f"usable {usable / GIB:.1f}", _LIMIT))
    return parts


def _high(point: ScalePoint) -> int:
    gpu = point.shown.plan.gpu
    return gpu.interval[1] if gpu.interval else gpu.needed


def _what(point: ScalePoint) -> str:
    one = point.shown
    offload = "" if (words := offload_text(one.plan)) == "none" else f", offload {words}"
    again = ", checkpointing" if one.workload.gradient_checkpointing else ""
    return f"{point.ranks:,} GPUs: ZeRO-{one.zero.stage}{offload}{again}, micro batch {one.workload.micro_batch}"


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
        parts.append(_rule(y, _GRID))
        parts.append(_text(_LEFT - 8, y + 4, form.format(scale * part / 4), anchor="end", color=_FAINT))
    return parts


def _rule(y: float, color: str, dashes: str = "") -> str:
    extra = f" stroke-dasharray='{dashes}'" if dashes else ""
    return f"<line x1='{_LEFT}' x2='{_WIDTH - _RIGHT}' y1='{y:.1f}' y2='{y:.1f}' stroke='{color}'{extra}/>"


def _bar(x: float, y: float, width: float, height: float, color: str, what: str) -> str:
    return (
        f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height:.1f}' fill='{color}'>"
        f"<title>{escape(what)}</title></rect>"
    )


def _halo(x: float, y: float, words: str, color: str) -> str:
    """Words on a white edge, so that they are read over bars."""
    edge = "stroke='#ffffff' stroke-width='3.5' stroke-linejoin='round' paint-order='stroke'"
    return _text(x, y, words, anchor="end", color=color, weight=600, extra=edge)


def _text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 11,
    weight: int = 400,
    color: str = _INK,
    anchor: str = "start",
    extra: str = "",
) -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' font-weight='{weight}' fill='{color}' "
        f"text-anchor='{anchor}' {extra}>{escape(words)}</text>"
    )
