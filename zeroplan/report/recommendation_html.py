"""``recommend --html``: the verdict, memory against predicted speed as a picture, and the table that its points link to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from zeroplan.core.sizes import GIB, format_bytes
from zeroplan.report import svg
from zeroplan.report.html_parts import card, items, judged, scrolling, table
from zeroplan.report.recommendation import answer_sheet, change_texts, ranking_rows
from zeroplan.search.reasons import label_of
from zeroplan.search.results import Point, Recommendation, SearchResult

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 960, 460, 78, 46, 34, 24
_LEGEND = (
    "Filled: simulated, at the upper end of its interval. Hollow: a floor, which the truth is not below. The line joins what"
    " nothing else beats in both. A point leads to its row, and a row's number to its point."
)


def answer_html(answer: SearchResult, *, made: Mapping[str, str] | None = None) -> str:
    """Return the page; `made` is of :func:`~zeroplan.report.page.page`."""
    best, ranking = answer.best, answer.ranking
    rows = rows_of(answer.points, ranking)
    first = [card("Why it is the first", items(best.reasons))] if best is not None else []
    others = "What surely fits in its place" if best is not None else "What would make it fit, cheapest first"
    picture = pareto_svg(answer.points, answer.cluster.usable_vram, rows)
    return answer_sheet(answer).page(
        card("Ranking", _ranking(ranking, rows)),
        card("Memory against speed", scrolling("Memory against speed", picture, f"<p class='words'>{_LEGEND}</p>")),
        *first,
        card(others, items(change_texts(answer))),
        made=made,
    )


def _ranking(ranking: Sequence[Recommendation], rows: dict[int, int]) -> str:
    if not ranking:
        return ""
    found, pointed = ranking_rows(ranking), set(rows.values())
    places = range(len(ranking))
    numbers = [f"<a href='#point-{at}'>{at + 1}</a>" if at in pointed else str(at + 1) for at in places]
    cells = {"": numbers, "fits": judged([one.plan for one in ranking], [line[-1] for line in found.rows])}
    names = [f"row-{place}" for place in places]
    return table("Ranking", found, cells, rows_named=names) + "<p class='words'>GPU at most, and host of a node: GiB.</p>"


def rows_of(points: Sequence[Point], ranking: Sequence[Recommendation]) -> dict[int, int]:
    """Return for the index of each point that is ranked the index of its row."""
    found: dict[int, int] = {}
    for place, one in enumerate(ranking):
        name = label_of(one.plan.engine, one.zero, one.workload)
        same = (
            at for at, p in enumerate(points) if not p.floor and (p.label, p.tokens_per_second) == (name, one.tokens_per_second)
        )
        at = next((at for at in same if at not in found), None)
        if at is not None:
            found[at] = place
    return found


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Return the simulated points for which no other needs less memory and is faster, least memory first."""
    front: list[Point] = []
    for point in sorted((p for p in points if not p.floor), key=lambda p: (p.bytes, -p.tokens_per_second)):
        if not front or point.tokens_per_second > front[-1].tokens_per_second:
            front.append(point)
    return front


