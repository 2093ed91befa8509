"""``zeroplan check``: what a program makes of its files, key by key, without a model."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Annotated

import typer

from zeroplan.cli import flags
from zeroplan.cli.main import verb
from zeroplan.core.errors import EXIT_BAD_INPUT, EXIT_OK, BadInput

if TYPE_CHECKING:
    from zeroplan.ds_config.reader import DsConfig
    from zeroplan.interop.setups import Setup

Program = Annotated[str | None, typer.Option("--program", help="The program that owns the file, where two could.")]


@verb("zeroplan check ds_config.json --gpus 8", "zeroplan check recipe.yaml accelerate.yaml")
def check(
    files: Annotated[list[str], typer.Argument(metavar="FILE", help="A ds_config.json, or files that run together.")],
    gpus: Annotated[int | None, typer.Option("--gpus", help="Ranks, for the batch arithmetic. [any]")] = None,
    program: Program = None,
    as_json: flags.Json = False,
) -> None:
    """Say what a program does with its files, key by key.

    The exit code is 0 when the run starts (once filled), 2 when DeepSpeed refuses it.
    """
    from zeroplan.ds_config.reader import inspect_ds_config
    from zeroplan.report.check import check_json, check_text

    if gpus is not None and gpus < 1:
        raise BadInput(f"{gpus} is out of range", where="--gpus", remedy="use 1 or more")
    if len(files) == 1 and _is_ds_config(files[0], program):
        config = inspect_ds_config(files[0], world_size=gpus)
        print(json.dumps(check_json(config), indent=2) if as_json else check_text(config))
        raise typer.Exit(EXIT_OK if config.runs_filled else EXIT_BAD_INPUT)
    from zeroplan.interop.readers import read_setups
    from zeroplan.report.check_setup import setup_json, setup_text

    setup = read_setups(files, program)
    found = _filled_config(setup, gpus)
    if as_json:
        answer = {"schema": 1, "setup": setup_json(setup), "ds_config": None if found is None else check_json(found)}
        print(json.dumps(answer, indent=2))
    else:
        print(setup_text(setup) + ("" if found is None else f"\n\n{check_text(found)}"))
    raise typer.Exit(EXIT_OK if found is None or found.runs_filled else EXIT_BAD_INPUT)


def _is_ds_config(file: str, program: str | None) -> bool:
    """Return whether a file is DeepSpeed's: by its keys, or as JSON that no program owns; text in base64 is."""
    from zeroplan.interop.programs.document import load_document
    from zeroplan.interop.programs.registry import PROGRAMS, program_named

    if program is not None:
        return program_named(program).name == "ds_config"
    if not os.path.lexists(file.replace("\0", "")):
        return True
    try:
        document = load_document(file)
    except BadInput:
        if file.lower().endswith((".yaml", ".yml", ".toml", ".sh", ".slurm")):
            raise
        return True  # whose reader says what is wrong
    owners = [one.name for one in PROGRAMS.values() if one.recognises(document) or one.could_own(document)]
    return owners == ["ds_config"] or (not owners and not file.lower().endswith((".yaml", ".yml", ".toml")))


def _filled_config(setup: Setup, gpus: int | None) -> DsConfig | None:
    """Return the setup's ds_config, with what its program fills in; None for a run without one."""
    if setup.ds_config is None:
        return None
    from zeroplan.core.workload import DType
    from zeroplan.ds_config.reader import fill_from, inspect_ds_config

    dtype = None if setup.dtype is None else DType(setup.dtype)
    filled = fill_from(dtype=dtype, micro_batch=setup.micro_batch, grad_accum=setup.grad_accum)
    ranks = gpus or (setup.gpus * (setup.nodes or 1) if setup.gpus else None)
    return inspect_ds_config(dict(setup.ds_config), fill=filled, world_size=ranks)
