"""Commands in the pages: collected, run, and their shown output renewed.

How a fenced block is read (docs/extending.md, *The docs*):

- ``console``: lines after ``$`` are commands, those below what they print. A line ``…`` stands for lines left out.
- ``bash``: commands alone. ``python``: statements; blocks of one page share their names.
- A block that begins with a comment such as ``# needs a GPU`` is not run: its commands are parsed, its Python is compiled.
- A block with a title is a file: it is written into the page's folder, in which the commands below it run.
- ``# exits with 1`` behind a command names its exit code, which is 0 otherwise.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import re
import shlex
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES_WITH_COMMANDS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_OPENS = re.compile(r'^```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\s*$')
_ONLY_PARSED = re.compile(r"# (needs|takes|opens|with your) ", re.IGNORECASE)
_EXITS = re.compile(r"#.*\bexits with (\d+)")
_LEFT_OUT = "…"


@dataclass(frozen=True)
class Block:
    """A fenced block: what it is, and the line of the page on which its text begins (from 0)."""

    language: str
    title: str
    start: int
    lines: tuple[str, ...]

    @property
    def runs(self) -> bool:
        """Whether a test can run it."""
        return not (self.lines and _ONLY_PARSED.match(self.lines[0]))


@dataclass(frozen=True)
class Command:
    """A command of a block, and what the page shows below it."""

    text: str
    shown: tuple[str, ...]
    line: int

    @property
    def words(self) -> list[str]:
        """The command's words, without variables in front of it and without its comment."""
        words = shlex.split(self.text.replace("\\\n", " "), comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            words.pop(0)
        return words

    @property
    def exit_code(self) -> int:
        """The exit code that the page names, else 0."""
        named = _EXITS.search(self.text)
        return int(named[1]) if named else 0


def blocks(text: str) -> list[Block]:
    """Every fenced block of a page."""
    found, opened, start = [], None, 0
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if opened is None and (opened := _OPENS.match(line)):
            start = number + 1
        elif opened is not None and line == "```":
            found.append(Block(opened["language"], opened["title"] or "", start, tuple(lines[start:number])))
            opened = None
    if opened is not None:
        raise ValueError(f"the block that begins on line {start} has no end")
    return found


def commands(block: Block) -> list[Command]:
    """The commands of a ``console`` or ``bash`` block."""
    found: list[Command] = []
    prompt = "$ " if block.language == "console" else ""
    at = 0
    while at < len(block.lines):
        line, number = block.lines[at], block.start + at
        at += 1
        if prompt and not line.startswith(prompt):
            continue
        if not prompt and (not line.strip() or line.startswith("#")):
            continue
        parts = [line.removeprefix(prompt)]
        while parts[-1].endswith("\\"):
            parts.append(block.lines[at])
            at += 1
        first = at
        while prompt and at < len(block.lines) and not block.lines[at].startswith(prompt):
            at += 1
        found.append(Command("\n".join(parts), tuple(block.lines[first:at]) if prompt else (), number))
    return found


@contextlib.contextmanager
def new_folder() -> Iterator[Path]:
    """Work in a new folder, offline, as in a pipe of 80 columns."""
    with tempfile.TemporaryDirectory() as name:
        before = dict(os.environ)
        os.environ.update({"COLUMNS": "80", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"})
        try:
            with contextlib.chdir(name):
                yield Path(name)
        finally:
            os.environ.clear()
            os.environ.update(before)


#: Answers of commands that read and write no file of the page: the same words give the same answer on each page.
_ANSWERS: dict[tuple[str, ...], tuple[int, str]] = {}


def run(words: list[str]) -> tuple[int, str]:
    """Run ``zeroplan …`` in this process: the exit code, and what it printed on either stream."""
    from zeroplan.cli.main import run as entry

    reads = any(Path(word).exists() for word in words)
    if not reads and tuple(words) in _ANSWERS:
        return _ANSWERS[tuple(words)]
    before = sorted(Path().rglob("*"))
    printed, code, argv = io.StringIO(), 0, sys.argv
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        sys.argv = list(words)
        try:
            entry()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        finally:
            sys.argv = argv
    answer = code, printed.getvalue()
    if not reads and sorted(Path().rglob("*")) == before:
        _ANSWERS[tuple(words)] = answer
    return answer


def parse(words: list[str]) -> None:
    """Read a command that is not run.

    Raises:
        ValueError: a verb, an option, a module, a target or an extra that does not exist.
    """
    program, *rest = words
    if program in {"torchrun", "deepspeed", "accelerate"} and "-m" in rest:
        program, rest = "python", rest[rest.index("-m") :]
    if program == "python" and rest[:1] == ["-m"] and rest[1] == "zeroplan":
        program, rest = "zeroplan", rest[2:]
    if program == "zeroplan":
        _parse_verb(rest)
    elif program == "python" and rest[:1] == ["-m"]:
        if rest[1].partition(".")[0] in {"zeroplan", "zeroplan_runtime", "benchmarks", "tests"}:
            _require(importlib.util.find_spec(rest[1]) is not None, f"no module {rest[1]}")
    elif program == "python":
        _require((ROOT / rest[0]).exists() or Path(rest[0]).exists(), f"no file {rest[0]}")
    elif program == "make":
        makefile = (ROOT / "Makefile").read_text()
        for target in rest:
            _require("=" in target or re.search(rf"^{target}:", makefile, re.M) is not None, f"no target {target}")
    elif program == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for extra in re.findall(r"zeroplan\[([\w,]+)\]", " ".join(rest)):
            _require(set(extra.split(",")) <= project["optional-dependencies"].keys(), f"no extra {extra}")


def _parse_verb(words: list[str]) -> None:
    import typer

    from zeroplan.cli import main

    for module in dict.fromkeys(main._MODULES.values()):
        importlib.import_module(f"zeroplan.cli.{module}")
    group = typer.main.get_command(main.app)
    try:
        if not words[0].startswith("-"):
            command = group.get_command(None, words[0])  # type: ignore[attr-defined, arg-type]
            _require(command is not None, f"no verb {words[0]}")
            command.make_context(words[0], [word for word in words[1:] if word != _LEFT_OUT])
    except typer.BadParameter.__base__ as error:  # type: ignore[misc]
        raise ValueError(error.format_message()) from error


def _require(held: bool, otherwise: str) -> None:
    if not held:
        raise ValueError(otherwise)


def shortened(printed: str, shown: tuple[str, ...]) -> list[str]:
    """What `printed` looks like where the page leaves out what `shown` leaves out: as many lines before ``…`` and behind it."""
    lines = [line.rstrip() for line in printed.rstrip().split("\n")]
    if _LEFT_OUT not in shown:
        return lines
    at = shown.index(_LEFT_OUT)
    behind = len(shown) - at - 1
    return [*lines[:at], _LEFT_OUT, *(lines[len(lines) - behind :] if behind else [])]


def renewed(text: str) -> str:
    """The page with the output of every command that shows some as it is printed now."""
    lines = text.split("\n")
    changes: list[tuple[int, int, list[str]]] = []
    with new_folder():
        for block in blocks(text):
            if block.title:
                write(block)
            elif block.runs and block.language in {"console", "bash"}:
                for command in commands(block):
                    if command.words[0] != "zeroplan":
                        continue
                    _, printed = run(command.words)
                    if command.shown:
                        first = command.line + command.text.count("\n") + 1
                        gap = [""] if command.shown[-1] == "" else []
                        shown = command.shown[:-1] if gap else command.shown
                        changes.append((first, first + len(command.shown), shortened(printed, shown) + gap))
    for first, last, output in reversed(changes):
        lines[first:last] = output
    return "\n".join(lines)


def write(block: Block) -> None:
    """Write the file that a block shows into the page's folder."""
    path = Path(block.title)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(block.lines) + "\n")
