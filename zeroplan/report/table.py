"""Tables in four formats: plain text, GitHub's Markdown, HTML and CSV."""

from __future__ import annotations

import csv
import io
from typing import NamedTuple

from zeroplan.core.errors import BadInput
from zeroplan.report.wrap import wrap

FORMATS = ("plain", "github", "html", "csv")
#: Headers of columns that hold figures, which align right. Cells are formatted text already.
_FIGURES = frozenset(
    [
        *("stage", "states", "fixed", "activations", "allocated", "reserved", "total", "host (pinned)", "disk"),
        *("DeepSpeed says", "bytes", "share", "parameters", "short", "memory", "usable"),
        *("most", "pinned"),
        *("memory GB/s", "link GB/s", "host link GB/s", "GiB", "usable GiB", "TFLOP/s", "host GB/s"),
        *("GPUs", "states", "speed"),
        *("ZeRO", "GPU", "host", "tokens/s", "planned", "measured", "difference", "saves", "then GPU", "off by"),
    ]
)
_BETWEEN = "  "
_NARROWEST = 8


class Table(NamedTuple):
    """A table before it is text or HTML: a header for each column, and rows with a cell for each, formatted already."""

    headers: list[str]
    rows: list[list[str]]

    def text(self, style: str = "plain", *, width: int | None = None) -> str:
        """Return it as :func:`render` does; empty without rows."""
        return render(self.headers, self.rows, style, width=width) if self.rows else ""


def is_figure(header: str) -> bool:
    """Return whether a column of this header holds figures."""
    return header in _FIGURES


def render(headers: list[str], rows: list[list[str]], style: str, *, width: int | None = None) -> str:
    """Return a table as text.

    Args:
        headers: one for each column.
        rows: each with one cell for each column, formatted already.
        style: one of :data:`FORMATS`.
        width: the most characters of a line of plain text; the widest columns of words are wrapped to fit it.

    Raises:
        BadInput: an unknown `style`.
    """
    if style == "csv":
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([headers, *rows])
        return out.getvalue().rstrip("\n")
    if style not in FORMATS:
        raise BadInput(f"unknown format {style[:40]!r}", where="--format", remedy=f"use one of {', '.join(FORMATS)}")
    if style == "plain":
        return _plain(headers, rows, width)
    from tabulate import tabulate

    align = ["right" if h in _FIGURES else "left" for h in headers]
    return str(tabulate(rows, headers, tablefmt=style, disable_numparse=True, colalign=align if rows else None))


def _plain(headers: list[str], rows: list[list[str]], most: int | None) -> str:
    """Return the table for a terminal: a rule below the headers, two spaces between columns, no space at the end of a line."""
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    right = [header in _FIGURES for header in headers]
    if most is not None:
        widths = _narrowed(widths, right, most)
    lines = [headers, ["-" * width for width in widths], *rows]
    return "\n".join(text for line in lines for text in _texts(line, widths, right))


def _narrowed(widths: list[int], right: list[bool], most: int) -> list[int]:
    """The widths of the columns where a line has at most `most` characters; columns of figures keep theirs."""
    widths = list(widths)
    over = sum(widths) + len(_BETWEEN) * (len(widths) - 1) - most
    words = [at for at, figures in enumerate(right) if not figures]
    while over > 0 and words:
        widest = max(words, key=lambda at: widths[at])
        if widths[widest] <= _NARROWEST:
            break
        widths[widest] -= 1
        over -= 1
    return widths


def _texts(cells: list[str], widths: list[int], right: list[bool]) -> list[str]:
    """The lines of one row: a cell that is wider than its column goes on below."""
    parts = [wrap(cell, width, words=False) if len(cell) > width else [cell] for cell, width in zip(cells, widths, strict=True)]
    return [
        _BETWEEN.join(
            _pad(part[at] if at < len(part) else "", width, figures)
            for part, width, figures in zip(parts, widths, right, strict=True)
        ).rstrip()
        for at in range(max(map(len, parts), default=0))
    ]


def _pad(cell: str, width: int, right: bool) -> str:
    return cell.rjust(width) if right else cell.ljust(width)
