"""``zeroplan diff``: what differs between two answers that ``--json`` printed."""

from __future__ import annotations

from typing import Annotated

import typer

from zeroplan.cli import flags
from zeroplan.cli.main import show, show_json, verb

First = Annotated[str, typer.Argument(metavar="A", help="What estimate, recommend or capture printed with --json.")]
Second = Annotated[str, typer.Argument(metavar="B", help="Another such file.")]


@verb("zeroplan diff before.json after.json", "zeroplan diff a.json b.json --json")
def diff(a: First, b: Second, quiet: flags.Quiet = False, as_json: flags.Json = False) -> None:
    """Compare two plans: the options and lines that differ."""
    from zeroplan.report.diff import diff_answers, diff_text
    from zeroplan.report.terminal import Terminal

    found = diff_answers(a, b)
    if as_json:
        show_json(found.to_dict())
    else:
        show(diff_text(found, Terminal.here(), quiet=quiet))
