"""Parts of the HTML reports: cards, tables that scroll in a box of their own, the verdict, a bar under the card's line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from zeroplan.core.plan import MemoryPlan

_MARKS = {True: "yes", False: "no", None: ""}


def mark_of(plan: MemoryPlan | None) -> str:
    """Return the class of a plan's verdict: yes, no, unsure, or none where no limit was given."""
    if plan is None:
        return ""
    return "unsure" if plan.undecided else _MARKS[plan.fits]


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
    headers: Sequence[str], rows: Iterable[Sequence[str]], *, figures: Sequence[int] = (), rows_named: Sequence[str] = ()
) -> str:
    """Return a table. The cells are HTML already; the columns whose indices are in `figures` align right, and a row has its
    name of `rows_named`, if there are any, as its id.
    """

    def cell(tag: str, at: int, content: str) -> str:
        return f"<{tag}{' class=figure' if at in figures else ''}>{content}</{tag}>"

    head = "".join(cell("th", at, escape(header)) for at, header in enumerate(headers))
    lines = ["".join(cell("td", at, content) for at, content in enumerate(row)) for row in rows]
    names = [f" id='{name}'" for name in rows_named] or [""] * len(lines)
    body = "".join(f"<tr{name}>{line}</tr>" for name, line in zip(names, lines, strict=True))
    return f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


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
