"""A run's GPU memory as a picture: allocated bytes stacked by family, with the reserved bytes as a line above."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from zeroplan.core.buffers import Buffer
from zeroplan.core.families import Family, family_of
from zeroplan.core.sizes import GIB, MIB, format_bytes
from zeroplan.planner.simulated import family_at_peak
from zeroplan.report import svg
from zeroplan.report.palette import FAMILY_COLORS, palette
from zeroplan.report.peak import origin_in
from zeroplan.simulate.timeline import Curve, Note, Timeline

if TYPE_CHECKING:
    from zeroplan.capturing.answer import CapturedRun
    from zeroplan.planner.simulated import Simulated


@dataclass(frozen=True, slots=True)
class DrawnRun:
    """The run behind a plan: its timeline, and functions that name the origin and the family of an allocation."""

    timeline: Timeline
    origin: Callable[[Buffer, Note], str]
    family: Callable[[Buffer, Note], Family]


class Layer(NamedTuple):
    """A family of buffers in a picture: its name, its colour, and its bytes at each point of the curve."""

    name: str
    color: str
    bytes: tuple[int, ...]


def drawn(run: Simulated) -> DrawnRun:
    """Return what a picture needs of a simulated run."""
    return DrawnRun(run.simulation.timeline, origin_in(run.tape), family_at_peak(run.tape, sharded=run.plan.stage == 3))


def drawn_capture(run: CapturedRun) -> DrawnRun:
    """Return what a picture needs of a captured script: by the lines that asked, or the engine's schedule of its run."""
    if run.runs:
        return drawn(run.runs[0])
    return DrawnRun(run.timeline, lambda _, line: str(line or ""), lambda buffer, _: family_of(buffer, sharded=False))


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


def layers(run: DrawnRun, curve: Curve) -> list[Layer]:
    """Return the families of what is alive, the lowest first; they add up to what is allocated."""
    stack = run.timeline.stacked(curve.events, run.family)
    return [Layer(family, color, stack[family]) for family, color in FAMILY_COLORS.items() if any(stack.get(family, ()))]


