"""The command line's entry: registers the verbs, and turns every expected error into one line and an exit code."""

from __future__ import annotations

import atexit
import codecs
import contextlib
import errno
import gc
import io
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Annotated, Any

import typer

from zeroplan.cli import progress
from zeroplan.cli.help import VERBS, Verb, Verbs, right_name
from zeroplan.core.errors import EXIT_BAD_INPUT, EXIT_OK, BadInput, did_you_mean

app = typer.Typer(
    name="zeroplan",
    cls=Verbs,
    help="Predict the memory of a ZeRO training run, per GPU, host and disk.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def verb(*examples: str, name: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a verb, by its function's name unless `name` is given; its help ends with the examples."""
    return app.command(name, cls=Verb, epilog="\n".join(examples))


def show(text: str) -> None:
    """Print an answer, or part of one; the line of progress makes way."""
    progress.pause()
    typer.echo(text)


def show_json(data: Mapping[str, Any] | str) -> None:
    """Print an answer, an object or its JSON text, with the version and the command that made it."""
    found = json.loads(data) if isinstance(data, str) else dict(data)
    found["zeroplan"] = made_by()
    show(json.dumps(found, indent=2))


def made_by() -> dict[str, str]:
    """Return the version, and the command that runs as it is typed in a shell."""
    from zeroplan import __version__

    return {"version": __version__, "command": shlex.join(["zeroplan", *sys.argv[1:]])}


def _version(asked: bool) -> None:
    if asked:
        from zeroplan import __version__
        from zeroplan.report.machine import version_text
        from zeroplan.search.machine import compiled_routines, packages

        typer.echo(version_text(__version__, packages(), compiled_routines()))
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the versions.")] = False,
) -> None:
    """Predict the memory of a ZeRO training run, per GPU, host and disk."""


#: The module of each verb: its own, but for the two lists of names.
_MODULES = {name: name for names in VERBS.values() for name in names} | {"models": "names", "gpus": "names"}


def _with_verb() -> None:
    """Put the verb before a question that has none, and say which; ``zeroplan`` alone says what this folder could ask.

    A word behind ``--help`` says which options it lists.
    """
    words = sys.argv[1:]
    asks = next((at for at, word in enumerate(words[1:], 1) if word in ("-h", "--help")), len(words))
    has_word = words[asks + 1 :] and not words[asks + 1].startswith("-")
    Verb.wanted = words.pop(asks + 1) if has_word else ""
    if not words:
        from zeroplan.cli.bare import overview

        if text := overview():
            typer.echo(text)
            sys.exit(EXIT_OK)
    elif not words[0].startswith("-") and words[0] not in _MODULES:
        from zeroplan.cli.bare import question

        asked = question(words)
        if asked is not None:
            print(f"zeroplan {shlex.join(asked)}", file=sys.stderr)
            words = asked
    sys.argv[1:] = words


def _register() -> None:
    """Import the module of the verb on the command line, which registers it; without a verb, as for help, import all."""
    asked = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    for module in dict.fromkeys([_MODULES[asked]] if asked in _MODULES else _MODULES.values()):
        import_module(f"zeroplan.cli.{module}")


#: Exit codes of a shell: 128 + SIGINT after Ctrl-C, 128 + SIGPIPE where the reader has closed the pipe, as `head -1` does.
_INTERRUPTED, _READER_GONE = 128 + 2, 128 + 13


def _end(signum: int, frame: object) -> None:
    """End as Ctrl-C does, so that what was begun is ended, too: ranks, temporary files."""
    sys.exit(128 + signum)


def _end_in_order() -> None:
    """Take SIGTERM, as ``timeout`` sends it, and the end of the terminal like Ctrl-C, unless the caller has them ignored."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        with contextlib.suppress(ValueError):  # not in the main thread
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _end)


#: What stands for our signs where an output's encoding has none, as that of a Windows pipe.
_PLAIN = {"−": "-", "–": "-", "×": "x", "÷": "/", "→": "->", "≤": "<=", "≥": ">=", "…": "...", "·": "*", "µ": "u", "█": "#"}


def _in_plain_signs(error: UnicodeError) -> tuple[str, int]:
    """Write signs that an output cannot hold as plain ones."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(_PLAIN.get(sign, "?") for sign in error.object[error.start : error.end]), error.end


