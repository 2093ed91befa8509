"""``zeroplan verify``: run the training for a few steps here, and hold the plan against what it used."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from zeroplan.cli import flags
from zeroplan.cli.main import show, show_json, verb
from zeroplan.core.errors import EXIT_OUT_OF_TOLERANCE, BadInput
from zeroplan.run.ask import Ask

_RUN = "Run"
Ranks = Annotated[
    int | None,
    typer.Option("--gpus", rich_help_panel=_RUN, help="Ranks to run. [every GPU; on a CPU 2, or what the degrees need]"),
]
EngineName = Annotated[
    str | None,
    typer.Option("--engine", rich_help_panel="Sharding", help="As for estimate; zeroplan is the included runtime. [zeroplan]"),
]
Tolerance = Annotated[
    float, typer.Option("--tolerance", rich_help_panel=_RUN, help="How far the total may be off; owned buffers must be equal.")
]
Steps = Annotated[int, typer.Option("--steps", rich_help_panel=_RUN, help="Optimizer steps.")]
Timeout = Annotated[
    float, typer.Option("--timeout", rich_help_panel=_RUN, help="Seconds without a sign of life after which a run is ended.")
]


Seconds = Annotated[float, typer.Option("--seconds", rich_help_panel=_RUN, help="The longest that COMMAND may take.")]
Vram = Annotated[
    str | None, typer.Option("--vram", rich_help_panel=_RUN, help="Leave COMMAND what a card of so much would: 24G.")
]
Command = Annotated[
    list[str] | None, typer.Argument(metavar="[-- COMMAND]", help="Your own training command, in place of MODEL.")
]


@verb(
    "zeroplan verify",
    "zeroplan verify gpt2 --gpus 2 --ds-config ds_config.json",
    "zeroplan verify --from train.yaml",
    "zeroplan verify -- python train.py --batch_size 8",
)
@flags.takes_run("verify")
def verify(
    request: Ask,
    command: Command = None,
    engine: EngineName = None,
    gpus: Ranks = None,
    tolerance: Tolerance = 0.02,
    steps: Steps = 3,
    timeout: Timeout = 300.0,
    seconds: Seconds = 600.0,
    vram: Vram = None,
    style: flags.Style = "plain",
    wide: flags.Wide = False,
    quiet: flags.Quiet = False,
    as_json: flags.Json = False,
) -> None:
    """Train a few steps here; print plan beside measurement.

    Exits with 3 outside the tolerance. Weights are random, the loop is verify's own: a file that asks for more is refused.
    Without MODEL and --from a built-in set runs, which ends within five minutes. A COMMAND behind -- is captured as by
    zeroplan capture, then runs unchanged on the GPU for as many steps: it writes its files and reports to its services.
    """
    if command and "--" not in sys.argv:
        raise BadInput("names several models", where="MODEL", remedy="name one; a command of your own stands behind --")
    if "--" in sys.argv:
        from zeroplan.cli.verify_command import verify_command

        words = [*(command or ()), *([str(request.model)] if request.model is not None else [])]
        verify_command(
            words, request.replace(model=None), tolerance=tolerance, steps=steps, seconds=seconds, vram=vram, gpus=gpus,
            engine=engine, as_json=as_json, quiet=quiet,
        )  # fmt: skip
        return
    if vram is not None:
        raise BadInput("is of a COMMAND behind --", where="--vram", remedy="leave it out: a model runs on the card as it is")
    if request.files:
        from zeroplan.capturing.kept import refuse_captured

        refuse_captured(request.files)
    from zeroplan.validate.api import verify as run

    options = {**request.values, "engine": engine, "gpus": gpus}
    silent = (lambda _: None) if quiet else None
    drift = run(tolerance=tolerance, steps=steps, timeout=timeout, progress=silent, **options)
    if _first_rank():
        if as_json:
            show_json(drift.to_json())
        else:
            from zeroplan.report.drift import drift_text
            from zeroplan.report.terminal import Terminal

            show(drift_text(drift, style, terminal=Terminal.here(wide=wide), quiet=quiet))
    if not drift.within:
        raise typer.Exit(EXIT_OUT_OF_TOLERANCE)


def _first_rank() -> bool:
    """Return whether this process prints: under torchrun only rank 0 does."""
    import os

    return os.environ.get("RANK", "0") == "0"
