"""``recommend --html``: the ranked table, the reasons, and a picture of memory against predicted speed, as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from zeroplan.core.units import GIB, format_bytes
from zeroplan.report.page import page
from zeroplan.report.recommendation import answer_text, ranking_table
from zeroplan.search.results import Point, SearchResult

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 860, 420, 70, 50, 20, 20
_TICKS = 6


def answer_html(answer: SearchResult) -> str:
    """Return the page."""
    title = escape(str(answer.model["name"]))
    text = answer_text(answer)
    reasons = answer.best.reasons if answer.best is not None else ()
    body = [
        f"<h1>{title}</h1>",
        f"<p class='lead'>{escape(text.splitlines()[0])}</p>",
        f"<section class='card'><h2>Ranking</h2><div class='scroll'>{ranking_table(answer.ranking, 'html')}</div></section>",
        f"<section class='card'><h2>Why</h2><ul>{''.join(f'<li>{escape(r)}</li>' for r in reasons)}</ul></section>"
        if reasons
        else f"<section class='card'><pre>{escape(text)}</pre></section>",
        f"<section class='card'><h2>Memory against speed</h2>{pareto_svg(answer.points, answer.cluster.usable_vram)}"
        "<p>Filled: simulated, by the upper end of its interval. Hollow: a floor, which the truth is not below. "
        "The line joins what nothing else beats in both.</p></section>",
        *(f"<p class='warning'>{escape(w)}</p>" for w in answer.warnings),
    ]
    return page(f"{answer.model['name']}: recommendation", body)


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Return the simulated points for which no other needs less memory and is faster, least memory first."""
    front: list[Point] = []
    for point in sorted((p for p in points if not p.floor), key=lambda p: (p.bytes, -p.tokens_per_second)):
        if not front or point.tokens_per_second > front[-1].tokens_per_second:
            front.append(point)
    return front


def pareto_svg(points: Sequence[Point], limit: int | None) -> str:
    """Return a scatter plot as SVG: GiB a GPU on the x axis, tokens/s on the y axis. A point shows its name on hovering.

    Args:
        points: the configurations. Empty text is returned if there are none.
        limit: usable bytes of one GPU, drawn as a vertical line.
    """
    if not points:
        return ""
    most_bytes = 1.05 * max([limit or 0, *(min(p.bytes, 3 * (limit or p.bytes)) for p in points)])
    most_speed = 1.05 * max(p.tokens_per_second for p in points)
    shown = [p for p in points if p.bytes <= most_bytes]

    def x(count: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * count / most_bytes

    def y(speed: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * speed / most_speed

    parts = [
        f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img' aria-label='memory and speed' font-size='12' fill='currentColor'>"
    ]
    for i in range(_TICKS + 1):
        count, speed = most_bytes * i / _TICKS, most_speed * i / _TICKS
        parts.append(f"<text x='{x(count):.1f}' y='{_HEIGHT - 28}' text-anchor='middle'>{count / GIB:.0f}</text>")
        parts.append(f"<text x='{_LEFT - 8}' y='{y(speed) + 4:.1f}' text-anchor='end'>{speed:,.0f}</text>")
    parts.append(f"<text x='{_WIDTH / 2}' y='{_HEIGHT - 8}' text-anchor='middle'>GiB a GPU</text>")
    parts.append(f"<text x='12' y='{_TOP - 6}'>tokens/s</text>")
    axes = f"M{_LEFT} {_TOP}V{_HEIGHT - _BOTTOM}H{_WIDTH - _RIGHT}"
    parts.append(f"<path d='{axes}' fill='none' stroke='currentColor'/>")
    if limit is not None:
        at = x(limit)
        parts.append(f"<path d='M{at:.1f} {_TOP}V{_HEIGHT - _BOTTOM}' stroke='#c33' stroke-dasharray='5 4'/>")
        parts.append(f"<text x='{at - 6:.1f}' y='{_TOP + 12}' text-anchor='end' fill='#c33'>usable</text>")
    front = [f"{x(p.bytes):.1f},{y(p.tokens_per_second):.1f}" for p in pareto_front(shown)]
    if len(front) > 1:
        parts.append(f"<polyline points='{' '.join(front)}' fill='none' stroke='#27a' stroke-width='1.5'/>")
    for p in shown:
        colour = "#2a7" if p.fits else "#c33" if not p.floor else "#888"
        fill = "none" if p.floor else colour
        label = f"{p.label}: {'at least ' if p.floor else 'up to '}{format_bytes(p.bytes)}, {p.tokens_per_second:,.0f} tokens/s"
        parts.append(
            f"<circle cx='{x(p.bytes):.1f}' cy='{y(p.tokens_per_second):.1f}' r='5' fill='{fill}' stroke='{colour}'>"
            f"<title>{escape(label)}</title></circle>"
        )
    return "".join([*parts, "</svg>"])
