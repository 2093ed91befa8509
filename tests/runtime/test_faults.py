"""A rank that dies or hangs ends the job, and the message names it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import zeroplan_runtime
from tests.runtime import models
from tests.runtime.train import ds_config

_RANKS = 3
#: Imports once, then is forked: each child is a rank that ends as a script does. Prints how the ranks but the victim ended.
_JOB = """
import gc, os, signal, sys, time
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
        if number == 3 and {saves}:
            engine.save_checkpoint("checkpoints")
        if number == 5:
            if engine.global_rank == {victim}:
                time.sleep(1.5)  # long enough to have been seen alive
                open("begun", "w").close()
                {fault}
            {act}
        loss = engine(models.batch(number, 0, engine.global_rank))
        engine.backward(loss)
        engine.step()

gc.freeze()  # else each rank goes through all that is imported when it ends
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
print(*(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for rank, pid in enumerate(ranks) if rank != {victim}))
os.kill(ranks[{victim}], signal.SIGKILL)
"""


@dataclass(frozen=True)
class Ended:
    """How a job ended.

    Attributes:
        code: the smallest of the surviving ranks' exit codes, 0 if they did not end.
        logs: what each rank wrote.
        took: seconds from the fault to the survivors' last word.
    """

    code: int
    logs: list[str]
    took: float


def run_job(tmp_path: Path, fault: str, timeout: float, *, victim: int = 1, act: str = "pass", **zero: Any) -> Ended:
    """Three ranks without a launcher that would kill the others: each must end by itself.

    Args:
        fault: what becomes of the victim in the sixth step.
        timeout: the runtime's, in seconds.
        victim: a rank.
        act: what all ranks do then; if anything, they have saved a checkpoint two steps before.
        zero: more of the section ``zero_optimization``.
    """
    script = tmp_path / "job.py"
    root = str(Path(__file__).resolve().parents[2])
    values = {"fault": fault, "timeout": timeout, "zero": zero, "victim": victim, "act": act, "saves": act != "pass"}
    script.write_text(_JOB.format(root=root, ranks=_RANKS, folder=str(tmp_path), **values))
    variables = {"WORLD_SIZE": str(_RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
        cwd=tmp_path,
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
    logs = [tmp_path / f"log{rank}" for rank in range(_RANKS)]
    said = max(log.stat().st_mtime for rank, log in enumerate(logs) if rank != victim)
    took = said - (tmp_path / "begun").stat().st_mtime
    return Ended(min(map(abs, codes)), [log.read_text() for log in logs], took)


def free_port() -> int:
    """A free one, below those that the system hands out by itself meanwhile."""
    for port in range(20000 + os.getpid() % 10000, 32768):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    raise OSError("no free port")


KILL = "os.kill(os.getpid(), signal.SIGKILL)"
SAVE = 'engine.save_checkpoint("checkpoints")'


@pytest.mark.slow
def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    job = run_job(tmp_path, KILL, 6)
    assert job.code != 0
    for rank in (0, 2):
        assert re.search(r"rank 1 is dead: its process \d+ was killed or crashed \(last seen in", job.logs[rank])
        assert not re.search(rf"rank {2 - rank} is dead", job.logs[rank])
    assert job.took < 30


@pytest.mark.slow
def test_a_rank_that_hangs_is_named(tmp_path: Path) -> None:
    job = run_job(tmp_path, "time.sleep(1000)", 4)
    assert job.code == 75
    for rank in (0, 2):
        assert "rank 1 is behind, in the optimizer's step, step 5, outside the engine since" in job.logs[rank]
    assert "has waited 4 s in" in job.logs[0] + job.logs[2]
    assert job.took < 30


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_in_a_save_is_named_and_the_last_good_checkpoint_loads(tmp_path: Path, victim: int) -> None:
    job = run_job(tmp_path, f"torch.save = lambda *_: {KILL}", 6, victim=victim, act=SAVE)
    assert job.code != 0
    for rank in {0, 1, 2} - {victim}:
        assert re.search(rf"rank {rank} .*; .*rank {victim} is dead", job.logs[rank]), job.logs
    assert job.took < 30
    assert sorted(os.listdir(tmp_path / "checkpoints")) == [".global_step5.saving", "global_step3", "latest"]
    engine, *_ = zeroplan_runtime.initialize(model=models.make(), config=ds_config(1), device="cpu")
    assert engine.load_checkpoint(tmp_path / "checkpoints")[0] == str(tmp_path / "checkpoints" / "global_step3")


@pytest.mark.slow
def test_a_rank_that_hangs_in_a_save_or_a_load_is_named(tmp_path: Path) -> None:
    hangs = "lambda *_, **__: time.sleep(1000)"
    for name, act, where in (
        ("save", SAVE, "writing __1_0.distcp of .global_step5.saving, step 5"),
        ("load", 'engine.load_checkpoint("checkpoints")', "loading global_step3, step 5"),
    ):
        (tmp_path / name).mkdir()
        job = run_job(tmp_path / name, f"torch.{name} = {hangs}", 4, act=act)
        assert job.code != 0, job.logs
        for rank in (0, 2):
            assert re.search(rf"rank 1 is (behind,|stuck) in {re.escape(where)}", job.logs[rank]), job.logs
        assert job.took < 30


@pytest.mark.slow
def test_a_read_that_waits_for_ranks_which_do_not_come_is_named(tmp_path: Path) -> None:
    """Where the optimizer is offloaded a read gathers what the step has updated, for which it needs every rank."""
    act = "engine.module.embed.weight.sum() if engine.global_rank == 0 else torch.distributed.barrier()"
    job = run_job(tmp_path, "pass", 4, act=act, stage=1, offload_optimizer={"device": "cpu"})
    assert job.code != 0
    assert "rank 0 has waited 4 s in reading parameter 'embed.weight', step 5; " in job.logs[0]
