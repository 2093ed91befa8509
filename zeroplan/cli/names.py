"""``zeroplan models`` and ``zeroplan gpus``: the names that are known, and a search among them; also what shells complete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from zeroplan.cli import flags
from zeroplan.cli.main import show, show_json, verb

Search = Annotated[list[str] | None, typer.Argument(metavar="WORDS", help="Only names that hold all of these words.")]


@verb("zeroplan models", "zeroplan models llama 8b")
def models(words: Search = None, style: flags.Style = "plain", as_json: flags.Json = False) -> None:
    """List or search the models whose shapes are shipped.

    Any other is read from the hub or from a folder.
    """
    from zeroplan.models.catalog import entries
    from zeroplan.report.names import models_json, models_table

    found = [entry for entry in entries() if _holds([entry.id, *entry.also], words)]
    if as_json:
        show_json(models_json(found))
    elif found:
        show(models_table(found, style))
    _require(found, words)


@verb("zeroplan gpus", "zeroplan gpus a100")
def gpus(words: Search = None, style: flags.Style = "plain", as_json: flags.Json = False) -> None:
    """List or search the GPUs that --gpu knows.

    Sizes are GiB; the rate is that of dense 16-bit products; bandwidths are in one direction.
    """
    from zeroplan.core.gpus import GPUS
    from zeroplan.report.names import gpus_json, gpus_table

    found = [gpu for gpu in GPUS.values() if _holds([gpu.name], words)]
    if as_json:
        show_json(gpus_json(found))
    elif found:
        show(gpus_table(found, style))
    _require(found, words)


def _holds(names: list[str], words: list[str] | None) -> bool:
    """Return whether one of the names holds all words, whatever their case."""
    return any(all(word.lower() in name.lower() for word in words or ()) for name in names)


def _require(found: Sequence[object], words: list[str] | None) -> None:
    """Where nothing was found, say so and exit with 1."""
    if not found:
        typer.echo(f"zeroplan: no name holds {' and '.join(map(repr, words or ()))}", err=True)
        raise typer.Exit(1)
