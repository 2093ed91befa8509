"""The command line's entry: wires the verbs and turns every expected error into one line and an exit code."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Annotated

import typer

from zeroplan.core.errors import EXIT_BAD_INPUT, BadInput

app = typer.Typer(
    name="zeroplan",
    help="Predict the memory of a ZeRO training run, per GPU, host and disk.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(asked: bool) -> None:
    if asked:
        from zeroplan import __version__

        typer.echo(f"zeroplan {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Predict the memory of a ZeRO training run, per GPU, host and disk."""


def _register() -> None:
    """Import the verbs, each of which registers itself: the one asked for, or all of them for help."""
    verbs = ("estimate", "explain", "check", "recommend", "verify", "doctor", "trace")
    asked = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    for verb in (asked,) if asked in verbs else verbs:
        import_module(f"zeroplan.cli.{verb}")


def run() -> None:
    """The console script: never a traceback for bad input, never one for a closed pipe."""
    # Plans are plain models: looking for pydantic's plugins would read the metadata of every installed package.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    _register()
    try:
        app(standalone_mode=True)
    except BadInput as error:
        print(f"zeroplan: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_BAD_INPUT)


if __name__ == "__main__":
    run()
