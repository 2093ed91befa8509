"""What holds for every verb: the verdict first, lines of 80 characters, --quiet, colour in a terminal alone, progress."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Timer

import pytest

from tests.patience import PATIENCE
from zeroplan import __version__
from zeroplan.cli import main
from zeroplan.cli.help import VERBS
from zeroplan.cli.progress import ProgressLine
from zeroplan.core.plan import Report
from zeroplan.core.plumbing.progress import watch, working

Cli = Callable[..., tuple[int, str, str]]
LLAMA = "meta-llama/Llama-3.2-1B"
GPT2 = "openai-community/gpt2"
MIXTURE = "Qwen/Qwen3-30B-A3B"
CONFIGS = Path(__file__).parents[1] / "fixtures" / "ds_configs"

#: Words → how the first line begins. Inputs that are long, short, refused, unknown and do not fit.
ASKED: list[tuple[tuple[str, ...], str]] = [
    (("estimate", LLAMA, "--gpu", "8xH100"), "Fits: "),
    (("estimate", LLAMA, "--vram", "2", "--cpu-ram", "2"), "Nothing fits: "),
    (("estimate", LLAMA, "--stage", "2", "--vram", "24", "--peak"), "Does not fit: "),
    (("estimate", MIXTURE, "--gpu", "8xH100", "--nvme", "8T", "--cpu-ram", "2T", "--stage", "3", "--peak"), "Does not fit: "),
    (("estimate", "--params", "70B", "--gpus", "8", "--nodes", "16", "--vram", "80"), "Unknown: "),
    (("estimate", GPT2, "--ds-config", "zero3_offload_auto.json", "--gpu", "T4"), "Fits: "),
    (("estimate", GPT2, "--engine", "fsdp2", "--lora-rank", "8", "--vram", "24"), "Fits: "),
    (("recommend", LLAMA, "--gpu", "4xA100-40G", "--global-batch", "64", "--nvme", "4T", "--seq-len", "1k"), "Best: "),
    (("recommend", LLAMA, "--vram", "2", "--cpu-ram", "4"), "Nothing fits: "),
    (("recommend", "--params", "7B", "--vram", "80", "--gpus", "8"), "Unknown: "),
    (("recommend", GPT2, "--vram", "8", "--from", "zero3_offload_auto.json"), "Best: "),
    (("recommend", GPT2, "--vram", "8", "--goal", "memory", "-o", "run/"), "Least memory: "),
    (("scale", GPT2, "--gpus", "1,16", "--vram", "8", "--stage", "2", "--offload-optimizer", "none"), "Fits from 1 GPU on: "),
    (("explain", LLAMA, "--gpus", "8", "--stage", "3"), "Largest of "),
    (("explain", MIXTURE, "--gpus", "8", "--depth", "formula"), "Largest of "),
    (("explain", LLAMA, "--gpus", "8", "--stage", "2", "--time"), "0."),
    *((("check", path.name), ("OK", "DeepSpeed 0.19.8 refuses ")) for path in sorted(CONFIGS.glob("*.json"))),
    (("check", "recipe.yaml", "accelerate.yaml", "--gpu", "H100"), "OK"),
    (("check", "recipe.yaml"), "TRL 1.16 (sft, qlora):"),
    (("trace", LLAMA, "--gradient-checkpointing"), ""),
    (("doctor",), ""),
    (("doctor", "train.log"), "Out of GPU memory"),
    (("models", "llama"), ""),
    (("gpus",), ""),
]
FILES = {
    "recipe.yaml": f"model_name_or_path: {LLAMA}\ndataset_text_field: text\nuse_peft: true\nload_in_4bit: true\n",
    "accelerate.yaml": "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config: {zero_stage: 2}\n",
    "train.log": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.65"
    " GiB of which 1.2 GiB is free. Of the allocated memory 20.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved"
    " by PyTorch but unallocated.\n",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that are asked about."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    for path in CONFIGS.glob("*.json"):
        shutil.copy(path, tmp_path)  # asked for by their names: a checkout's path may be as long as a line
    return tmp_path


def test_all_verbs_are_asked() -> None:
    assert {words[0] for words, _ in ASKED} == {verb for verbs in VERBS.values() for verb in verbs} - {
        "capture",
        "diff",
        "verify",
        "tune",
        "ui",
    }


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("words", "begins"), ASKED, ids=lambda value: " ".join(value)[-60:] if isinstance(value, tuple) else ""
)
def test_the_verdict_comes_first_and_nothing_is_wider_than_a_terminal(
    words: tuple[str, ...], begins: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = cli(*words)
    assert code in (0, 1) or words[0] == "check", err
    assert err == ""
    assert out.startswith(begins)
    assert "activation.temp" not in out or words[0] == "explain"
    # Paths of a test's own folder are longer than a line can be made.
    wide = [line for line in out.splitlines() if len(line) > 80 and not re.search(r"\S{76,}", line)]
    assert not wide
    assert "\n\n\n" not in out
    notes = [line for line in out.splitlines() if line.startswith("note: ")]
    assert len(notes) == len(set(notes))


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "words", [words for words, _ in ASKED if words[0] not in ("models", "gpus") and "-o" not in words][::3], ids=" ".join
)
def test_quiet_is_the_first_sentences_alone(words: tuple[str, ...], cli: Cli) -> None:
    quiet = cli(*words, "--quiet")[1]
    if words[0] != "check":  # with a plan, its verdict alone
        assert cli(*words)[1].startswith(quiet.rstrip("\n"))
    assert 1 <= quiet.count("\n") <= 6
    assert "\n\n" not in quiet


def test_colour_is_for_terminals_that_want_it(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("recommend", GPT2, "--vram", "8", "--depth", "formula")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" not in cli(*words)[1]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert "\x1b[" in cli(*words)[1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in cli(*words)[1]


def test_work_says_what_it_is_doing(cli: Cli) -> None:
    heard: list[tuple[str, int, int]] = []
    watch(lambda *said: heard.append(said))
    try:
        assert cli("estimate", GPT2, "--gpus", "2")[0] == 0
        plans = [one for one in heard if one[0].startswith("planning stage ")]
        assert [done for _, done, _ in plans] == list(range(len(plans)))
        assert {total for *_, total in plans} == {len(plans)}
        heard.clear()
        watch(lambda *said: heard.append(said))
        assert cli("recommend", GPT2, "--vram", "8")[0] == 0
        assert any(what.startswith("simulating ") for what, *_ in heard)
    finally:
        watch(None)


def test_the_line_of_progress_appears_late_renews_itself_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    drawn = io.StringIO()
    waits: list[Timer] = []
    real = Timer

    def timer(seconds: float, call: Callable[[], None]) -> Timer:
        assert seconds == 2.5
        waits.append(real(0 if waits else 10 * PATIENCE, call))  # the first work ends before its time has come
        return waits[-1]

    def drawn_soon(text: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while text not in drawn.getvalue() and time.monotonic() < deadline:
            time.sleep(0.02)

    monkeypatch.setattr("threading.Timer", timer)
    line = ProgressLine(patience=2.5, console=Console(file=drawn, force_terminal=True, width=80))
    watch(line)
    try:
        working("quick work")
        line.close()
        waits[0].join()  # it is cancelled, which ends its thread
        assert drawn.getvalue() == ""
        working("the first part", 0, 2)
        drawn_soon("the first part")
        working("the second part", 1, 2)
        drawn_soon("the second part")
        line.close()
    finally:
        watch(None)
    text = drawn.getvalue()
    assert text.index("the first part") < text.index("the second part")
    assert text.rstrip().endswith("\x1b[2K")  # the line is gone


def test_json_holds_no_progress_and_no_colour(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert json.loads(cli("recommend", GPT2, "--vram", "8", "--depth", "formula", "--json")[1])["schema"] == 1


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "words",
    [
        *{words[0]: words for words, _ in reversed(ASKED) if "--time" not in words and "--peak" not in words}.values(),
        ("estimate", LLAMA, "--stage", "2", "--vram", "24", "--peak"),
        ("explain", GPT2, "--stage", "2", "--time"),
    ],
    ids=" ".join,
)
def test_json_tells_the_version_and_the_command(words: tuple[str, ...], cli: Cli) -> None:
    found = json.loads(cli(*words, "--json")[1])
    assert found["zeroplan"] == {"version": __version__, "command": shlex.join(["zeroplan", *words, "--json"])}
    if words[0] == "estimate" and "--peak" not in words:
        assert Report.model_validate(found).plans


def test_every_verb_prints_json_by_the_one_function_that_adds_them() -> None:
    """Among them `capture`, `verify` and `tune`, which run programs."""
    folder = Path(main.__file__).parent
    texts = {path.name: path.read_text() for path in folder.glob("*.py") if path.name != "main.py"}
    printed = re.compile(r"\bshow\([^\n]*(json|to_dict)|typer\.echo\([^\n]*json|print\([^\n]*json")
    assert not [name for name, text in texts.items() if printed.search(text)]
    assert sum("show_json(" in text for text in texts.values()) >= 12


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("words", "most"),
    [
        (("explain", LLAMA, "--gpus", "8", "--stage", "3"), 20),
        (("explain", GPT2, "--gpus", "8"), 20),
        (("explain", LLAMA, "--gpus", "8", "--stage", "2", "--time"), 20),
        (("explain", GPT2, "--gpus", "8", "--time"), 20),
        (("scale", GPT2, "--gpu", "T4"), 20),
        (("check", "zero3_offload_auto.json"), 3),
        (("doctor", "train.log"), 12),
        (("doctor", "train.log", GPT2, "--stage", "2", "--micro-batch", "32"), 20),
    ],
    ids=str,
)
def test_the_first_screen_is_short_and_the_rest_is_told(
    words: tuple[str, ...], most: int, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = cli(*words)[1]
    assert out.count("\n") <= most, out
    if words[0] != "check":
        assert "--why" in out or "Planned: " in out
        assert cli(*words, "--why")[1].count("\n") >= out.count("\n")
