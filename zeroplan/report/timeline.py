"""A run's GPU memory as an SVG: allocated bytes stacked by buffer, with the reserved bytes as a line above."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from zeroplan.core.buffers import Buffer
from zeroplan.core.units import GIB, MIB, format_bytes
from zeroplan.simulate.timeline import Curve

#: Buffers of one family share a hue, and a buffer has the same colour in every picture. The first is drawn lowest.
COLORS: dict[Buffer, str] = {
    Buffer.PARAM_SHARD: "#1d4f91",
    Buffer.PARAM_FROZEN: "#3a7bc8",
    Buffer.PARAM_PERSISTENT: "#5b9bd5",
    Buffer.PARAM_SECONDARY: "#7fb2e5",
    Buffer.PARAM_MASTER: "#0b2f5c",
    Buffer.PARAM_FULL: "#8ec1f0",
    Buffer.PARAM_REFERENCE: "#b8d9f6",
    Buffer.MODEL_BUFFER: "#b7d7f5",
    Buffer.OPTIM_EXP_AVG: "#5e3a87",
    Buffer.OPTIM_EXP_AVG_SQ: "#8259b3",
    Buffer.OPTIM_MOMENTUM: "#5e3a87",
    Buffer.OPTIM_SUM: "#8259b3",
    Buffer.OPTIM_MAX_EXP_AVG_SQ: "#a583cc",
    Buffer.OPTIM_AVERAGE: "#8259b3",
    Buffer.OPTIM_PREVIOUS_GRAD: "#5e3a87",
    Buffer.OPTIM_STEP_SIZE: "#8259b3",
    Buffer.OPTIM_FACTORED: "#8259b3",
    Buffer.OPTIM_SCALE: "#a583cc",
    Buffer.OPTIM_ERROR_FEEDBACK: "#a583cc",
    Buffer.GRAD_ACCUM: "#14603a",
    Buffer.GRAD_SHARD: "#1f8a53",
    Buffer.GRAD_MASTER: "#3fae76",
    Buffer.GRAD_FULL: "#79cfa2",
    Buffer.COMM_BUCKET: "#0e7c86",
    Buffer.COMM_ALL_GATHER: "#22a6b3",
    Buffer.COMM_REDUCE_SCATTER: "#5cc3cc",
    Buffer.COMM_ALL_REDUCE: "#8dd7dd",
    Buffer.COMM_BROADCAST: "#b5e6ea",
    Buffer.COMM_ACTIVATION: "#0b5f66",
    Buffer.COMM_PIPELINE: "#063f44",
    Buffer.STAGE_H2D: "#8a6d3b",
    Buffer.STAGE_D2H: "#b08d57",
    Buffer.SWAP_BUFFER: "#cdb38b",
    Buffer.WORKSPACE: "#7f8c9b",
    Buffer.INPUT: "#a3adb9",
    Buffer.ACTIVATION_CHECKPOINT: "#c2410c",
    Buffer.ACTIVATION: "#f28c38",
    Buffer.LOGITS: "#d7263d",
    Buffer.ACTIVATION_TEMP: "#fbc15e",
    Buffer.OPTIM_TEMP: "#c9a7e8",
    Buffer.OPTIM_TRUST: "#d5baed",
    Buffer.OPTIM_NORM: "#e0cdf2",
    Buffer.INIT_TEMP: "#c8d0d9",
}
OTHER_COLOR = "#d9dee4"

_INK, _FAINT, _GRID, _RESERVED, _LIMIT = "#1b2733", "#5d6b7a", "#e6eaee", "#1b2733", "#c0182f"
_FONT = "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'"


@dataclass(frozen=True, slots=True)
class Frame:
    """Sizes and margins of the picture, in pixels."""

    width: int = 1120
    height: int = 470
    left: int = 62
    right: int = 252
    top: int = 74
    bottom: int = 38

    @property
    def plot_width(self) -> int:
        """Width between the axes, in pixels."""
        return self.width - self.left - self.right

    @property
    def plot_height(self) -> int:
        """Height between the axes, in pixels."""
        return self.height - self.top - self.bottom

    def x(self, position: float) -> float:
        """Return the x coordinate in pixels of a position from 0 (the first event) to 1 (the last)."""
        return self.left + position * self.plot_width

    def y(self, value: float, top: float) -> float:
        """Return the y coordinate in pixels of `value` bytes, where `top` bytes are the upper edge."""
        return self.top + self.plot_height * (1 - value / top)


def layers(curve: Curve, most: int = 11) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return (name, colour, bytes at each point) for each layer, lowest first. All but the `most` largest are one layer."""
    largest = sorted(curve.by_buffer, key=lambda buffer: max(curve.by_buffer[buffer], default=0), reverse=True)
    shown = [buffer for buffer in largest if any(curve.by_buffer[buffer])]
    rest = shown[most:] if len(shown) > most + 1 else []
    shown = [buffer for buffer in shown if buffer not in rest]
    order = {buffer: place for place, buffer in enumerate(COLORS)}
    shown.sort(key=lambda buffer: order.get(buffer, len(order)))
    stack = [(buffer.value, COLORS.get(buffer, OTHER_COLOR), curve.by_buffer[buffer]) for buffer in shown]
    if rest:
        sums = tuple(sum(column) for column in zip(*(curve.by_buffer[buffer] for buffer in rest), strict=True))
        stack.append((f"{len(rest)} smaller", OTHER_COLOR, sums))
    return stack


