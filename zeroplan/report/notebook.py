"""Answers as HTML fragments for a notebook's cell, readable on a light and on a dark page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from zeroplan.core.plan import MemoryPlan, Report
from zeroplan.report.page import asset
from zeroplan.report.plans import fits_text, narrow_rows, report_notes
from zeroplan.report.recommendation import answer_text, ranking_rows
from zeroplan.report.recommendation import verdict as best_verdict
from zeroplan.report.table import is_figure
from zeroplan.report.terminal import Terminal
from zeroplan.report.verdict import peak_sentence, relief_sentence, verdict
from zeroplan.search.results import SearchResult

_MARKS = {True: "yes", False: "no", None: ""}
#: What a fragment's ``pre`` holds is as wide as in a terminal.
_TERMINAL = Terminal()


def plans_html(report: Report) -> str:
    """Draw what ``estimate`` answers: verdict, peak and knobs, a row a plan, and the notes."""
    plan = report.decisive or (report.plans[0] if report.plans else None)
    parts = [_verdict(verdict(report), None if report.decisive is None else report.decisive.fits)]
    parts += [_line(text) for text in (peak_sentence(plan) if plan else "", relief_sentence(report.reliefs)) if text]
    headers, rows = narrow_rows(report.plans)
    parts.append(_table(headers, rows, report.plans))
    parts += [_line(f"note: {text}") for text in report_notes(report)]
    return _fragment(parts)


def answer_html(answer: SearchResult) -> str:
    """Draw what ``recommend`` answers: verdict, a row a configuration, the reasons, and the whole text folded away."""
    best = answer.best
    good = None if best is not None and best.fits is None else best is not None
    parts = [_verdict(best_verdict(answer), good)]
    if answer.ranking:
        headers, rows = ranking_rows(answer.ranking)
        parts.append(_table(headers, rows, [one.plan for one in answer.ranking]))
    if best is not None and best.reasons:
        parts.append(f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in best.reasons)}</ul>")
    return _fragment([*parts, folded("All of it", answer_text(answer, terminal=_TERMINAL))])


def text_html(text: str) -> str:
    """Draw text of a terminal."""
    return _fragment([f"<pre>{escape(text)}</pre>"])


def folded(title: str, text: str) -> str:
    """Draw text of a terminal below a title that opens it."""
    return f"<details><summary class='faint'>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def _fragment(parts: Iterable[str]) -> str:
    return f"<div class='zeroplan'><style>{asset('notebook.css')}</style>{''.join(parts)}</div>"


def _verdict(text: str, good: bool | None) -> str:
    head, colon, rest = text.partition(":")
    return f"<p><b class='{_MARKS[good]}'>{escape(head + colon)}</b>{escape(rest)}</p>"


def _line(text: str) -> str:
    return f"<p class='faint'>{escape(text)}</p>"


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]], plans: Sequence[MemoryPlan]) -> str:
    """Draw a table with a row for each plan, whose last cell says whether it fits."""
    align = [" class='figure'" if is_figure(header) else "" for header in headers]
    head = "".join(f"<th{how}>{escape(header)}</th>" for header, how in zip(headers, align, strict=True))
    body = []
    for row, plan in zip(rows, plans, strict=True):
        cells = [f"<td{how}>{escape(cell)}</td>" for cell, how in zip(row[:-1], align[:-1], strict=True)]
        body.append(f"<tr>{''.join(cells)}<td class='{_MARKS[plan.fits]}'>{escape(fits_text(plan))}</td></tr>")
    return f"<table><tr>{head}</tr>{''.join(body)}</table>"