def pareto_svg(points: Sequence[Point], limit: int | None, rows: dict[int, int] | None = None) -> str:
    """Return a scatter plot as SVG: GiB a GPU on the x axis, tokens/s on the y axis. The front's points have their names beside
    them, and ranked ones their row's number; every other shows its name on hovering.

    Args:
        points: the configurations. Empty text is returned if there are none.
        limit: usable bytes of one GPU, drawn as a vertical line.
        rows: the row of the page's table that a point leads to, by the point's index.
    """
    if not points:
        return ""
    rows = rows or {}
    most_bytes = 1.05 * max([limit or 0, *(min(p.bytes, 3 * (limit or p.bytes)) for p in points)])
    most_speed = 1.08 * max(p.tokens_per_second for p in points)
    right, foot = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def x(count: float) -> float:
        return _LEFT + (right - _LEFT) * count / most_bytes

    def y(speed: float) -> float:
        return foot - (foot - _TOP) * speed / most_speed

    parts = []
    for count in svg.round_values(most_bytes / GIB):
        parts.append(svg.line(x(count * GIB), _TOP, x(count * GIB), foot))
        parts.append(svg.text(x(count * GIB), foot + 18, f"{count:g}", size=13, color="faint", anchor="middle"))
    for speed in svg.round_values(most_speed):
        parts.append(svg.line(_LEFT, y(speed), right, y(speed)))
        parts.append(svg.text(_LEFT - 8, y(speed) + 4, f"{speed:,g}", size=13, color="faint", anchor="end"))
    parts.append(svg.text(right, _HEIGHT - 8, "GiB a GPU", size=13, color="faint", anchor="end"))
    parts.append(svg.text(12, 18, "tokens/s", size=13, color="faint"))
    if limit is not None:
        parts.append(svg.line(x(limit), _TOP, x(limit), foot, "bad", width=1.7, dash="6 4"))
        parts.append(svg.text(x(limit), _TOP - 8, "the card", size=13, weight=600, color="bad", anchor="middle"))
    shown = [(at, p) for at, p in enumerate(points) if p.bytes <= most_bytes]
    front = pareto_front([p for _, p in shown])
    if len(front) > 1:
        edge = " ".join(f"{x(p.bytes):.1f},{y(p.tokens_per_second):.1f}" for p in front)
        parts.append(f"<polyline points='{edge}' {svg.stroke('accent')} stroke-width='1.7'/>")
    on_front = set(map(id, front))
    wanted = [(at, p) for at, p in shown if at in rows or id(p) in on_front]
    names = [_names(p, rows.get(at), on_front=id(p) in on_front) for at, p in wanted]
    spots = [(x(p.bytes), y(p.tokens_per_second)) for _, p in wanted]
    others = [(x(p.bytes), y(p.tokens_per_second)) for _, p in shown]
    labels = dict(zip((at for at, _ in wanted), _labels(spots, names, others), strict=True))
    for at, p in sorted(shown, key=lambda one: one[0] in labels):
        parts.append(_point(p, x(p.bytes), y(p.tokens_per_second), rows.get(at), labels.get(at, "")))
    head = f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role='group' aria-label='memory and speed of each configuration'>"
    return "".join([head, *parts, "</svg>"])


def _point(point: Point, x: float, y: float, row: int | None, label: str) -> str:
    """Draw a point with its label, as a link to its row where it has one."""
    color = "faint" if point.floor else "good" if point.fits else "bad"
    look = svg.stroke(color) if point.floor else svg.fill(color)
    bound = "at least " if point.floor else "up to "
    title = f"{point.label}: {bound}{format_bytes(point.bytes)}, {point.tokens_per_second:,.0f} tokens/s"
    place = f"cx='{x:.1f}' cy='{y:.1f}' r='{4 if point.floor else 5.5}'"
    drawn = f"<circle {place} {look}><title>{escape(title)}</title></circle>{label}"
    return drawn if row is None else f"<a id='point-{row}' href='#row-{row}'>{drawn}</a>"


def _names(point: Point, row: int | None, *, on_front: bool) -> list[str]:
    """Return what may stand beside a point, the longest first: its name if it is on the front, and its row's number."""
    number = "" if row is None else str(row + 1)
    full = f"{number}: {point.label}" if number else point.label
    return [full, number] if on_front else [number]


def _labels(
    spots: Sequence[tuple[float, float]],
    names: Sequence[Sequence[str]],
    others: Sequence[tuple[float, float]],
    size: float = 12.5,
) -> list[str]:
    """Return a label for each spot, where it covers none of the `others` and no other label: to the left, above which there is
    nothing faster, else to the right. A name that finds no room gives way to the next; the last is left to hovering.
    """
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in others]
    labels = []
    for (x, y), texts in zip(spots, names, strict=True):
        tried = [(text, side, down) for text in texts for side in (-1, 1) for down in (4, -6, 16, -16)]
        label = ""
        for text, side, down in tried:
            width = 0.54 * size * len(text)
            left = x - 9 - width if side < 0 else x + 9
            box = (left, y + down - 0.8 * size, left + width, y + down + 2)
            inside = left > _LEFT and left + width < _WIDTH - 4 and box[1] > _TOP - 6
            if text and inside and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                anchor = "end" if side < 0 else "start"
                label = svg.text(x + 9 * side, y + down, text, size=size, anchor=anchor, rim=True)
                break
        labels.append(label)
    return labels


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