def timeline_svg(run: DrawnRun, *, title: str = "", limit: int | None = None) -> str:
    """Return the picture as SVG text.

    Args:
        run: what is drawn.
        title: the line above the picture.
        limit: usable bytes of the GPU. A line is drawn if it is below 1.6 times the highest value.
    """
    frame, curve = Frame(), run.timeline.curve()
    highest = max((*curve.reserved, *curve.allocated, 1))
    show_limit = limit is not None and limit < 1.6 * highest
    top = max(highest, limit if show_limit and limit is not None else 0) * 1.04
    peak = max(range(len(curve.allocated)), key=curve.allocated.__getitem__, default=-1)
    stack = layers(run, curve)
    parts = [
        svg.text(frame.left, 24, title, size=16, weight=600),
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
    middle = frame.left + frame.plot_width / 2
    order = "events in order (not to scale in time)"
    parts.append(svg.text(middle, frame.height - 10, order, anchor="middle", color="faint"))
    return svg.picture(frame.width, frame.height, title or "GPU memory over a run", parts)


def ticks(top: float) -> list[tuple[float, str]]:
    """Return about six round values up to `top` bytes, each with its label; all labels have the same unit."""
    unit, name = (GIB, "GiB") if top >= 2 * GIB else (MIB, "MiB")
    return [(at * unit, f"{at:g} {name}" if at else "0") for at in svg.round_values(top / unit)]


def _grid(frame: Frame, top: float) -> list[str]:
    parts = []
    for value, label in ticks(top):
        y = frame.y(value, top)
        parts.append(svg.line(frame.left, y, frame.x(1), y))
        parts.append(svg.text(frame.left - 7, y + 3.5, label, color="faint", anchor="end"))
    return parts


def _areas(frame: Frame, curve: Curve, stack: Sequence[Layer], top: float) -> list[str]:
    below = [0] * len(curve.events)
    xs = [frame.x(position) for position in curve.positions]
    parts = []
    for name, color, heights in stack:
        above = [low + height for low, height in zip(below, heights, strict=True)]
        outline = [f"{x:.1f},{frame.y(value, top):.1f}" for x, value in zip(xs, above, strict=True)]
        outline += [f"{x:.1f},{frame.y(value, top):.1f}" for x, value in zip(reversed(xs), reversed(below), strict=True)]
        parts.append(f"<polygon points='{' '.join(outline)}' {svg.area(color)}><title>{escape(name)}</title></polygon>")
        below = above
    return parts


def _reserved_line(frame: Frame, curve: Curve, top: float) -> str:
    points = " ".join(
        f"{frame.x(position):.1f},{frame.y(value, top):.1f}"
        for position, value in zip(curve.positions, curve.reserved, strict=True)
    )
    return (
        f"<polyline points='{points}' {svg.stroke('ink')} stroke-width='1.4' stroke-dasharray='5 3'>"
        "<title>reserved by the caching allocator</title></polyline>"
    )


def _phases(frame: Frame, curve: Curve) -> list[str]:
    bounds, foot = [(0.0, ""), *curve.marks], frame.top + frame.plot_height
    parts = [svg.line(frame.left, frame.top, frame.left, foot, "faint")]
    for (start, _), (end, name) in pairwise(bounds):
        x, width = frame.x(end), (end - start) * frame.plot_width
        parts.append(svg.line(x, frame.top - 6, x, foot))
        label, room = phase_name(name), int(width / 5.8)  # pixels of a letter, about
        if room >= min(len(label), 3):
            shown = label if len(label) <= room else label[: room - 1] + "…"
            parts.append(svg.text(x - width / 2, frame.top - 8, shown, anchor="middle", color="faint"))
    return parts


def phase_name(mark: str) -> str:
    """Return the phase that a mark ends, in words: ``"forward"`` for ``"fwd"``, ``"step"`` for ``"step0"``."""
    words = {"init": "initialise", "fwd": "forward", "bwd": "backward"}
    return "step" if mark.startswith("step") else words.get(mark, mark)


def _limit_line(frame: Frame, limit: int, top: float) -> list[str]:
    y = frame.y(limit, top)
    label = f"usable {format_bytes(limit)}"
    return [
        svg.line(frame.left, y, frame.x(1), y, "bad", width=1.5, dash="7 4"),
        svg.text(frame.x(1) - 4, y - 5, label, color="bad", anchor="end", weight=600, rim=True),
    ]


def _peak(frame: Frame, curve: Curve, peak: int, top: float) -> list[str]:
    x, y = frame.x(curve.positions[peak]), frame.y(curve.allocated[peak], top)
    side, anchor = (-8, "end") if curve.positions[peak] > 0.8 else (8, "start")
    label = f"peak {format_bytes(curve.allocated[peak])}"
    ink, paper = palette()["ink"][0], palette()["paper"][0]
    dot = f"class='f-paper s-ink' fill='{paper}' stroke='{ink}' stroke-width='1.6'"
    return [
        f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4' {dot}/>",
        svg.text(x + side, y - 7, label, anchor=anchor, weight=600, size=12, rim=True),
    ]


def _legend(frame: Frame, curve: Curve, stack: Sequence[Layer], peak: int) -> list[str]:
    x, right, y = frame.x(1) + 22, frame.width - 14, frame.top + 4
    parts = [svg.text(x, y, "alive at the peak", weight=600)]
    rows = [(name, color, heights[peak]) for name, color, heights in reversed(stack)] if peak >= 0 else []
    for name, color, value in rows:
        y += 20
        ink = "ink" if value else "faint"
        parts.append(f"<rect x='{x:.1f}' y='{y - 9:.1f}' width='11' height='11' rx='2' {svg.area(color)}/>")
        parts.append(svg.text(x + 18, y, name, color=ink))
        parts.append(svg.text(right, y, format_bytes(value) if value else "-", anchor="end", color=ink))
    if rows:
        y += 22
        parts.append(svg.line(x, y - 15, right, y - 15))
        parts.append(svg.text(x + 18, y, "allocated", weight=600))
        parts.append(svg.text(right, y, format_bytes(curve.allocated[peak]), anchor="end", weight=600))
    y += 20
    parts.append(svg.line(x, y - 4, x + 12, y - 4, "ink", width=1.4, dash="4 2"))
    parts.append(svg.text(x + 18, y, "reserved, at most"))
    parts.append(svg.text(right, y, format_bytes(max(curve.reserved, default=0)), anchor="end"))
    return parts
