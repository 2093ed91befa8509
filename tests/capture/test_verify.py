"""``verify -- COMMAND``: the unchanged command under capture's counting; the GPU is a stand-in here, and real in the trials."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.capture.test_capture import LOOP, capture
from zeroplan.capturing.measuring import Measured, ScriptDrift, measure_command
from zeroplan.core.sizes import MIB

pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("warm_ranks")

#: Lets torch's counters tell of a card on which each part took another number of MiB.
CARD = """
import os, torch
taken = iter([1, 5, 9, 7, 5, 9, 7, 5, 9, 7, 0, 0, 0, 0])
peak = 0
def most():
    global peak
    now = next(taken) << 20
    peak = max(peak, now)
    return now
torch.cuda.is_initialized = lambda: True
torch.cuda.max_memory_allocated = most
torch.cuda.max_memory_reserved = lambda: peak + (2 << 20)
torch.cuda.memory_reserved = lambda: peak + (2 << 20)
torch.cuda.reset_peak_memory_stats = lambda: None
torch.cuda.memory_stats = lambda: {"num_alloc_retries": 1, "num_ooms": 0}
torch.cuda.mem_get_info = lambda: ((80 << 30) - (511 << 20), 80 << 30)
torch.cuda.get_device_name = lambda: "a stand-in"
"""
ON_CPU = LOOP.replace('.to("cuda")', "").replace(', device="cuda"', "")


def run(tmp_path: Path, code: str, **options: Any) -> Measured:
    """Measure a script."""
    script = tmp_path / "train.py"
    script.write_text(CARD + code)
    return measure_command([sys.executable, str(script)], lambda: None, **options)


def test_each_part_of_an_unchanged_loop_is_measured(tmp_path: Path) -> None:
    found = run(tmp_path, ON_CPU + "open(__file__ + '.written', 'w').close()\n")
    assert (found.code, found.steps, found.retries) == (0, 3, 1)
    assert (found.allocated, found.reserved, found.outside) == (9 * MIB, 11 * MIB, 500 * MIB)
    assert {name: count // MIB for name, count in found.phases.items() if count} == {
        "init": 1, "forward": 5, "backward": 9, "step": 7
    }  # fmt: skip
    assert (tmp_path / "train.py.written").exists()


@pytest.mark.long
def test_a_loop_without_end_is_ended_after_its_steps_and_not_a_failure(tmp_path: Path) -> None:
    found = run(tmp_path, ON_CPU.replace("for step in range(3):", "while True:"))
    assert (found.code, found.steps) == (0, 4)
    drawn = "from torch.utils.data import DataLoader\nbatches = (one for one in DataLoader([torch.zeros(1)] * 9))\n"
    by_hand = ON_CPU.replace("for step in range(3):", f"{drawn}while True:\n    next(batches)")
    found = run(tmp_path, by_hand)  # the script's own StopIteration
    assert (found.code, found.steps) == (0, 3)


def test_a_run_out_of_memory_is_one(tmp_path: Path) -> None:
    code = ON_CPU + "raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB')\n"
    found = run(tmp_path, code)
    assert found.code == 1
    assert found.out_of_memory


@pytest.mark.long
def test_a_sitecustomize_of_the_users_own_still_runs(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("import builtins\nbuiltins.theirs = 7\n")
    found = run(tmp_path, "assert theirs == 7\n" + ON_CPU, environment={"PYTHONPATH": str(tmp_path / "own")})
    assert (found.code, found.steps) == (0, 3)


def test_the_plan_stands_beside_the_measurement(tmp_path: Path) -> None:
    _, planned = capture(tmp_path, LOOP)
    peak = planned.report.plans[0].gpu.peak_allocated
    assert peak is not None
    measured = Measured(peak + MIB, peak + 4 * MIB, None, 0, {"step": peak + MIB}, 3, 0, 0, "a card", "2.13")
    drift = ScriptDrift(planned.report, measured, 0.02)
    assert drift.within
    assert json.loads(json.dumps(drift.to_dict()))["measured"]["allocated"] == peak + MIB
    assert ("peak in step", planned.report.plans[0].gpu.phases["step"], peak + MIB) in drift.rows
    assert not ScriptDrift(planned.report, measured, 0.001).within


@pytest.mark.skipif(__import__("torch").cuda.is_available(), reason="a machine with a GPU runs the command")
def test_without_a_gpu_it_is_one_line(cli: Any) -> None:
    code, out, err = cli("verify", "--", *shlex.split("python train.py --epochs 3"))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "there is no GPU here" in err
    assert "--stage" in cli("verify", "--stage", "3", "--", "python", "train.py")[2]
    assert cli("verify", "gpt2", "other")[0] == 2
