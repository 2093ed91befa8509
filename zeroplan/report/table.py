"""Tables in four formats: plain text, GitHub's Markdown, HTML and CSV."""

from __future__ import annotations

import csv
import io

from zeroplan.core.errors import BadInput

FORMATS = ("plain", "github", "html", "csv")
_TABULATE = {"plain": "simple", "github": "github", "html": "html"}
#: Headers of columns that hold figures, which align right. Cells are formatted text already.
_FIGURES = frozenset(
    [
        *("stage", "states", "fixed", "activations", "allocated", "reserved", "total", "host (pinned)", "disk"),
        *("DeepSpeed says", "bytes", "parameters", "short", "memory", "usable"),
        *("most", "pinned"),
        *("memory GB/s", "link GB/s", "host link GB/s"),
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
    if style not in _TABULATE:
        raise BadInput(f"unknown format {style[:40]!r}", where="--format", remedy=f"use one of {', '.join(FORMATS)}")
    from tabulate import tabulate

    align = ["right" if h in _FIGURES else "left" for h in headers]
    return str(tabulate(rows, headers, tablefmt=_TABULATE[style], disable_numparse=True, colalign=align if rows else None))
