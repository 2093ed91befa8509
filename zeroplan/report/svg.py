"""Parts of SVG pictures that are light or dark as the reader's page is.

Every part has its colour of a light page as an attribute, so that programs that read no style sheet draw it, and a class, by
which :func:`style` gives it the colour of a dark page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape

from zeroplan.report.palette import palette

FONT = "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'"


def style() -> str:
    """Return the style sheet of a picture: on a dark page its inks are the palette's, and filled areas a quarter lighter."""
    fills = "".join(f".f-{name}{{fill:{dark}}}.s-{name}{{stroke:{dark}}}" for name, (_, dark) in palette().items())
    mixed = ".area{fill:color-mix(in srgb,var(--c) 75%,#fff)}"
    return f"<style>@media (prefers-color-scheme:dark){{{fills}{mixed}}}</style>"


def picture(width: float, height: float, title: str, parts: Iterable[str], *, alone: bool = True) -> str:
    """Return a whole picture on the palette's paper; sizes are pixels. In a page, where it is not `alone`, the page's style
    sheet has its colours.
    """
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:g} {height:g}' width='{width:g}' height='{height:g}' "
        f"{FONT} role='img'><title>{escape(title)}</title>{style() if alone else ''}"
    )
    paper = f"<rect width='{width:g}' height='{height:g}' rx='8' {fill('paper')}/>"
    return "\n".join([head, paper, *filter(None, parts), "</svg>"]) + "\n"


def fill(name: str) -> str:
    """Return the attributes that fill a part with a colour of the palette."""
    return f"class='f-{name}' fill='{palette()[name][0]}'"


def stroke(name: str) -> str:
    """Return the attributes that draw a part's outline in a colour of the palette."""
    return f"class='s-{name}' fill='none' stroke='{palette()[name][0]}'"


def area(color: str) -> str:
    """Return the attributes of an area in a colour of its own."""
    return f"class='area' style='--c:{color}' fill='{color}'"


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: float = 11,
    weight: int = 400,
    color: str = "ink",
    anchor: str = "start",
    rim: bool = False,
) -> str:
    """Return a line of text, which ends or has its middle at `x` for other anchors than ``start``; empty for no words.

    Args:
        x, y: where its base line starts, pixels.
        size: height of the letters, pixels.
        weight: 400 is normal, 600 bold.
        color: a colour of the palette.
        rim: whether the letters stand on a rim of paper, where they lie on a picture.
    """
    if not words:
        return ""
    place = f"x='{x:.1f}' y='{y:.1f}' font-size='{size:g}' font-weight='{weight}' text-anchor='{anchor}'"
    if not rim:
        return f"<text {place} {fill(color)}>{escape(words)}</text>"
    ink, paper = palette()[color][0], palette()["paper"][0]
    stroked = f"stroke='{paper}' stroke-width='3.5' stroke-linejoin='round' paint-order='stroke'"
    return f"<text {place} class='f-{color} s-paper' fill='{ink}' {stroked}>{escape(words)}</text>"


def line(x1: float, y1: float, x2: float, y2: float, color: str = "line", *, width: float = 1, dash: str = "") -> str:
    """Return a straight line in a colour of the palette; sizes are pixels."""
    dashed = f" stroke-dasharray='{dash}'" if dash else ""
    return f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke-width='{width:g}'{dashed} {stroke(color)}/>"


def round_values(most: float) -> list[float]:
    """Return some six round values from 0 up to `most`, for the ticks of an axis."""
    rough = most / 6
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    return [at * step for at in range(int(most / step) + 1)]
