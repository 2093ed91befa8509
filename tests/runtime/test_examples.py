"""The examples run as their pages say, and learn."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


Output = Callable[..., str]


def losses_in(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss ([0-9.]+)", text)]


@pytest.fixture
def output(warm_python: Path) -> Output:
    """What an example prints, run by ``python`` or ``torchrun``."""

    def run(*words: str, ranks: int = 1) -> str:
        start = [warm_python] if ranks == 1 else [warm_python.with_name("torchrun"), f"--nproc-per-node={ranks}"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [*start, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.slow
@pytest.mark.torch
def test_causal_lm_on_two_ranks(output: Output, tmp_path: Path) -> None:
    losses = losses_in(output("examples/causal_lm.py", "--stage", "3", "--steps", "50", "--save", str(tmp_path), ranks=2))
    assert losses[0] > 4.7  # ln 128 is 4.85
    assert losses[-1] < 3
    assert (tmp_path / "checkpoint" / "latest").read_text() == "global_step50"
    assert (tmp_path / "model" / "model.safetensors").exists()


@pytest.mark.slow
def test_sentiment(output: Output) -> None:
    losses = losses_in(output("examples/sentiment.py", "--small", "--stage", "1", "--steps", "60", "--dtype", "fp32"))
    assert losses[-1] < 0.4 < losses[0]


@pytest.mark.long
@pytest.mark.torch
def test_states_of_more_than_four_times_the_allowance(output: Output, tmp_path: Path) -> None:
    """The example itself ends with an error when more was taken than allowed. Its last lines are as planned."""
    words = ["examples/larger_than_gpu.py", "--steps", "16"]
    runs = [words, [*words, "--nvme", str(tmp_path), "--nvme-params", "--checkpointing"]]
    both = output("-c", f"import runpy, sys\nfor sys.argv in {runs!r}:\n    runpy.run_path(sys.argv[0], run_name='__main__')")
    said_each = both.split("states: ")[1:]
    assert len(said_each) == 2
    for said in said_each:
        losses = losses_in(said)
        assert losses[-1] < losses[0] - 0.5
        rows = [line.split()[-4:] for line in said.splitlines()[-4:]]  # value and unit, twice
        assert all(row[:2] == row[2:] for row in rows)
        assert rows[0] != rows[1]


@pytest.mark.slow
@pytest.mark.torch
def test_lightning_by_an_import_and_a_name(output: Output, tmp_path: Path) -> None:
    words = ["examples/lightning_sentiment.py", "--small", "--epochs", "2", "--strategy", "zeroplan_stage_3"]
    said = output(*words, "--save", str(tmp_path))
    assert losses_in(said)[-1] < 0.66
    assert [file.name for file in tmp_path.iterdir()] == ["epoch=1-step=56.ckpt"]


@pytest.mark.slow
@pytest.mark.torch
def test_transformers_trainer(output: Output, tmp_path: Path) -> None:
    said = output("examples/hf_trainer.py", "--stage", "3", "--offload", "--steps", "30", "--output", str(tmp_path))
    assert losses_in(said)[-1] < 4
    assert (tmp_path / "model.safetensors").is_file()
