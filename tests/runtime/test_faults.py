"""A rank that dies or hangs ends the job, and the message names it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

_JOB = """
import os, signal, sys, time
sys.path[:0] = [{root!r}]
import torch
torch.set_num_threads(1)
import zeroplan_runtime
from tests.runtime import models
from tests.runtime.train import ds_config
config = ds_config(3, zeroplan={{"timeout": {timeout}}}, zero_optimization={zero})
engine, *_ = zeroplan_runtime.initialize(model=models.make(), config=config)
for number in range(1000):
    if engine.global_rank == 1 and number == 5:
        time.sleep(1.5)  # long enough to have been seen alive
        {fault}
    loss = engine(models.batch(number, 0, engine.global_rank))
    engine.backward(loss)
    engine.step()
"""


def run_job(tmp_path: Path, fault: str, timeout: float, **zero: Any) -> tuple[int, str, float]:
    """Three ranks without a launcher that would kill the others: each must end by itself. `zero`: more of that section."""
    script = tmp_path / "job.py"
    root = str(Path(__file__).resolve().parents[2])
    script.write_text(_JOB.format(root=root, fault=fault, timeout=timeout, zero=zero))
    ranks, logs, port = [], [], str(_port())
    for rank in range(3):
        variables = {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        log = open(tmp_path / f"log{rank}", "w+")  # noqa: SIM115
        logs.append(log)
        environment = {**os.environ, **variables, "OMP_NUM_THREADS": "1"}
        ranks.append(subprocess.Popen([sys.executable, str(script)], stderr=log, stdout=log, env=environment))
    begin = time.monotonic()
    codes = []
    for process in (ranks[0], ranks[2]):
        try:
            codes.append(process.wait(90))
        except subprocess.TimeoutExpired:
            codes.append(0)
    for process in ranks:
        process.kill()
        process.wait()
    text = ""
    for log in logs:
        log.seek(0)
        text += log.read()
        log.close()
    return min(map(abs, codes)), text, time.monotonic() - begin


def _port() -> int:
    """A free one, below those that the system hands out by itself meanwhile."""
    for port in range(20000 + os.getpid() % 10000, 32768):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    raise OSError("no free port")


@pytest.mark.slow
def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    code, text, _ = run_job(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", 60)
    assert code != 0
    assert "RankLost" in text
    assert "rank 1 is dead or stopped (last seen in" in text
    assert "rank 2 is dead" not in text.split("rank 0 could not")[-1].splitlines()[0]


@pytest.mark.slow
def test_a_rank_that_hangs_is_named(tmp_path: Path) -> None:
    code, text, took = run_job(tmp_path, "time.sleep(1000)", 4)
    assert code == 75
    assert "has waited 4 s in" in text
    assert "rank 1 is behind, in the optimizer's step, step 5, outside the engine since" in text
    assert took < 60
