"""Two nodes, as the command that ``recommend`` prints starts them: they train and save, one dies, others resume."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import zeroplan_runtime
from tests.patience import PATIENCE
from tests.runtime import models
from tests.runtime.forked_jobs import free_port
from tests.runtime.ranks import RankPool
from tests.validate.small import CONFIG
from zeroplan_runtime.kernels import native_backend

ROOT = Path(__file__).resolve().parents[2]
_STEPS = 3
_TRAIN = (
    """
import argparse, os, time
import torch
torch.set_num_threads(1)
import zeroplan_runtime
from tests.runtime import models

parser = argparse.ArgumentParser()
parser.add_argument("--deepspeed_config")
engine, *_ = zeroplan_runtime.initialize(model=models.make(), config=parser.parse_args().deepspeed_config, device="cpu")
with open(f"rank{engine.global_rank}", "w") as file:
    print(os.getpid(), os.environ["NODE"], file=file)
for number in range(1_000_000):
    engine.backward(engine(models.batch(number % 10, 0, 0)))
    engine.step()
    if number == """
    + f"{_STEPS - 1}"
    + """:
        engine.save_checkpoint("checkpoints")
    if len(engine.activity.watchdog._processes) == engine.world_size:
        open(f"knows{engine.global_rank}", "w").close()
    time.sleep(0.01)
"""
)


def command_of(said: str, torchrun: Path) -> list[str]:
    """The printed command; the nodes meet on this machine."""
    found = re.search(r"Start it:\s+(torchrun .*)", said.replace("\\\n", " "))
    assert found is not None, said
    words = shlex.split(found[1].replace("node0:29500", f"localhost:{free_port()}"))
    return [str(torchrun), *words[1:]]


def start_nodes(command: list[str], folder: Path) -> list[subprocess.Popen[bytes]]:
    """Both nodes; the ranks meet at the first one, which is started before the other."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    meeting = int(re.findall(r"localhost:(\d+)", shlex.join(command))[0])
    started = []
    for node in range(2):
        with (folder / f"log{node}").open("wb") as log:
            environment["NODE"] = str(node)
            started.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log))
        wait_for(lambda: answers(meeting), "the first node's rendezvous")
    return started


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) == 0


def wait_for(ready: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not ready():
        assert time.monotonic() < end, f"{what} did not come"
        time.sleep(0.05)


def go_on(group: dist.ProcessGroup, config: dict[str, Any], folder: str | None) -> tuple[int, list[float]]:
    """The losses of the steps after the checkpoint; without one, of a run from the start."""
    engine, *_ = zeroplan_runtime.initialize(model=models.make(9 if folder else 0), config=config, group=group, device="cpu")
    if folder:
        engine.load_checkpoint(folder)
    begun, losses = engine.global_steps, []
    for number in range(begun, 2 * _STEPS):
        losses.append(engine.backward(engine(models.batch(number, 0, 0))).item())
        engine.step()
    return begun, losses[-_STEPS:]


@pytest.mark.long
@pytest.mark.torch
def test_two_nodes_train_and_save_one_dies_and_another_size_and_stage_resume(
    tmp_path: Path, pool: RankPool, cli: Any, warm_python: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "train.py").write_text(_TRAIN)
    written = tmp_path / "ds_config.json"
    words = "--engine zeroplan --gpu H100 --gpus 2 --nodes 2 --micro-batch 1 --seq-len 32 --cpu-ram 512GiB"
    _, said, _ = cli("recommend", str(model), *words.split(), "-o", str(written))
    command = command_of(said, warm_python.with_name("torchrun"))
    assert "--nnodes 2 --nproc-per-node 2" in shlex.join(command)
    nodes = start_nodes(command, tmp_path)
    try:
        wait_for((tmp_path / "checkpoints" / "latest").exists, "the checkpoint")
        ranks = [tuple(map(int, (tmp_path / f"rank{rank}").read_text().split())) for rank in range(4)]
        lost = [(rank, pid) for rank, (pid, node) in enumerate(ranks) if node == 1]
        assert len(lost) == 2
        wait_for(lambda: all((tmp_path / f"knows{rank}").exists() for rank in range(4)), "the ranks' knowledge of each other")
        for pid in (nodes[1].pid, *(pid for _, pid in lost)):
            os.kill(pid, signal.SIGKILL)
        assert nodes[0].wait(PATIENCE) != 0
    finally:
        for node in nodes:
            node.kill()
        for file in tmp_path.glob("rank*"):
            with contextlib.suppress(OSError):
                os.kill(int(file.read_text().split()[0]), signal.SIGKILL)
    text = (tmp_path / "log0").read_text()
    gone = "|".join(str(rank) for rank, _ in lost)
    assert re.search(rf"rank \d .*; rank ({gone}) is dead: its process \d+ was killed", text), text
    config = json.loads(written.read_text())
    del config["train_batch_size"]
    saved = str(tmp_path / "checkpoints")
    expected = pool.run(1, go_on, {**config, "zero_optimization": {"stage": 0}}, None)[0][1]
    for ranks_now, stage in ((1, 1), (3, 2)):
        settings = {**config, "zero_optimization": {"stage": stage}}
        begun, losses = pool.run(ranks_now, go_on, settings, saved)[0]
        assert begun == _STEPS
        assert losses == pytest.approx(expected, abs=2e-2), (ranks_now, stage)


@pytest.mark.slow
@pytest.mark.torch
def test_verify_on_two_nodes(tmp_path: Path, warm_python: Path) -> None:
    """The command of docs/verify.md: one measurement of ranks on two nodes, printed once."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    if native_backend.library() is None:
        pytest.skip("torch's own operations, where they stand in, need temporaries at the peak")
    start = f"--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint localhost:{free_port()} --rdzv-id zeroplan"
    verify = f"-m zeroplan verify {tmp_path} --stage 3 --seq-len 32 --steps 2"
    nodes = start_nodes([str(warm_python.with_name("torchrun")), *start.split(), *verify.split()], tmp_path)
    try:
        ended = [node.wait(PATIENCE) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    text = "".join((tmp_path / f"log{node}").read_text() for node in range(2))
    assert ended == [0, 0], text
    assert text.count("1 of 1 as planned: owned buffers equal") == 1
    assert "2 × cpu (gloo)" in text
