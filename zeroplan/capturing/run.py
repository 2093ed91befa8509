"""Starts the captured process, and returns what it hands over."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from zeroplan.capturing.command import Start, as_text, start_of
from zeroplan.capturing.machine import Job, PlannedCard, World
from zeroplan.capturing.result import Captured, Stop, of_data
from zeroplan.capturing.source import CodeLine, is_users
from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.gpus import Gpu
from zeroplan.tape.sizes import KernelDevice

#: Variables that set the caching allocator up, the newer first.
_ALLOC_CONF = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
#: Seconds beyond the script's own that the process may take to write its answer.
_GRACE = 60.0


def capture_command(
    words: Sequence[str],
    cluster: Cluster,
    *,
    explicit_gpus: bool = False,
    steps: int = 3,
    rank: int = 0,
    seconds: float = 600.0,
    samples: tuple[int, int] | None = None,
) -> tuple[Captured, Cluster]:
    """Run a command without its GPUs; returns what was captured, and the machine with the launcher's ranks.

    Args:
        explicit_gpus: whether the number of GPUs is the user's word, which the launcher may not contradict.
        steps: optimizer steps.
        seconds: the longest that the script may take.
        samples: rows and their length in tokens, which stand for data that is missing.

    Raises:
        BadInput: a command that starts no Python program, or contradicts the machine.
    """
    if importlib.util.find_spec("torch") is None:
        raise BadInput("needs torch, which the script needs as well", where="capture", remedy="pip install 'zeroplan[torch]'")
    start = start_of(words)
    if not start.module and not Path(start.folder, start.target).is_file():
        place = f"from {start.folder}, where the command runs" if start.folder else "from this folder"
        raise BadInput("there is no such script", where=start.target, remedy=f"give the path as {place}")
    world = _world(start, cluster, explicit_gpus=explicit_gpus, rank=rank)
    if start.launcher:
        sized = cluster.resized(world.local_size) if cluster.assumes_host else cluster
        cluster = replace(sized, gpus=world.local_size, nodes=world.nodes)
    with _folder() as folder:
        answer = os.path.join(folder, "answer.json")
        job = Job(
            start.target, start.module, start.given(world.local_rank), start.launcher in ("torchrun", "deepspeed"),
            dict(start.environment), planned_card(cluster.gpu, cluster), cluster.gpus, world, steps, seconds, folder, answer,
            start.launcher, start.launch_words, samples,
        )  # fmt: skip
        path = os.path.join(folder, "job.json")
        Path(path).write_text(json.dumps(asdict(job)), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "zeroplan.capturing.child", path]  # no file of this folder for torch's imports
        home = str(Path(__file__).resolve().parents[2])
        environment = {**os.environ, **start.environment}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (environment.get("PYTHONPATH"), home)))
        why = ""
        try:
            done = subprocess.run(
                command, stdout=2, env=environment, cwd=start.folder or None, timeout=seconds + _GRACE, check=False
            )
            why = f"the process ended with exit code {done.returncode}" if done.returncode else ""
            if done.returncode == errno.ENOSPC:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except subprocess.TimeoutExpired:
            why = f"the script took longer than {seconds:.0f} s (--seconds), without coming back to torch"
        if os.path.isfile(answer):
            captured = of_data(json.loads(Path(answer).read_text(encoding="utf-8")), "capture")
        else:
            at = _died_at(job.fault) or CodeLine(start.target, 0)
            captured = Captured(stopped=Stop(at.file, at.line, why or "the process ended without an answer"))
    captured.command = as_text(words)
    said = {**os.environ, **start.environment}
    captured.machine["alloc_conf"] = next((said[name] for name in _ALLOC_CONF if said.get(name)), "")
    return captured, cluster


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """A temporary folder for all that a capture writes.

    Raises:
        BadInput: there is none, or it is full.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="zeroplan-capture-") as folder:
            yield folder
    except OSError as error:
        raise BadInput(
            f"the temporary folder cannot be written: {error.strerror or error}",
            where="capture",
            remedy="set TMPDIR to a folder with room",
        ) from None


def _died_at(path: str) -> CodeLine | None:
    """The innermost line of the person's code as Python noted it of a process that died; None where it noted none."""
    text = Path(path).read_text(encoding="utf-8", errors="replace") if os.path.isfile(path) else ""
    lines = [CodeLine(file, int(line)) for file, line in re.findall(r'File "([^"]+)", line (\d+)', text)]
    return next((one for one in lines if is_users(one.file)), None)


def planned_card(gpu: Gpu, cluster: Cluster) -> PlannedCard:
    """Return what a script finds out about the GPU of a machine."""
    name = f"NVIDIA {gpu.name}"
    return PlannedCard(name, cluster.vram or gpu.memory, gpu.capability, KernelDevice.of(gpu).multiprocessors, gpu.workspace)


def _world(start: Start, cluster: Cluster, *, explicit_gpus: bool, rank: int) -> World:
    """The processes of a command on a machine.

    Raises:
        BadInput: a launcher that starts others than the machine's GPUs, or a rank that there is none of.
    """
    local = start.local_ranks if start.local_ranks is not None else cluster.gpus
    nodes = start.nodes if start.nodes is not None else cluster.nodes
    if explicit_gpus and start.launcher and local != cluster.gpus:
        raise BadInput(
            f"{start.launcher} starts {local} processes a node, the flag says {cluster.gpus} GPUs",
            where="--gpus",
            remedy="change one of the two",
        )
    if cluster.nodes > 1 and nodes != cluster.nodes:
        raise BadInput(
            f"{start.launcher} starts {nodes} nodes, the flag says {cluster.nodes}",
            where="--nodes",
            remedy="change one of the two",
        )
    world = World(rank, local * nodes, local, nodes) if start.launcher else World()
    if not 0 <= rank < world.size:
        raise BadInput(f"there is no rank {rank} of {world.size}", where="--rank", remedy=f"give 0 to {world.size - 1}")
    return world
