"""``zeroplan explain``: how every byte of a plan was derived."""

from __future__ import annotations

from typing import Annotated

import typer

from zeroplan.cli import flags
from zeroplan.cli.main import show, show_json, verb
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
    why: flags.Why = False,
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
        if why and not (as_json or quiet):
            show(setup.line)
    if time:
        from zeroplan.report.step_time import time_json, time_text
        from zeroplan.report.terminal import Terminal
        from zeroplan.search.explain_time import explain_time

        times = explain_time(request)
        if as_json:
            show_json({"schema": 1, "plans": time_json(times)})
        else:
            show(time_text(times, Terminal.here(why=why), quiet=quiet))
        return
    from zeroplan.planner.explain import explain as derive

    explanations = derive(request, line)
    if as_json:
        from zeroplan.report.explanation import explanation_json

        show_json({"schema": 1, "plans": explanation_json(explanations)})
    else:
        from zeroplan.report.explanation import explanation_text
        from zeroplan.report.terminal import Terminal

        show(explanation_text(explanations, Terminal.here(why=why or line is not None), quiet=quiet))
