"""Whatever command an answer prints, the program takes it, and what it writes is there."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., tuple[int, str, str]]
GPT2, QWEN = "openai-community/gpt2", "Qwen/Qwen2.5-0.5B"
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.65 GiB of which "
    "1.20 GiB is free. Of the allocated memory 20.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but "
    "unallocated.\n"
)
#: Words that answers with a command follow; each folder has a space in its name.
ASKED = [
    ("estimate", GPT2, "--vram", "24", "--stage", "2"),
    ("estimate", QWEN, "--gpu", "2xH100", "--engine", "fsdp2", "--tp", "2", "--stage", "3"),
    ("estimate", QWEN, "--gpu", "4xH100", "--engine", "fsdp2", "--tp", "2", "--micro-batch", "2", "--stage", "3"),
    ("estimate", "meta-llama/Llama-3.1-8B", "--gpu", "2xH100", "--tp", "2", "--stage", "2", "--depth", "formula"),
    ("recommend", "meta-llama/Llama-3.1-8B", "--gpu", "8xH100", "--tp", "2", "--pp", "1", "--depth", "formula"),
    ("estimate", GPT2, "--lora-rank", "8", "--lora-targets", "c_attn,c_proj", "--seq-len", "1k", "--dtype", "fp16"),
    ("estimate", "--params", "7B", "--vram", "80G", "--gpus", "8", "--nodes", "2"),
    ("estimate", GPT2, "--vram", "24", "--ds-config", "my files/ds.json"),
    ("estimate", GPT2, "--vram", "24", "--from", "my files/ds.json", "--cpu-ram", "64", "--optimizer", "lion"),
    ("estimate", GPT2, "--vram", "24", "--ds-config", "my files/curriculum.json", "--engine", "zeroplan", "--depth", "formula"),
    ("recommend", GPT2, "--vram", "24", "--depth", "formula"),
    ("recommend", GPT2, "--vram", "24", "--depth", "formula", "--engine", "ddp"),
    ("recommend", GPT2, "--vram", "24", "--depth", "formula", "--engine", "fsdp2"),
    ("recommend", GPT2, "--vram", "24", "--depth", "formula", "--engine", "zeroplan"),
    ("recommend", QWEN, "--vram", "24", "--depth", "formula", "--engine", "ddp", "--lora-rank", "8", "--quantize", "nf4"),
    ("recommend", GPT2, "--vram", "24", "--depth", "formula", "--from", "my files/ds.json"),
    ("check", "my files/ds.json"),
    ("check", "my files/ds.json", GPT2, "--gpu", "2xT4"),
    ("doctor", "train.log"),
    ("doctor", "train.log", GPT2, "--stage", "2", "--micro-batch", "32"),
]


def commands_in(text: str) -> list[list[str]]:
    """Return the words of each command of zeroplan's, with lines that a shell reads as one joined."""
    joined = re.sub(r" \\\n\s+", " ", text)
    return [
        shlex.split(found)
        for found in re.findall(r"^(?:Next: |\s+)(zeroplan (?:recommend|estimate|check|verify) .+)$", joined, re.M)
    ]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a log, and a ds_config in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "my files").mkdir()
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    (tmp_path / "my files" / "ds.json").write_text(json.dumps(config))
    schedule = {"schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 100, "difficulty_step": 8}}
    grows = {"enabled": True, "curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 512} | schedule
    config |= {"curriculum_learning": grows, "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}
    (tmp_path / "my files" / "curriculum.json").write_text(json.dumps(config))
    (tmp_path / "train.log").write_text(OOM)
    return tmp_path


@pytest.mark.parametrize("words", ASKED, ids=" ".join)
def test_the_next_command_runs_as_printed(cli: Cli, here: Path, words: tuple[str, ...]) -> None:
    code, out, err = cli(*words)
    assert code in (0, 1), err
    found = commands_in(out)
    assert found or words[0] == "doctor" or "Next: " not in out, out
    for command in found:
        fast = [] if "--depth" in command or command[1] == "check" else ["--depth", "formula"]
        named = [GPT2 if word == "MODEL" else word for word in command[1:]]  # what check asks for, given a file alone
        code, out, err = cli(*named, *fast)
        assert (code in (0, 1), err) == (True, ""), command
        if "-o" in command:
            assert (here / "run").is_dir()
        if "--new-script" in command:
            assert "zeroplan recommend" in (here / "train.py").read_text()
            assert ("BitsAndBytesConfig(load_in_4bit=True" in (here / "train.py").read_text()) is ("--quantize" in command)


def test_the_flags_of_every_knob_lead_to_what_it_promises(cli: Cli, here: Path) -> None:
    words = ("estimate", GPT2, "--vram", "6", "--micro-batch", "16", "--stage", "0", "--offload-optimizer", "none")
    said = json.loads(cli(*words, "--json")[1])
    reliefs = [one for one in said["reliefs"] if one["flags"].startswith("--")]
    assert reliefs
    for one in reliefs:
        asked = list(words)
        given = shlex.split(one["flags"])
        for flag in [word for word in given if word.startswith("--")]:
            if flag in asked:
                at = asked.index(flag)
                del asked[at : at + 2]
        code, out, err = cli(*asked, *given, "--json")
        assert (code, err) == (0, ""), one
        (plan,) = json.loads(out)["plans"]
        assert plan["gpu"]["total"] == one["total"], one


#: First words of verdicts, the best first.
_RANKS = (("Fits", "Best", "Fastest", "Least memory"), ("May fit",), ("Unknown",), ("Does not fit", "Nothing fits"))


def _rank(out: str) -> int:
    """The place of the first verdict in an answer."""
    heads = [line.partition(": ")[0].partition(" from ")[0] for line in out.splitlines()]
    return next(at for head in heads for at, words in enumerate(_RANKS) if head in words)


@pytest.mark.parametrize(
    "words",
    [
        ("estimate", GPT2, "--vram", "24", "--stage", "2"),
        ("estimate", GPT2, "--gpu", "2xT4", "--micro-batch", "16"),
        ("estimate", GPT2, "--gpu", "2xT4", "--engine", "fsdp2", "--micro-batch", "4"),
        ("estimate", GPT2, "--vram", "24", "--from", "my files/ds.json"),
        ("check", "my files/ds.json", GPT2, "--gpu", "2xT4"),
        ("recommend", GPT2, "--gpu", "2xT4"),
        ("recommend", GPT2, "--gpu", "2xT4", "--engine", "fsdp2"),
        ("scale", GPT2, "--gpus", "1,4", "--gpu", "T4"),
    ],
    ids=" ".join,
)
def test_the_next_command_gives_the_verdict_that_it_promises(cli: Cli, here: Path, words: tuple[str, ...]) -> None:
    out = cli(*words)[1]
    (command,) = commands_in(out)
    following = cli(*command[1:])[1]
    if words[0] == "recommend":  # the same, with its files
        assert following.splitlines()[0] == out.splitlines()[0]
    else:
        assert _rank(following) <= _rank(out), following
    if words[0] == "scale":
        speed = float(re.search(r"([\d,]+) tokens/s", out)[1].replace(",", ""))  # type: ignore[index]
        (best, *_) = json.loads(cli(*command[1:], "--json")[1])["ranking"]
        gpus = int(command[command.index("--gpus") + 1]) if "--gpus" in command else 1
        assert best["tokens_per_second"] / gpus == pytest.approx(speed, rel=1e-3)


def test_the_command_after_a_log_finds_what_fits(cli: Cli, here: Path) -> None:
    _, out, err = cli("doctor", "train.log", GPT2, "--stage", "2", "--micro-batch", "32")
    assert "Smallest change that fits" in out, err
    (command,) = commands_in(out)
    assert _rank(cli(*command[1:])[1]) == 0
