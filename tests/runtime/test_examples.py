"""The examples run as their pages say, and learn."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]


Output = Callable[..., str]


def losses_in(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss ([0-9.]+)", text)]


def rows_in(text: str) -> list[tuple[str, str]]:
    """Plan and measurement in the last lines, a row for each place."""
    words = [line.split()[-4:] for line in text.splitlines()[-4:]]  # value and unit, twice
    return [(" ".join(row[:2]), " ".join(row[2:])) for row in words]


def one_after_another(runs: list[list[str]]) -> str:
    """A program that runs examples in one process, each as a script; a line before each tells them apart."""
    head = f"import runpy, sys\nsys.path.insert(0, {str(ROOT / 'examples')!r})\n"
    return head + f"for sys.argv in {runs!r}:\n    print('==')\n    runpy.run_path(sys.argv[0], run_name='__main__')"


@pytest.fixture
def output(warm_python: Path) -> Output:
    """What an example prints, run by ``python`` or ``torchrun``."""

    def run(*words: str, ranks: int = 1) -> str:
        start = [warm_python] if ranks == 1 else [warm_python.with_name("torchrun"), f"--nproc-per-node={ranks}"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [*start, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.slow
@pytest.mark.torch
def test_causal_lm_on_two_ranks(output: Output, tmp_path: Path) -> None:
    said = output("examples/causal_lm.py", "--stage", "3", "--steps", "50", "--save", str(tmp_path), ranks=2)
    losses = losses_in(said)
    planned, measured = rows_in(said)[0]
    assert planned == measured != "0 B"
    assert said.count("plan: ") == 1  # the first rank's
    assert losses[0] > 4.7  # ln 128 is 4.85
    assert losses[-1] < 3
    assert (tmp_path / "checkpoint" / "latest").read_text() == "global_step50"
    assert (tmp_path / "model" / "model.safetensors").exists()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.torch
def test_tensor_parallel_on_four_ranks(output: Output) -> None:
    said = output("examples/tensor_parallel.py", "--steps", "14", ranks=4)
    losses = losses_in(said)
    planned, measured = rows_in(said)[0]
    assert planned == measured != "0 B"
    assert losses[0] > 5  # ln 256 is 5.55
    assert losses[-1] < 4


@pytest.mark.slow
def test_sentiment(output: Output) -> None:
    said = output("examples/sentiment.py", "--small", "--stage", "1", "--steps", "40", "--dtype", "fp32")
    losses = losses_in(said)
    assert losses[-1] < 0.4 < losses[0]
    planned, measured = rows_in(said)[0]
    assert planned == measured != "0 B"


@pytest.mark.long
@pytest.mark.torch
def test_states_of_more_than_four_times_the_allowance(output: Output, tmp_path: Path) -> None:
    """The example itself ends with an error when more was taken than allowed. Its last lines are as planned."""
    words = ["examples/larger_than_gpu.py", "--steps", "16"]
    runs = [words, [*words, "--nvme", str(tmp_path), "--nvme-params", "--checkpointing"]]
    both = output("-c", one_after_another(runs))
    said_each = both.split("==\n")[1:]
    assert len(said_each) == 2
    for said in said_each:
        losses = losses_in(said)
        assert losses[-1] < losses[0] - 0.5
        rows = rows_in(said)
        assert all(planned == measured for planned, measured in rows)
        assert rows[0] != rows[1]


@pytest.mark.long
@pytest.mark.torch
def test_the_examples_of_tasks_print_plan_beside_measurement(output: Output) -> None:
    """Each learns, and what the runtime keeps is as planned; all in one process. Of minGPT the plans of a post come first."""
    names = ("gpt2_pretraining", "cifar10", "translation", "mingpt")
    runs = [[f"examples/{name}.py", "--tiny", "--steps", "20"] for name in names]
    runs[-1][1:2] = ["--size", "tiny"]
    said_each = output("-c", one_after_another(runs)).split("==\n")[1:]
    assert len(said_each) == len(names)
    for name, said in zip(names, said_each, strict=True):
        losses = losses_in(said)
        assert losses[-1] < losses[0] - 0.5, name
        rows = rows_in(said)
        assert all(planned == measured for planned, measured in rows), said
        assert rows[0][0] != "0 B", name
    ddp, stage3, *_ = (line.replace(",", "").split() for line in said_each[-1].splitlines()[2:6])
    assert 0.95 < int(ddp[-3]) / int(ddp[-2]) < 1.0  # reserved beside what the post reports
    assert int(stage3[-5]) > 3 * int(stage3[-2])  # the states alone


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.torch
def test_lightning_by_an_import_and_a_name(output: Output, tmp_path: Path) -> None:
    words = ["examples/lightning_sentiment.py", "--small", "--epochs", "2", "--strategy", "zeroplan_stage_3"]
    said = output(*words, "--save", str(tmp_path))
    assert losses_in(said)[-1] < 0.66
    planned, measured = rows_in(said[: said.index("zeroplan_stage_3:")])[0]
    assert planned == measured != "0 B"
    assert [file.name for file in tmp_path.iterdir()] == ["epoch=1-step=56.ckpt"]


@pytest.mark.slow
@pytest.mark.torch
def test_transformers_trainer(output: Output, tmp_path: Path) -> None:
    said = output("examples/hf_trainer.py", "--stage", "3", "--offload", "--steps", "30", "--output", str(tmp_path))
    assert losses_in(said)[-1] < 4
    assert "zeroplan: Needs 1.3 GiB" in said  # the runtime's plan: DeepSpeed's buckets alone would take more
    assert "zeroplan: plan beside measurement" in said
    assert (tmp_path / "model.safetensors").is_file()
