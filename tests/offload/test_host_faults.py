"""A rank that dies beside a working host, and a process that is killed in the middle of a step on files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.test_faults import run_job

ROOT = Path(__file__).resolve().parents[2]

_JOB = """
import os, signal, sys
sys.path[:0] = [{root!r}]
import torch
torch.set_num_threads(1)
import zeroplan_runtime
from tests.runtime import models
from tests.runtime.train import ds_config
folder, mode = sys.argv[1:]
config = ds_config(3, "bf16", zeroplan={{"nvme_in_memory": True}})
disk = {{"device": "nvme", "nvme_path": folder}}
config["zero_optimization"] |= {{"offload_optimizer": disk, "offload_param": {{**disk, "max_in_cpu": 0}}}}
engine, *_ = zeroplan_runtime.initialize(model=models.make(), config=config, device="cpu")
if mode == "resume":
    print("removed", sum(len(folder.removed) for folder in engine.model_states.nvme.folders.values()))
    engine.load_checkpoint(folder + "/saved")
while engine.global_steps < 8:
    if mode == "kill" and engine.global_steps == 6:
        files, seen = engine.model_states.nvme.optimizer_swapper, []
        real = files._group_slices
        def slices(*where):
            seen.append(where)
            if len(seen) == 4:  # some units are written, some are on their way, some are not begun
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*where)
        files._group_slices = slices
    loss = engine.backward(engine(models.batch(engine.global_steps, 0, 0)))
    engine.step()
    if engine.global_steps > 4:
        print("loss", engine.global_steps, loss.item(), flush=True)
    if engine.global_steps == 4 and mode != "resume":
        engine.save_checkpoint(folder + "/saved")
"""


def job(script: Path, folder: Path, mode: str) -> tuple[int, list[str]]:
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), str(folder), mode],
        capture_output=True,
        text=True,
        env=environment,
        timeout=100,
        check=False,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode, done.stdout.splitlines()


@pytest.mark.slow
def test_killed_in_the_middle_of_a_step_on_files_and_resumed(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(_JOB.format(root=str(ROOT)))
    code, whole = job(script, tmp_path / "whole", "whole")
    assert code == 0
    assert len(whole) == 4
    code, begun = job(script, tmp_path / "cut", "kill")
    assert code == -signal.SIGKILL
    assert begun == whole[:2]
    assert len(list((tmp_path / "cut").glob("zeroplan_swap_*"))) == 1  # left over
    code, resumed = job(script, tmp_path / "cut", "resume")
    assert code == 0
    assert resumed == ["removed 1", *whole]
    assert list((tmp_path / "cut").glob("zeroplan_swap_*")) == []


@pytest.mark.slow
def test_a_rank_that_dies_is_named_under_offload(tmp_path: Path) -> None:
    cpu = {"device": "cpu"}
    code, text, took = run_job(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", 60, offload_optimizer=cpu, offload_param=cpu)
    assert code != 0
    assert "RankLost" in text
    assert "rank 1 is dead or stopped (last seen in" in text
    assert took < 60
