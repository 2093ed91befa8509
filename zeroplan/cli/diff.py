"""``zeroplan diff``: what differs between two plans, of answers that ``--json`` printed, of captures, or of programs' files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zeroplan.cli import flags
from zeroplan.cli.main import show, show_json, verb
from zeroplan.core.errors import BadInput
from zeroplan.run.ask import OPTIONS, Ask

if TYPE_CHECKING:
    from zeroplan.report.diff import PrintedPlan

First = Annotated[
    str,
    typer.Argument(metavar="A", help="A file of a run (ds_config, recipe, launch script), a capture, or what --json printed."),
]
Second = Annotated[str, typer.Argument(metavar="B", help="Another such file.")]
#: What files leave open.
_OPTIONS = ("model", "micro_batch", "seq_len", "gpus", "nodes", "gpu", "vram", "cpu_ram", "nvme", "program")


@verb(
    "zeroplan diff before.sh after.sh --gpu 4xA100",
    "zeroplan diff zero2.json zero3.json meta-llama/Llama-3.1-8B --gpu 8xH100",
    "zeroplan diff before.json after.json",
)
@flags.takes_run("diff", only=_OPTIONS)
def diff(request: Ask, a: First, b: Second, quiet: flags.Quiet = False, as_json: flags.Json = False) -> None:
    """Compare two plans: the keys and lines that differ.

    Files are planned first, with what the options say of both.
    """
    from zeroplan.report.diff import diff_plans, diff_text
    from zeroplan.report.terminal import Terminal

    for path in (a, b):
        if not os.path.exists(path):
            raise BadInput("no such file", where=path, remedy="check the path")
    (ours, said), (theirs, other) = (_planned(path, request) for path in (a, b))
    if request.chosen and said is None and other is None:
        where = OPTIONS[next(iter(request.chosen))].where
        raise BadInput("both are answers, whose options are settled", where=where, remedy="leave it out, or give files")
    found = diff_plans(ours, theirs, None if said is None or other is None else (said, other))
    if as_json:
        show_json(found.to_dict())
    else:
        show(diff_text(found, Terminal.here(), quiet=quiet))


def _planned(path: str, request: Ask) -> tuple[list[PrintedPlan], Mapping[str, Any] | None]:
    """Return the plans of a file, and what it says by key; None for an answer and for a capture, which have no keys."""
    from zeroplan.report.diff import printed_answer, printed_plans

    asked = request.replace(files=(path,))
    from zeroplan.capturing.kept import kept_run

    if (run := kept_run(asked)) is not None:
        return printed_plans(json.loads(run.report.to_json()), path), None
    if (data := printed_answer(path)) is not None:
        return printed_plans(data, path), None
    from zeroplan.interop.programs.document import load_document
    from zeroplan.planner.estimate import estimate_report

    said = load_document(path).data
    return printed_plans(json.loads(estimate_report(asked).to_json()), path), said
