"""A rank that dies beside a working host, and a process that is killed in the middle of a step on files."""

from __future__ import annotations

import contextlib
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import zeroplan_runtime
from tests.patience import PATIENCE
from tests.runtime import models
from tests.runtime.forked_jobs import Job, run_job
from tests.runtime.ranks import CONTEXT
from tests.runtime.test_faults import KILL
from tests.runtime.train import ds_config
from zeroplan_runtime.offload.swap_file import SwapFile


def train(folder: Path, mode: str, tell: Connection) -> None:
    """Eight steps on files, saved after four. `mode`: "whole", "kill" in the middle of the seventh, or "resume"."""
    config = ds_config(3, "bf16", zeroplan={"nvme_in_memory": True})
    disk = {"device": "nvme", "nvme_path": str(folder)}
    config["zero_optimization"] |= {"offload_optimizer": disk, "offload_param": {**disk, "max_in_cpu": 0}}
    engine, *_ = zeroplan_runtime.initialize(model=models.make(), config=config, device="cpu")
    if mode == "resume":
        tell.send(("folders", len(list(folder.glob("zeroplan_swap_*")))))
        engine.load_checkpoint(folder / "saved")
    while engine.global_steps < 8:
        if mode == "kill" and engine.global_steps == 6:
            _kill_at_write(17)
        loss = engine.backward(engine(models.batch(engine.global_steps, 0, 0)))
        engine.step()
        if engine.global_steps > 4:
            tell.send((engine.global_steps, loss.item()))
        if engine.global_steps == 4 and mode != "resume":
            engine.save_checkpoint(folder / "saved")
    engine.destroy()


def _kill_at_write(last: int) -> None:
    """A step writes 48 blocks, so that then some units are written, one is on its way and some are not begun."""
    written, write = [], SwapFile.write

    def count(*args: Any, **keys: Any) -> Any:
        written.append(args)
        if len(written) == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(*args, **keys)

    SwapFile.write = count


def job(folder: Path, mode: str) -> tuple[int | None, list[tuple[Any, float]]]:
    """The exit code of a process that trains, and what it told."""
    folder.mkdir(exist_ok=True)
    listen, tell = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=train, args=(folder, mode, tell))
    process.start()
    tell.close()
    process.join(PATIENCE)
    told = []
    with contextlib.suppress(EOFError):
        while True:
            told.append(listen.recv())
    return process.exitcode, told


@pytest.mark.long
def test_killed_in_the_middle_of_a_step_on_files_and_resumed(tmp_path: Path) -> None:
    code, whole = job(tmp_path / "whole", "whole")
    assert code == 0
    assert [step for step, _ in whole] == [5, 6, 7, 8]
    code, begun = job(tmp_path / "cut", "kill")
    assert code == -signal.SIGKILL
    assert begun == whole[:2]
    assert len(list((tmp_path / "cut").glob("zeroplan_swap_*"))) == 1  # left over
    code, resumed = job(tmp_path / "cut", "resume")
    assert code == 0
    assert resumed == [("folders", 1), *whole]  # its own: the one left over is gone
    assert list((tmp_path / "cut").glob("zeroplan_swap_*")) == []


@pytest.mark.long
def test_a_rank_that_dies_is_named_under_offload(tmp_path: Path, warm_python: Path) -> None:
    cpu = {"device": "cpu"}
    job = run_job(warm_python, tmp_path, Job(KILL, 6, zero={"offload_optimizer": cpu, "offload_param": cpu}))
    assert job.code != 0
    assert all("rank 1 is dead: its process" in job.logs[rank] for rank in (0, 2))
