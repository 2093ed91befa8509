"""Runs a function on N ranks that start from one warm process.

Importing torch, transformers and DeepSpeed takes far longer than the steps that a benchmark times. The parent imports them
once, without touching CUDA, and each case runs in ranks forked from it: fresh processes with their own CUDA context, so
that no case inherits another's memory, in a second or two rather than twenty.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

# torch.cuda.is_available() must not create a CUDA context in the parent: no child could use CUDA afterwards.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

#: Seconds that the other ranks get once one has failed.
GRACE = 3.0


def run_ranks(
    function: Callable[[int], Any], ranks: int, *, timeout: float, gpus: list[int] | None = None
) -> list[dict[str, Any]]:
    """`function(rank)` on `ranks` forked processes, whose environment is that of torchrun's.

    Args:
        function: returns what JSON can hold.
        timeout: seconds for all of them.
        gpus: the devices that they may see; all, if left out.

    Returns:
        One dict a rank, in order: ``{"value": …}``, or ``{"fault": …}`` with the exception or signal that ended it.
    """
    if (torch := sys.modules.get("torch")) and torch.cuda.is_initialized():
        raise SystemExit("an import has initialised CUDA, which a forked rank cannot use: leave torchao out, which does so")
    sys.stdout.flush()
    sys.stderr.flush()
    gc.collect()
    with TemporaryDirectory() as folder:
        port = _free_port()
        children = {_fork(function, rank, ranks, port, gpus, Path(folder)): rank for rank in range(ranks)}
        faults = _wait(children, timeout)
        found: list[dict[str, Any]] = []
        for rank in range(ranks):
            file = Path(folder, f"{rank}.json")
            found.append(json.loads(file.read_text()) if file.exists() else {"fault": faults.get(rank, "no answer")})
        return found


def failure(found: list[dict[str, Any]]) -> str | None:
    """The first rank's fault that is not a mere consequence of another's; None when all answered."""
    faults = [answer["fault"] for answer in found if "fault" in answer]
    return min(faults, key=lambda fault: (fault.startswith("ended by signal"), "out of memory" not in fault), default=None)


def _free_port() -> int:
    """Return a port below those that the system hands out by itself: collectives of the case before might take one of them
    meanwhile.
    """
    for port in range(20000 + os.getpid() % 5000, 32768):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no free port below 32768")


def _fork(function: Callable[[int], Any], rank: int, ranks: int, port: int, gpus: list[int] | None, folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    code = 0
    try:
        answer = {"value": function(rank)}
    except BaseException as fault:  # the parent hears of everything
        code, answer = 1, {"fault": f"{type(fault).__name__}: {fault}"[:600]}
        traceback.print_exc()
    (folder / f"{rank}.part").write_text(json.dumps(answer))
    (folder / f"{rank}.part").rename(folder / f"{rank}.json")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # engines' tear-down can hang, and changes nothing measured


def _wait(children: dict[int, int], timeout: float) -> dict[int, str]:
    """Waits for all; once one has failed or time is up, the rest are killed. Says how those without answer ended."""
    deadline, left, faults = time.monotonic() + timeout, dict(children), {}
    while left:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child in left:
            rank = left.pop(child)
            if status:
                deadline = min(deadline, time.monotonic() + GRACE)
            if os.WIFSIGNALED(status):
                faults[rank] = f"ended by signal {os.WTERMSIG(status)}"
        elif time.monotonic() > deadline:
            for child in left:
                os.kill(child, signal.SIGKILL)
            deadline += timeout
        else:
            time.sleep(0.01)
    return faults
