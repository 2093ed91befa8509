"""The golden answers hold, cover what the command line knows, and say where they differ."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.golden.make import differences, make, stored
from tests.golden.requests import LAYOUTS, OPTIMIZERS, quick_requests, requests
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
Cli = Callable[..., tuple[int, str, str]]


def test_quick_answers_are_the_golden_ones() -> None:
    """In a process of its own, which other tests have not given torch."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.golden.make", "--check", "--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_request_has_an_answer() -> None:
    asked = {" ".join(words) for words in requests()}
    assert asked == stored().keys()
    assert {" ".join(words) for words in quick_requests()} <= asked


@pytest.mark.parametrize("flag, known", [("--optimizer", OPTIMIZERS), ("--engine", {words[1] for words in LAYOUTS})])
def test_requests_name_all_that_the_command_line_knows(cli: Cli, flag: str, known: set[str]) -> None:
    _, _, message = cli("estimate", "openai-community/gpt2", flag, "zzzzzz")
    names = message.rsplit("use one of ", 1)[1].strip().split(", ")
    assert set(names) == set(known)


def test_differences_give_the_path() -> None:
    old = {"out": {"plans": [{"gpu": {"total": 1, "seconds": 0.1}}]}, "code": 0}
    new = {"out": {"plans": [{"gpu": {"total": 2, "seconds": 0.1 + 2e-17}}, {}]}, "code": 0}
    assert differences("estimate x", old, new) == [
        "estimate x\n    out.plans[0].gpu.total: 1 → 2",
        "estimate x\n    out.plans[1]: (absent) → {}",
    ]
    assert differences("estimate x", {"a": True, "b": 1}, {"a": 1, "b": 1.0}) == [
        "estimate x\n    a: true → 1",
        "estimate x\n    b: 1 → 1.0",
    ]
    assert "no stored answer" in differences("estimate y", None, new)[0]


def test_requests_run_apart_from_the_users_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A profile of the user's rates moves no answer, and the process is left as it was."""
    profile = tmp_path / "zeroplan" / "profile.json"
    profile.parent.mkdir()
    profile.write_text('{"schema": 1, "gpu": "RTX4090", "rates": {"matmul_tflops": 1.0}}')
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    words = ("recommend", "openai-community/gpt2", "--gpu", "RTX4090", "--depth", "formula", "--json")
    before = (Path.cwd(), dict(os.environ), sys.modules.get("torch"))
    assert make([words]) == {" ".join(words): stored()[" ".join(words)]}
    assert (Path.cwd(), dict(os.environ), sys.modules.get("torch")) == before
