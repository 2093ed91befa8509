"""Every command in the README and the docs runs as it stands there and prints what is shown; the rest is at least parsed."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest

from docs import commands as pages
from tests.conftest import ROOT

_WITH_COMMANDS = {path: found for path in pages.PAGES_WITH_COMMANDS if (found := pages.blocks(path.read_text()))}


#: Pages whose searches and simulations take many seconds together.
_LONG = {
    *("recommend.md", "gallery.md", "ds_config.md", "reported.md", "scale.md"),
    *("programs/hf-trainer.md", "programs/trl.md", "programs/lightning.md", "programs/axolotl.md"),
    *("start/fit.md", "legacy.md", "offload.md", "deepspeed_compat.md"),
    *("programs/torchtitan.md", "start/slow.md", "quantised.md", "understand/zero.md", "understand/fsdp-or-deepspeed.md"),
}
_PAGES = [
    pytest.param(page, marks=pytest.mark.long) if page.relative_to(ROOT).as_posix().removeprefix("docs/") in _LONG else page
    for page in _WITH_COMMANDS
]


@pytest.mark.parametrize("page", _PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_page_says_what_happens(page: Path) -> None:
    names: dict[str, Any] = {}
    with pages.new_folder():
        for block in _WITH_COMMANDS[page]:
            where = f"{page.name}:{block.start + 1}"
            if block.title:
                pages.write(block)
            elif block.language in {"console", "bash"}:
                for command in pages.commands(block):
                    _check(command, block.runs, f"{page.name}:{command.line + 1}")
            elif block.language == "python":
                code = compile("\n".join(block.lines), where, "exec")
                if block.runs:
                    with contextlib.redirect_stdout(io.StringIO()):
                        exec(code, names)


def _check(command: pages.Command, runs: bool, where: str) -> None:
    if not runs or command.words[0] != "zeroplan":
        assert not command.shown or not runs, f"{where}: what is shown below it would not be checked"
        try:
            pages.parse(command.words)
        except ValueError as error:
            pytest.fail(f"{where}: {error}")
        return
    code, printed = pages.run(command.words)
    assert code == command.exit_code, f"{where} exits with {code}:\n{printed}"
    shown = command.shown[:-1] if command.shown and command.shown[-1] == "" else command.shown
    if shown:
        assert pages.shortened(printed, shown) == list(shown), f"{where} prints otherwise: python docs/generate.py renews it"


def test_no_command_hides_in_a_block_without_a_language() -> None:
    """Such a block is a drawing or a table; a command in it would be run by nobody, and an answer held to none."""
    hidden = [
        f"{page.name}:{block.start + 1 + number}: {line}"
        for page, found in _WITH_COMMANDS.items()
        for block in found
        if block.language in {"", "text"} and not block.title
        for number, line in enumerate(block.lines)
        if line.startswith(("zeroplan ", "$ ", "pip ", "make ", "python ", "torchrun ", "Fits", "Best:", "Does not", "May fit"))
    ]
    assert not hidden, "\n".join(hidden)


def test_a_shown_output_that_is_wrong_is_found() -> None:
    """The collector itself: commands, continued lines, outputs, what is left out, and blocks that are not run."""
    console = "```console\n$ zeroplan gpus \\\n  H100\nfirst\n…\nlast\n\n$ zeroplan models x  # exits with 1\n```"
    text = f"{console}\n```bash\n# needs a GPU\nzeroplan verify\n```"
    shell, marked = pages.blocks(text)
    one, two = pages.commands(shell)
    assert one.words == ["zeroplan", "gpus", "H100"]
    assert one.shown == ("first", "…", "last", "")
    assert pages.shortened("a\nb\nc\nd\n", one.shown[:-1]) == ["a", "…", "d"]
    assert (two.exit_code, two.words[-1], two.line) == (1, "x", 7)
    assert not marked.runs
    pages.parse(pages.commands(marked)[0].words)
    for wrong in (
        ["zeroplan", "verif"],
        ["zeroplan", "verify", "--gpuz", "2"],
        ["make", "coffee"],
        ["pip", "install", "zeroplan[no]"],
    ):
        with pytest.raises(ValueError):
            pages.parse(wrong)
