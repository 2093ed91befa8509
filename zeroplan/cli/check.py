"""``zeroplan check``: what DeepSpeed makes of a ds_config, key by key, without a model."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from zeroplan.cli import flags
from zeroplan.cli.main import verb
from zeroplan.core.errors import EXIT_BAD_INPUT, EXIT_OK, BadInput


@verb("zeroplan check ds_config.json", "zeroplan check ds_config.json --gpus 8 --json")
def check(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A ds_config.json.")],
    gpus: Annotated[int | None, typer.Option("--gpus", help="Ranks, for the batch arithmetic. [any]")] = None,
    as_json: flags.Json = False,
) -> None:
    """Say what DeepSpeed does with a ds_config, key by key.

    The exit code is 0 when DeepSpeed runs the file (once filled), 2 when it refuses it.
    """
    from zeroplan.ds_config.reader import inspect_ds_config
    from zeroplan.report.check import check_json, check_text

    if gpus is not None and gpus < 1:
        raise BadInput(f"{gpus} is out of range", where="--gpus", remedy="use 1 or more")
    config = inspect_ds_config(file, world_size=gpus)
    print(json.dumps(check_json(config), indent=2) if as_json else check_text(config))
    raise typer.Exit(EXIT_OK if config.runs_filled else EXIT_BAD_INPUT)
