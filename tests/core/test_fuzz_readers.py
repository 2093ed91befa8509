"""A thousand mutated files at every reader, and proof that the campaign finds what it looks for."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import fuzz_readers
from benchmarks.fuzz_readers import READERS, Reader, campaign, mutated
from tests.patience import PATIENCE
from zeroplan.core.errors import BadInput

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_a_thousand_inputs_are_answered_or_refused_in_one_line() -> None:
    command = [sys.executable, "-m", "benchmarks.fuzz_readers", "--count", "1000", "--seed", "1"]
    run = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=PATIENCE
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "1,000 inputs, seed 1, 0 findings" in run.stdout
    for name in READERS:
        assert name in run.stdout


def _spin(path: str) -> None:
    begin = time.process_time()
    while time.process_time() - begin < 10:
        pass


def _lines(path: str) -> None:
    error = BadInput("one")
    error.args = ("one\ntwo",)
    raise error


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (_spin, "TooSlowError: more than 0.2 s"),
        (lambda path: [][1], "IndexError: list index out of range"),
        (_lines, "a refusal of several lines"),
    ],
)
def test_what_is_wrong_is_found(read: object, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_readers, "PATIENCE", 0.2)
    monkeypatch.setitem(READERS, "broken", Reader("json", lambda: [b"{}"], read))  # type: ignore[arg-type]
    _, found, _ = campaign(["broken"], 1, seed=3, first=7)
    assert [(one.reader, one.seed, one.number) for one in found] == [("broken", 3, 7)]
    assert said in found[0].what


def test_an_input_follows_from_its_number() -> None:
    import random

    files = READERS["ds_config"].files()
    assert mutated(random.Random("a"), files) == mutated(random.Random("a"), files)
    assert len({mutated(random.Random(str(i)), files) for i in range(50)}) > 40
