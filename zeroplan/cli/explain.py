"""``zeroplan explain``: how every byte of a plan was derived."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from zeroplan.cli import flags
from zeroplan.cli.main import show, verb
from zeroplan.core.errors import BadInput
from zeroplan.run.ask import Ask


@verb(
    "zeroplan explain meta-llama/Llama-3.1-8B --gpus 8 --stage 2",
    "zeroplan explain gpt2 --stage 3 --line optim.exp_avg",
    "zeroplan explain --from train.yaml",
)
@flags.takes_run("explain")
def explain(
    request: Ask,
    line: Annotated[str | None, typer.Option("--line", help="One buffer or line only: optim.exp_avg.")] = None,
    time: Annotated[bool, typer.Option("--time", help="Derive the step time in place of the memory.")] = False,
    quiet: flags.Quiet = False,
    as_json: flags.Json = False,
) -> None:
    """Derive every byte of a plan with your numbers.

    Each line of memory (or of time, with --time) comes with its formula, the values in it, and its source.
    """
    if time and line is not None:
        raise BadInput("names a line of memory", where="--line", remedy="leave out --time or --line")
    if request.files:
        from zeroplan.cli.captured import explained

        if explained(request, line, time=time, quiet=quiet, as_json=as_json):
            return
        from zeroplan.planner.merge import with_files

        request, setup = with_files(request)
        if not (as_json or quiet):
            show(setup.line)
    if time:
        show(_time(request, as_json=as_json, quiet=quiet))
        return
    from zeroplan.planner.explain import explain as derive

    explanations = derive(request, line)
    if as_json:
        from zeroplan.report.explanation import explanation_json

        show(json.dumps({"schema": 1, "plans": explanation_json(explanations)}, indent=2))
    else:
        from zeroplan.report.explanation import explanation_text
        from zeroplan.report.terminal import Terminal

        show(explanation_text(explanations, Terminal.here(), quiet=quiet))


def _time(request: Ask, *, as_json: bool, quiet: bool) -> str:
    from zeroplan.report.step_time import time_json, time_text
    from zeroplan.report.terminal import Terminal
    from zeroplan.search.explain_time import explain_time

    found = explain_time(request)
    if as_json:
        return json.dumps({"schema": 1, "plans": time_json(found)}, indent=2)
    return time_text(found, Terminal.here(), quiet=quiet)
