"""Answers as HTML fragments for a notebook's cell, readable on a light and on a dark page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from zeroplan.core.plan import MemoryPlan, Report
from zeroplan.report.html_parts import MARKS, items, judged, table
from zeroplan.report.page import asset
from zeroplan.report.palette import palette
from zeroplan.report.plans import narrow_rows, plans_sheet
from zeroplan.report.recommendation import answer_text, ranking_rows
from zeroplan.report.recommendation import verdict as best_verdict
from zeroplan.report.table import Table
from zeroplan.report.terminal import Terminal
from zeroplan.search.results import SearchResult

#: What a fragment's ``pre`` holds is as wide as in a terminal.
_TERMINAL = Terminal()


def plans_html(report: Report) -> str:
    """Draw what ``estimate`` answers: verdict, peak and knobs, a row a plan, and the notes."""
    sheet = plans_sheet(report)
    parts = [_verdict(sheet.verdict, sheet.fits), *(_line(text) for _, text in sheet.sentences if text)]
    parts.append(_table(narrow_rows(report.plans), report.plans))
    parts += [_line(f"note: {text}") for text in sheet.remarks]
    return _fragment(parts)


def answer_html(answer: SearchResult) -> str:
    """Draw what ``recommend`` answers: verdict, a row a configuration, the reasons, and the whole text folded away."""
    best = answer.best
    good = None if best is not None and best.fits is None else best is not None
    parts = [_verdict(best_verdict(answer), good)]
    if answer.ranking:
        parts.append(_table(ranking_rows(answer.ranking), [one.plan for one in answer.ranking]))
    if best is not None and best.reasons:
        parts.append(items(best.reasons))
    return _fragment([*parts, folded("All of it", answer_text(answer, terminal=_TERMINAL))])


def text_html(text: str) -> str:
    """Draw text of a terminal."""
    return _fragment([f"<pre>{escape(text)}</pre>"])


def folded(title: str, text: str) -> str:
    """Draw text of a terminal below a title that opens it."""
    return f"<details><summary class='faint'>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def _fragment(parts: Iterable[str]) -> str:
    inks = "".join(f"--{name}:light-dark({','.join(palette()[name])});" for name in ("good", "bad", "unsure", "line"))
    return f"<div class='zeroplan'><style>.zeroplan{{{inks}}}{asset('notebook.css')}</style>{''.join(parts)}</div>"


def _verdict(text: str, good: bool | None) -> str:
    head, colon, rest = text.partition(":")
    return f"<p><b class='{MARKS[good]}'>{escape(head + colon)}</b>{escape(rest)}</p>"


def _line(text: str) -> str:
    return f"<p class='faint'>{escape(text)}</p>"


def _table(found: Table, plans: Sequence[MemoryPlan]) -> str:
    """Draw a table with a row for each plan, whose last cell says whether it fits."""
    return table("Plans", found, {"fits": judged(plans, [row[-1] for row in found.rows])})
