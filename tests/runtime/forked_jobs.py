"""Jobs of a few ranks without a launcher that would end them: ``python -m tests.runtime.forked_jobs JOB PORT`` forks the ranks.

A rank ends as a script does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
RANKS = 3


@dataclass(frozen=True)
class Job:
    """What the ranks do, three where nothing else is said.

    Attributes:
        fault: code that the victim runs in the sixth step.
        timeout: the runtime's from the sixth step on, in seconds. Before, a rank may be late.
        victim: a rank.
        act: code that all ranks run then; if any, they have saved a checkpoint two steps before.
        zero: more of the section ``zero_optimization``.
        ranks: their number.
        device: ``cpu``, over gloo, or ``cuda``, one GPU a rank over NCCL.
        tp: all of them share the matrices.
    """

    fault: str
    timeout: float
    victim: int = 1
    act: str = ""
    zero: dict[str, Any] = field(default_factory=dict)
    ranks: int = RANKS
    device: str = "cpu"
    tp: bool = False


@dataclass(frozen=True)
class Ended:
    """How a job ended.

    Attributes:
        folder: where it ran.
        code: the smallest of the surviving ranks' exit codes, 0 if they did not end.
        logs: what each rank wrote.
        took: seconds from the fault to the survivors' last word.
    """

    folder: Path
    code: int
    logs: list[str]
    took: float


_ports = count(20000 + 37 * os.getpid() % 10000)  # two workers have neighbouring ids


_ours: list[socket.socket] = []  # a name for each port that was given, which no other test process can then take


def free_port() -> int:
    """A free one, below those that the system hands out by itself meanwhile, and another with each call on this machine."""
    for port in _ports:
        ours = socket.socket(socket.AF_UNIX)
        with socket.socket() as probe:
            try:
                ours.bind(f"\0zeroplan tests port {port}")
                probe.bind(("", port))
            except OSError:
                ours.close()
                continue
        _ours.append(ours)
        return port
    raise AssertionError


def run_job(python: Path, folder: Path, job: Job) -> Ended:
    """Run the job in an empty folder, and leave nothing of it running."""
    folder.mkdir(exist_ok=True)
    command = [python, "-m", "tests.runtime.forked_jobs", json.dumps(asdict(job)), str(free_port())]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, timeout=PATIENCE, check=False)
    codes = folder / "codes"
    ended = [int(code) for code in codes.read_text().split()] if codes.exists() else [0]
    with contextlib.suppress(ProcessLookupError):
        os.killpg(int((folder / "group").read_text()), signal.SIGKILL)
    logs = [folder / f"log{rank}" for rank in range(job.ranks)]
    assert (folder / "begun").exists(), "\n".join(log.read_text() for log in logs if log.exists())
    said = max(log.stat().st_mtime for rank, log in enumerate(logs) if rank != job.victim)
    return Ended(folder, min(map(abs, ended)), [log.read_text() for log in logs], said - (folder / "begun").stat().st_mtime)


def _run_ranks(job: Job, port: str) -> None:
    """Fork the ranks; write how the ranks but the victim ended, then end the victim."""
    os.setsid()
    Path("group").write_text(str(os.getpid()))
    os.environ |= {"WORLD_SIZE": str(job.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks: list[int] = []
    for rank in range(job.ranks):
        ranks.append(os.fork())
        if not ranks[-1]:
            log = os.open(f"log{rank}", os.O_CREAT | os.O_WRONLY)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
            _train(job)
            sys.exit()
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for rank, pid in enumerate(ranks) if rank != job.victim]
    Path("codes.part").write_text(" ".join(map(str, codes)))
    Path("codes.part").rename("codes")
    os.kill(ranks[job.victim], signal.SIGKILL)


def _train(job: Job) -> None:
    import torch

    import zeroplan_runtime
    from tests.runtime import models
    from tests.runtime.train import ds_config
    from zeroplan_runtime import watchdog

    config = ds_config(3, zeroplan={"timeout": PATIENCE}, zero_optimization=job.zero)
    with mock.patch.object(watchdog, "LONGEST_INTERVAL", min(watchdog.LONGEST_INTERVAL, job.timeout / 8)):
        engine, *_ = zeroplan_runtime.initialize(config=config, device=job.device, **_model(job))
    names = {"engine": engine, "torch": torch, "os": os, "signal": signal, "time": time}
    for number in range(1000):
        if number == 3 and job.act:
            engine.save_checkpoint("checkpoints")
        if number == 4:
            while len(engine.activity.watchdog._processes) < job.ranks:  # until it has seen all of them alive
                time.sleep(0.05)
        if number == 5:
            engine.activity.watchdog._timeout = job.timeout
            if engine.global_rank == job.victim:
                Path("begun").touch()
                exec(job.fault, names)
            exec(job.act, names)
        loss = engine(models.batch(number, 0, 0 if job.tp else engine.global_rank).to(engine.device))
        engine.backward(loss)
        engine.step()


def _model(job: Job) -> dict[str, Any]:
    """The model, and the mesh over which it is split."""
    from tests.runtime import models

    if not job.tp:
        return {"model": models.make()}
    import torch.distributed as dist

    from tests.runtime.mesh_jobs import split
    from tests.runtime.mesh_training import mesh_of

    dist.init_process_group("gloo")
    mesh, model = mesh_of(tp=job.ranks), models.make(odd=False)
    split(model, mesh)
    return {"model": model, "mesh": mesh}


if __name__ == "__main__":
    _run_ranks(Job(**json.loads(sys.argv[1])), sys.argv[2])