def _take_any_encoding() -> None:
    """Let standard output and errors hold every sign, in whatever encoding the terminal, the pipe or the user chose."""
    codecs.register_error("zeroplan", _in_plain_signs)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name not in ("utf-8", "ascii"):
            stream.reconfigure(errors="zeroplan")  # ASCII is taken for a locale that was not set: typer writes UTF-8


def run() -> None:
    """Run the command line. Bad input, a closed pipe, a full disk and Ctrl-C end with one line or none, never a traceback."""
    # zeroplan's models use no pydantic plugin. Looking for plugins would read the metadata of every installed package.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    gc.set_threshold(50_000, 20, 100)  # collecting cycles among a tape's events would take a tenth of the run time
    atexit.register(
        gc.freeze
    )  # else the interpreter looks for cycles among all objects before it ends: a fifth of a cold start
    _end_in_order()
    _take_any_encoding()
    try:
        _with_verb()
    except BadInput as error:
        _refuse(str(error))
    _register()
    progress.begin()
    try:
        code = app(prog_name="zeroplan", standalone_mode=False)
        progress.end()
        if sys.stdout:  # None where the caller has closed it
            sys.stdout.flush()
    except BadInput as error:
        _refuse(str(error))
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(_INTERRUPTED)
    except SystemExit as stop:
        # click turns a closed pipe into exit code 1, which here means that nothing fits.
        if isinstance(stop.__context__, BrokenPipeError):
            _drop_output()
            sys.exit(_READER_GONE)
        raise
    except OSError as error:
        _drop_output()
        if error.errno == errno.EPIPE:
            sys.exit(_READER_GONE)
        _refuse(f"{error.filename or 'the output'}: {error.strerror or error}; give a place that can be read and written")
    except _UsageError as error:
        _usage(error)
    sys.exit(code if isinstance(code, int) else EXIT_OK)


#: The base class of every error in a command line. typer exports only this subclass of it.
_UsageError: Any = typer.BadParameter.__base__


def _usage(error: Any) -> None:
    """Print the help where no verb was given, else one line that says which argument is wrong; exit with 2."""
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message(), file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    command = error.ctx.command_path if error.ctx is not None else "zeroplan"
    text, remedy = " ".join(error.format_message().split()).rstrip("."), ""
    option = getattr(error, "option_name", None)
    if type(error).__name__ == "NoSuchOption" and option is not None:
        given = (word for word in sys.argv[1:] if word.startswith(option) and not word.startswith("--"))
        option = next(given, option)  # -gpu is read as -g, -p, -u
        known = [flag for parameter in error.ctx.command.get_params(error.ctx) for flag in parameter.opts]
        text, remedy = f"{option}: there is no such option", right_name(option, known)
    elif unknown := re.match("No such command '(.*?)'", text):
        text, remedy = f"there is no verb {unknown[1][:60]!r}", did_you_mean(unknown[1], _MODULES)
    elif wrong := re.match(r"Invalid value for '(--[\w-]+)'.*valid (integer|number)", text):
        flag, said = wrong[1], f"{' '.join(sys.argv[1:])} "
        value = said.partition(f" {flag} ")[2].partition(" ")[0] or said.partition(f" {flag}=")[2].partition(" ")[0]
        text = f"{flag}: {value[:40]!r} is no {'whole ' * (wrong[2] == 'integer')}number"
    _refuse("; ".join(part for part in (text, remedy, f"see {command} --help") if part))


def _refuse(line: str) -> None:
    progress.end()
    print(f"zeroplan: {line}", file=sys.stderr)
    sys.exit(EXIT_BAD_INPUT)


def _drop_output() -> None:
    """Discard what is still buffered: it cannot be written, and the interpreter would try again when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    run()
