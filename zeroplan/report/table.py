"""Tables in four formats: plain text, GitHub's Markdown, HTML and CSV."""

from __future__ import annotations

import csv
import io

from zeroplan.core.errors import BadInput

FORMATS = ("plain", "github", "html", "csv")
#: Headers of columns that hold figures, which align right. Cells are formatted text already.
_FIGURES = frozenset(
    [
        *("stage", "states", "fixed", "activations", "allocated", "reserved", "total", "host (pinned)", "disk"),
        *("DeepSpeed says", "bytes", "parameters", "short", "memory", "usable"),
        *("most", "pinned"),
        *("memory GB/s", "link GB/s", "host link GB/s", "GiB", "usable GiB", "TFLOP/s", "host GB/s"),
    ]
)


def render(headers: list[str], rows: list[list[str]], style: str) -> str:
    """Return a table as text.

    Args:
        headers: one for each column.
        rows: each with one cell for each column, formatted already.
        style: one of :data:`FORMATS`.

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
        return _plain(headers, rows)
    from tabulate import tabulate

    align = ["right" if h in _FIGURES else "left" for h in headers]
    return str(tabulate(rows, headers, tablefmt=style, disable_numparse=True, colalign=align if rows else None))


def _plain(headers: list[str], rows: list[list[str]]) -> str:
    """Return the table for a terminal: a rule below the headers, two spaces between columns, no space at the end of a line."""
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    lines = [headers, ["-" * width for width in widths], *rows]
    right = [header in _FIGURES for header in headers]
    return "\n".join("  ".join(map(_pad, line, widths, right)).rstrip() for line in lines)


def _pad(cell: str, width: int, right: bool) -> str:
    return cell.rjust(width) if right else cell.ljust(width)