def timeline_svg(
    curve: Curve, *, title: str = "", subtitle: str = "", limit: int | None = None, frame: Frame | None = None
) -> str:
    """Return the picture as SVG text.

    Args:
        curve: from :meth:`Timeline.curve`.
        title, subtitle: the two lines above the picture.
        limit: usable bytes of the GPU. A line is drawn if it is below 1.6 times the highest value.
        frame: sizes and margins.
    """
    frame = frame or Frame()
    highest = max((*curve.reserved, *curve.allocated, 1))
    show_limit = limit is not None and limit < 1.6 * highest
    top = max(highest, limit if show_limit and limit is not None else 0) * 1.04
    peak = max(range(len(curve.allocated)), key=curve.allocated.__getitem__, default=-1)
    stack = layers(curve)
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {frame.width} {frame.height}' width='{frame.width}' "
        f"height='{frame.height}' {_FONT} role='img'>",
        f"<title>{escape(title or 'GPU memory over a run')}</title>",
        f"<rect width='{frame.width}' height='{frame.height}' fill='#ffffff'/>",
        _text(frame.left, 24, title, size=16, weight=600),
        _text(frame.left, 43, subtitle, size=12, color=_FAINT),
        *_grid(frame, top),
        *_areas(frame, curve, stack, top),
        _reserved_line(frame, curve, top),
        *_phases(frame, curve),
    ]
    if show_limit and limit is not None:
        parts += _limit_line(frame, limit, top)
    if peak >= 0:
        parts += _peak(frame, curve, peak, top)
    parts += _legend(frame, curve, stack, peak)
    parts.append(
        _text(
            frame.left + frame.plot_width / 2,
            frame.height - 10,
            "events in order (not to scale in time)",
            anchor="middle",
            color=_FAINT,
        )
    )
    parts.append("</svg>")
    return "\n".join(part for part in parts if part)


def _text(
    x: float,
    y: float,
    words: str,
    *,
    size: float = 11,
    weight: int = 400,
    color: str = _INK,
    anchor: str = "start",
    extra: str = "",
) -> str:
    if not words:
        return ""
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' font-weight='{weight}' fill='{color}' "
        f"text-anchor='{anchor}' {extra}>{escape(words)}</text>"
    )


def _ticks(top: float) -> list[tuple[float, str]]:
    """Return about six round values up to `top` bytes, each with its label; all labels have the same unit."""
    unit, name = (GIB, "GiB") if top >= 2 * GIB else (MIB, "MiB")
    rough = top / unit / 6
    power = 10.0 ** (len(str(int(rough))) - 1) if rough >= 1 else 0.1
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10, 20) if factor * power >= rough)
    count = int(top / unit / step)
    return [(at * step * unit, f"{at * step:g} {name}" if at else "0") for at in range(count + 1)]


def _grid(frame: Frame, top: float) -> list[str]:
    parts = []
    for value, label in _ticks(top):
        y = frame.y(value, top)
        parts.append(f"<line x1='{frame.left}' x2='{frame.x(1)}' y1='{y:.1f}' y2='{y:.1f}' stroke='{_GRID}'/>")
        parts.append(_text(frame.left - 7, y + 3.5, label, color=_FAINT, anchor="end"))
    return parts


def _areas(frame: Frame, curve: Curve, stack: Sequence[tuple[str, str, tuple[int, ...]]], top: float) -> list[str]:
    below = [0] * len(curve.events)
    xs = [frame.x(position) for position in curve.positions]
    parts = []
    for name, color, heights in stack:
        above = [low + height for low, height in zip(below, heights, strict=True)]
        outline = [f"{x:.1f},{frame.y(value, top):.1f}" for x, value in zip(xs, above, strict=True)]
        outline += [f"{x:.1f},{frame.y(value, top):.1f}" for x, value in zip(reversed(xs), reversed(below), strict=True)]
        parts.append(f"<polygon points='{' '.join(outline)}' fill='{color}'><title>{escape(name)}</title></polygon>")
        below = above
    return parts


