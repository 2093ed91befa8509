"""Parts of the HTML reports: cards, tables that scroll in a box of their own, the verdict, a bar under the card's line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from types import MappingProxyType

from zeroplan.core.plan import MemoryPlan
from zeroplan.report.table import Table, is_figure

#: The class of what is said of whether something fits.
MARKS = {True: "yes", False: "no", None: ""}


def mark_of(plan: MemoryPlan | None) -> str:
    """Return the class of a plan's verdict: yes, no, unsure, or none where no limit was given."""
    if plan is None:
        return ""
    return "unsure" if plan.undecided else MARKS[plan.fits]


def card(title: str, *parts: str, mark: str = "") -> str:
    """Return a section with a title and HTML below it; empty if there is nothing below.

    Args:
        title: plain text; empty for a card without one.
        mark: a class beside the card's.
    """
    body = "".join(parts)
    if not body:
        return ""
    head = f"<h2>{escape(title)}</h2>" if title else ""
    return f"<section class='{' '.join(filter(None, ['card', mark]))}'>{head}{body}</section>"


def folded(title: str, body: str) -> str:
    """Return HTML below a title that opens it; empty without HTML."""
    return f"<details class='more'><summary>{escape(title)}</summary>{body}</details>" if body else ""


def paragraphs(*texts: str) -> str:
    """Return a paragraph for each plain text that is not empty."""
    return "".join(f"<p>{escape(text)}</p>" for text in texts if text)


def items(texts: Sequence[str]) -> str:
    """Return a list of plain texts; empty for none."""
    return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>" if texts else ""


def table(
    name: str, found: Table, html: Mapping[str, Sequence[str]] = MappingProxyType({}), *, rows_named: Sequence[str] = ()
) -> str:
    """Return a table in a box that scrolls; empty without rows.

    Args:
        name: what the box is to a screen reader.
        found: its headers and rows, as plain text. Columns of figures align right.
        html: HTML in place of a column's cells, by the column's header; a header that the table has not is a further column,
            which has no name on the page.
        rows_named: the id of each row.
    """
    if not found.rows:
        return ""
    headers = [*found.headers, *(header for header in html if header not in found.headers)]
    columns = [html[header] if header in html else [escape(row[at]) for row in found.rows] for at, header in enumerate(headers)]
    align = [" class=figure" if is_figure(header) else "" for header in headers]
    shown = [header if header in found.headers else "" for header in headers]
    head = "".join(f"<th{how}>{escape(one)}</th>" if one else "<td></td>" for one, how in zip(shown, align, strict=True))
    names = [f" id='{one}'" for one in rows_named] or [""] * len(found.rows)
    body = "".join(
        f"<tr{one}>{''.join(f'<td{how}>{cell}</td>' for cell, how in zip(cells, align, strict=True))}</tr>"
        for one, *cells in zip(names, *columns, strict=True)
    )
    box = f"<div class='scroll' tabindex='0' role='group' aria-label='{escape(name)}'>"
    return f"{box}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def scrolling(name: str, picture: str, below: str = "") -> str:
    """Return a picture in a box that scrolls, `name` to a screen reader, with HTML below it; empty without a picture."""
    box = f"<div class='scatter' tabindex='0' role='group' aria-label='{escape(name)}'>{picture}</div>"
    return box + below if picture else ""


def classed(kind: str, texts: Iterable[str], tag: str = "span") -> list[str]:
    """Return each plain text in a tag of a class; an empty one as nothing."""
    how = f" class='{kind}'" if kind else ""
    return [f"<{tag}{how}>{escape(text)}</{tag}>" if text else "" for text in texts]


def judged(plans: Iterable[MemoryPlan], words: Iterable[str]) -> list[str]:
    """Return what is said of whether each plan fits, in the colour of its verdict."""
    return [f"<span class='{mark_of(plan)}'>{escape(text)}</span>" for plan, text in zip(plans, words, strict=True)]


def verdict_card(sentence: str, mark: str, *others: str) -> str:
    """Return the answer's card: its first words in large letters, the figures behind them, then other HTML."""
    head, _, rest = sentence.partition(": ")
    figures = f"<p class='figures'>{escape(rest)}</p>" if rest else ""
    return f"<section class='card verdict {mark}'><h2>{escape(head)}</h2>{figures}{''.join(others)}</section>"


def gauge(plan: MemoryPlan, scale: int) -> str:
    """Return a bar of what a plan needs, paler up to the end of its interval, with the card's line.

    Args:
        plan: whose GPU memory is drawn.
        scale: bytes at the right end.
    """
    gpu = plan.gpu
    low, high = gpu.needed, gpu.at_most
    doubt = f"<i class='doubt' style='width:{100 * min(1, high / scale):.1f}%'></i>" if high > low else ""
    limit = f"<b style='left:{100 * gpu.usable / scale:.1f}%'></b>" if gpu.usable and gpu.usable < scale else ""
    over = " over" if "gpu" in plan.misfits else ""
    return f"<div class='gauge{over}'>{doubt}<i style='width:{100 * min(1, low / scale):.1f}%'></i>{limit}</div>"
