"""One file and one row make a technique: every verb, the help, a reader of files and the page have it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE
from tests.validate.small import CONFIG

ROOT = Path(__file__).parents[2]
RUN = ("--depth", "formula", "--engine", "ddp", "--seq-len", "64")


def ran(*words: str) -> tuple[int, str, str]:
    """Return what a command ends with, prints and says, with the toy in the table."""
    command = [sys.executable, "-m", "tests.techniques.with_toy", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def test_estimate_counts_its_parameters_and_says_it(model: str) -> None:
    plain = json.loads(ran("estimate", model, *RUN, "--json")[1])
    code, out, error = ran("estimate", model, *RUN, "--soft-prompt", "8", "--json")
    assert code == 0, error
    found = json.loads(out)
    assert found["workload"]["soft_prompt"] == 8
    assert found["model"]["params"] - plain["model"]["params"] == 8 * CONFIG["hidden_size"]
    states = [one["plans"][0]["gpu"]["model_states"] for one in (plain, found)]
    assert states[1] - states[0] == 8 * CONFIG["hidden_size"] * 16
    lines = {one["buffer"]: one["bytes"] for one in found["plans"][0]["lines"]}
    assert lines["optim.anchor"] == 8 * CONFIG["hidden_size"] * 4


@pytest.mark.parametrize("verb", ["estimate", "explain", "recommend", "scale"])
def test_every_verb_helps_with_it(verb: str) -> None:
    code, out, _ = ran(verb, "--help", "all")
    assert code == 0
    assert "--soft-prompt" in out


def test_recommend_and_explain_take_it(model: str) -> None:
    code, out, error = ran("explain", model, *RUN, "--soft-prompt", "8", "--line", "first_prompt")
    assert code == 0, error
    assert "The vectors as they were at first" in out
    code, out, error = ran("recommend", model, *RUN, "--soft-prompt", "8", "--gpu", "H100", "--json")
    assert code == 1, error  # at formula depth nothing is known to fit
    assert json.loads(out)["workload"]["soft_prompt"] == 8


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("estimate", "{}", "--engine", "deepspeed", "--soft-prompt", "8"),
            "--soft-prompt: a soft prompt is not modelled under",
        ),
        (("estimate", "{}", *RUN, "--soft-prompt", "64"), "--soft-prompt: a prompt as long as the sample"),
        (("verify", "{}", "--engine", "ddp", "--soft-prompt", "8"), "--soft-prompt"),
        (("tune", "{}", "--engine", "ddp", "--soft-prompt", "8"), "--soft-prompt"),
    ],
)
def test_what_it_conflicts_with_is_one_line(words: tuple[str, ...], says: str, model: str) -> None:
    code, _, error = ran(*(word.format(model) for word in words))
    assert (code, error.count("\n")) == (2, 1), error
    assert says in error


def test_a_file_of_a_program_asks_for_it(model: str, tmp_path: Path) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text(f"model_name_or_path: {model}\ndataset_name: x\nmax_length: 64\nsoft_prompt_tokens: 4\npacking: true\n")
    code, out, error = ran(
        "estimate", "--from", str(file), "--program", "trl", "--engine", "ddp", "--depth", "formula", "--json"
    )
    assert code == 0, error
    assert json.loads(out)["workload"]["soft_prompt"] == 4


def test_the_page_takes_it() -> None:
    question = {"model": "openai-community/gpt2", "engine": "ddp", "soft_prompt": 8, "depth": "formula", "seq_len": 64}
    code, out, error = ran("page", json.dumps(question))
    assert code == 0, error
    assert "--soft-prompt 8" in out
