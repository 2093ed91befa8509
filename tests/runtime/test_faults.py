"""A rank that dies or hangs ends the job, and the message names it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

_RANKS = 3
#: Imports once, then is forked: each child is a rank that ends as a script does. Prints how ranks 0 and 2 ended.
_JOB = """
import os, signal, sys, time
sys.path[:0] = [{root!r}]
import torch
import torch._dynamo  # else each rank imports it for its optimizer
torch.set_num_threads(1)
import zeroplan_runtime
from tests.runtime import models
from tests.runtime.train import ds_config

def train():
    config = ds_config(3, zeroplan={{"timeout": {timeout}}}, zero_optimization={zero})
    engine, *_ = zeroplan_runtime.initialize(model=models.make(), config=config)
    for number in range(1000):
        if engine.global_rank == 1 and number == 5:
            time.sleep(1.5)  # long enough to have been seen alive
            {fault}
        loss = engine(models.batch(number, 0, engine.global_rank))
        engine.backward(loss)
        engine.step()

ranks = []
for rank in range({ranks}):
    ranks.append(os.fork())
    if not ranks[-1]:
        log = os.open({folder!r} + f"/log{{rank}}", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ["RANK"] = str(rank)
        train()
        sys.exit()
print(*(os.waitstatus_to_exitcode(os.waitpid(ranks[rank], 0)[1]) for rank in (0, 2)))
os.kill(ranks[1], signal.SIGKILL)
"""


def run_job(tmp_path: Path, fault: str, timeout: float, **zero: Any) -> tuple[int, str, float]:
    """Three ranks without a launcher that would kill the others: each must end by itself.

    Args:
        fault: what becomes of rank 1 in the sixth step.
        timeout: the runtime's, in seconds.
        zero: more of the section ``zero_optimization``.

    Returns:
        The smaller of the others' exit codes (0, if they do not end), what all wrote, and the seconds it took.
    """
    script = tmp_path / "job.py"
    root = str(Path(__file__).resolve().parents[2])
    script.write_text(_JOB.format(root=root, fault=fault, timeout=timeout, zero=zero, ranks=_RANKS, folder=str(tmp_path)))
    variables = {"WORLD_SIZE": str(_RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_port()), "OMP_NUM_THREADS": "1"}
    begin = time.monotonic()
    job = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
        start_new_session=True,
    )
    try:
        codes = [int(code) for code in job.communicate(timeout=90)[0].split()]
    except subprocess.TimeoutExpired:
        codes = [0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    text = "".join((tmp_path / f"log{rank}").read_text() for rank in range(_RANKS))
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
    assert "rank 1 is dead: its process" in text
    assert "rank 2 is dead" not in text.split("rank 0 could not")[-1].splitlines()[0]


@pytest.mark.slow
def test_a_rank_that_hangs_is_named(tmp_path: Path) -> None:
    code, text, took = run_job(tmp_path, "time.sleep(1000)", 4)
    assert code == 75
    assert "has waited 4 s in" in text
    assert "rank 1 is behind, in the optimizer's step, step 5, outside the engine since" in text
    assert took < 60
