"""Help, names of options, lists of models and GPUs, and what shells complete."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import typer

from zeroplan.cli import main
from zeroplan.cli.help import VERBS as GROUPS
from zeroplan.cli.help import synonyms
from zeroplan.core.gpus import GPUS

Cli = Callable[..., tuple[int, str, str]]
Run = Callable[..., subprocess.CompletedProcess[str]]
VERBS = tuple(name for names in GROUPS.values() for name in names)


@pytest.fixture(scope="module")
def commands() -> dict[str, Any]:
    """Every verb's command."""
    argv, main.sys.argv = main.sys.argv, ["zeroplan"]
    try:
        main._register()
    finally:
        main.sys.argv = argv
    return typer.main.get_command(main.app).commands  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_groups_and_examples_that_parse(
    verb: str, cli: Cli, commands: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = cli(verb, "-h")
    assert (code, out) == (0, cli(verb, "--help")[1])
    assert max(map(len, out.splitlines())) <= 80
    assert "..." not in re.sub(r"[\]}]\.\.\.", "", out)
    examples = out.partition("Examples:\n")[2].splitlines()
    assert len(examples) >= 2
    for example in examples:
        program, called, *words = shlex.split(example)
        assert (program, called) == ("zeroplan", verb)
        commands[verb].make_context(verb, words)  # raises for an option that does not exist


def test_help_shows_what_people_use_and_help_all_the_rest(cli: Cli) -> None:
    short = cli("estimate", "--help")[1]
    assert "--micro-batch" in short
    assert "--tiled-mlp" not in short
    assert "more options, for techniques, parallelism and files: zeroplan estimate --help all" in " ".join(short.split())
    assert len(short.splitlines()) < 60


def test_a_technique_that_is_named_shows_its_options(cli: Cli) -> None:
    named = cli("estimate", "gpt2", "--lora-rank", "8", "--help")[1]
    assert "--lora-targets" in named
    assert "--base-dtype" in named
    assert "--tiled-mlp" not in named
    assert "--lora-targets" not in cli("estimate", "--help")[1]


def test_a_word_behind_help_finds_options(cli: Cli) -> None:
    found = cli("estimate", "--help", "dora")[1]
    assert "--dora" in found
    assert "--micro-batch" not in found
    assert re.search(r"\d+ others: zeroplan estimate --help all", found)
    assert "No option has 'qqq' in its name or text." in cli("estimate", "-h", "qqq")[1]


def test_options_come_in_groups(cli: Cli) -> None:
    out = cli("estimate", "-h", "all")[1]
    headings = re.findall(r"^(\w[\w ]*):$", out, re.MULTILINE)
    assert headings == ["Arguments", "Workload", "Cluster", "Parallelism", "Sharding", "Files", "Options", "Examples"]
    assert "--no-gradient-checkpointing" in out


def test_the_main_help_lists_every_verb_whole(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = cli("-h")
    assert code == 0
    assert re.findall(r"^  (\w+) +[A-Z]", out, re.MULTILINE) == list(VERBS)
    assert "..." not in out.replace("]...", "")


@pytest.mark.parametrize(
    "words, remedy",
    [
        (
            ["estimate", "gpt2", "--batch-size", "4"],
            "write --micro-batch (samples a GPU and pass), or recommend's global batch",
        ),
        (["estimate", "gpt2", "--bf16"], "write --dtype bf16"),
        (["estimate", "gpt2", "--load_in_4bit"], "write --quantize nf4"),
        (["estimate", "gpt2", "--max_seq_length=4096"], "write --seq-len"),
        (["estimate", "gpt2", "--micro-bach", "4"], "did you mean '--micro-batch'"),
        (["estimat", "gpt2"], "did you mean 'estimate'?"),
    ],
)
def test_a_wrong_name_is_answered_with_the_right_one(words: list[str], remedy: str, cli: Cli) -> None:
    code, out, err = cli(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert remedy in err


def test_synonyms_name_options_that_exist(commands: dict[str, Any]) -> None:
    known = {flag for command in commands.values() for parameter in command.params for flag in parameter.opts}
    for other, name in synonyms().items():
        assert other not in known
        named = re.findall(r"--[\w-]+", name)
        assert set(named) <= known, other
        assert named or name.startswith(("MODEL", "nothing")), other


@pytest.mark.parametrize(
    "written, means",
    [
        (["--seq-len", "1k"], ["--seq-len", "1024"]),
        (["--dtype", "float16"], ["--dtype", "fp16"]),
        (["--attn", "flash_attention_2"], ["--attn", "flash"]),
        (["--gpu", "4xA100"], ["--gpu", "A100", "--gpus", "4"]),
        (["--vram", "24"], ["--vram", "24G"]),
    ],
)
def test_other_ways_to_write_a_value(written: list[str], means: list[str], cli: Cli) -> None:
    asked = ("estimate", "openai-community/gpt2", "--stage", "2", "--depth", "formula", "--json")
    found, expected = (json.loads(cli(*asked, *words)[1]) for words in (written, means))
    assert found.pop("zeroplan") != expected.pop("zeroplan")  # the commands
    assert found == expected
    assert cli(*asked, *written)[0] == 0


def test_markdown_is_githubs(cli: Cli) -> None:
    for name in ("markdown", "md", "github"):
        assert cli("gpus", "h100", "--format", name)[1].splitlines()[1].startswith("|---")


def test_models_are_searched_by_words(cli: Cli) -> None:
    _, out, _ = cli("models", "LLAMA", "8b", "--json")
    names = [row["model"] for row in json.loads(out)["models"]]
    assert "meta-llama/Llama-3.1-8B" in names
    assert all("llama" in name.lower() for name in names)
    assert len(cli("models")[1].splitlines()) > 100
    for verb in ("models", "gpus"):
        assert cli(verb, "no-such-name") == (1, "", "zeroplan: no name holds 'no-such-name'\n")


def test_every_gpu_is_listed(cli: Cli) -> None:
    _, out, _ = cli("gpus", "--json")
    assert [row["gpu"] for row in json.loads(out)["gpus"]] == [gpu.name for gpu in GPUS.values()]
    table = cli("gpus")[1].splitlines()
    assert max(map(len, table)) <= 80
    assert len(table) == 2 + len(GPUS)


@pytest.mark.parametrize(
    "shell, line, found",
    [
        ("bash", "zeroplan estimate meta-llama/Llama-3.1", "meta-llama/Llama-3.1-405B"),
        ("bash", "zeroplan estimate gpt2 --gpu 4xA", "4xA100-80G"),
        ("zsh", "zeroplan recommend --engine f", "fsdp2"),
        ("fish", "zeroplan estimate --optimizer ada", "adafactor"),
        ("fish", "zeroplan est", "estimate"),
    ],
)
def test_shells_complete_names(shell: str, line: str, found: str, fresh_python: Run) -> None:
    done = fresh_python(
        "from zeroplan.cli.main import run; run()",
        _ZEROPLAN_COMPLETE=f"complete_{shell}",
        COMP_WORDS=line,
        COMP_CWORD=str(len(line.split()) - 1),
        _TYPER_COMPLETE_ARGS=line,
        _TYPER_COMPLETE_FISH_ACTION="get-args",
    )
    assert found in done.stdout, done.stderr