def _reserved_line(frame: Frame, curve: Curve, top: float) -> str:
    points = " ".join(
        f"{frame.x(position):.1f},{frame.y(value, top):.1f}"
        for position, value in zip(curve.positions, curve.reserved, strict=True)
    )
    return (
        f"<polyline points='{points}' fill='none' stroke='{_RESERVED}' stroke-width='1.4' stroke-dasharray='5 3'>"
        "<title>reserved by the caching allocator</title></polyline>"
    )


def _phases(frame: Frame, curve: Curve) -> list[str]:
    bounds = [(0.0, ""), *curve.marks]
    parts = [
        f"<line x1='{frame.left}' x2='{frame.left}' y1='{frame.top}' y2='{frame.top + frame.plot_height}' stroke='{_FAINT}'/>"
    ]
    for (start, _), (end, name) in pairwise(bounds):
        x, width = frame.x(end), (end - start) * frame.plot_width
        parts.append(
            f"<line x1='{x:.1f}' x2='{x:.1f}' y1='{frame.top - 6}' y2='{frame.top + frame.plot_height}' "
            f"stroke='{_FAINT}' stroke-opacity='0.45'/>"
        )
        room = int(width / 5.8)  # pixels of a letter, about
        if room >= min(len(name), 3):
            label = name if len(name) <= room else name[: room - 1] + "…"
            parts.append(_text(x - width / 2, frame.top - 8, label, anchor="middle", color=_FAINT))
    return parts


def _limit_line(frame: Frame, limit: int, top: float) -> list[str]:
    y = frame.y(limit, top)
    return [
        f"<line x1='{frame.left}' x2='{frame.x(1)}' y1='{y:.1f}' y2='{y:.1f}' stroke='{_LIMIT}' stroke-width='1.5'/>",
        _text(frame.x(1) - 4, y - 5, f"usable {format_bytes(limit)}", color=_LIMIT, anchor="end", weight=600),
    ]


def _peak(frame: Frame, curve: Curve, peak: int, top: float) -> list[str]:
    x, y = frame.x(curve.positions[peak]), frame.y(curve.allocated[peak], top)
    side, anchor = (-8, "end") if curve.positions[peak] > 0.8 else (8, "start")
    label = f"peak {format_bytes(curve.allocated[peak])}"
    halo = "stroke='#ffffff' stroke-width='3.5' stroke-linejoin='round'"
    return [
        f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4' fill='#ffffff' stroke='{_INK}' stroke-width='1.6'/>",
        _text(x + side, y - 7, label, anchor=anchor, weight=600, size=12, extra=halo),
        _text(x + side, y - 7, label, anchor=anchor, weight=600, size=12),
    ]


def _legend(frame: Frame, curve: Curve, stack: Sequence[tuple[str, str, tuple[int, ...]]], peak: int) -> list[str]:
    x, right, y = frame.x(1) + 22, frame.width - 14, frame.top + 4
    parts = [_text(x, y, "alive at the peak", weight=600), ""]
    rows = [(name, color, heights[peak]) for name, color, heights in reversed(stack)] if peak >= 0 else []
    for name, color, value in rows:
        y += 20
        ink = _INK if value else _FAINT
        parts.append(f"<rect x='{x}' y='{y - 9}' width='11' height='11' rx='2' fill='{color}'/>")
        parts.append(_text(x + 18, y, name, color=ink))
        parts.append(_text(right, y, format_bytes(value) if value else "-", anchor="end", color=ink))
    if rows:
        y += 22
        parts.append(f"<line x1='{x}' x2='{right}' y1='{y - 15}' y2='{y - 15}' stroke='{_GRID}'/>")
        parts += [
            _text(x + 18, y, "allocated", weight=600),
            _text(right, y, format_bytes(curve.allocated[peak]), anchor="end", weight=600),
        ]
    y += 20
    line = f"x1='{x}' x2='{x + 12}' y1='{y - 4}' y2='{y - 4}'"
    parts.append(f"<line {line} stroke='{_RESERVED}' stroke-width='1.4' stroke-dasharray='4 2'/>")
    parts += [
        _text(x + 18, y, "reserved, at most"),
        _text(right, y, format_bytes(max(curve.reserved, default=0)), anchor="end"),
    ]
    return parts
