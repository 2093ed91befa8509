"""Gloo ranks that are started once and go from case to case; they are replaced when one has hung, crashed, or imported
dynamo, beside which the runtime does some things otherwise.
"""

from __future__ import annotations

import gc
import os
import queue
import shutil
import signal
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.fuzz_training.case import Case
from zeroplan.core.errors import BadInput

MOST = 4
#: Seconds for a case, and for the other ranks when one has failed.
PATIENCE, GRACE = 90.0, 4.0

_CONTEXT = mp.get_context("forkserver")


@dataclass
class Answer:
    """A rank's answer to a case: ``well``, ``refused`` or ``crash``; what it found, or why not."""

    kind: str
    value: Any


def _work(rank: int, store: str, tasks: Any, answers: Any) -> None:
    from benchmarks.fuzz_training.sharded import train

    gc.freeze()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=MOST, timeout=timedelta(seconds=300))
    groups = {n: dist.new_group(list(range(n))) for n in range(1, MOST + 1)}
    answers.put((rank, -1, Answer("well", None)))
    parent = os.getppid()
    while True:
        try:
            number, case, folder, fault = tasks.get(timeout=60)
        except queue.Empty:
            if os.getppid() != parent:
                os._exit(1)
            continue
        try:
            answer = Answer("well", train(groups[case.ranks], case, Path(folder), fault))
        except BadInput as fault:
            answer = Answer("refused", str(fault))
        except BaseException as fault:
            answer = Answer("crash", f"{type(fault).__name__}: {fault}\n{traceback.format_exc()}")
        answers.put((rank, number, answer))
        del answer
        if number % 50 == 0:
            gc.collect()


class Pool:
    """Four ranks, of which a case uses the first few.

    Args:
        fault: that the runtime is given, one of :data:`benchmarks.fuzz_training.faults.FAULTS`; may change between cases.
    """

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self._processes: list[Any] = []
        self._number = 0
        self.starts = 0

    def _start(self) -> None:
        # Not before: all pools of a process share one server, and the tests' has a longer list.
        _CONTEXT.set_forkserver_preload(["torch._inductor.config", "benchmarks.fuzz_training.sharded"])
        self.starts += 1
        self._folder = Path(tempfile.mkdtemp(prefix="fuzz", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
        self._answers = _CONTEXT.Queue()
        self._tasks = [_CONTEXT.Queue() for _ in range(MOST)]
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        for rank in range(MOST):
            arguments = (rank, str(self._folder / "store"), self._tasks[rank], self._answers)
            process = _CONTEXT.Process(target=_work, args=arguments, daemon=True)
            process.start()
            self._processes.append(process)
        for _ in range(MOST):
            self._answers.get(timeout=300)

    def begin(self, case: Case) -> None:
        """Gives `case` to its ranks."""
        if not self._processes:
            self._start()
        self._number += 1
        self._case_folder = self._folder / f"case{self._number}"
        self._case_folder.mkdir()
        self._ranks, self._compiles = case.ranks, bool(case.compiled)
        for tasks in self._tasks[: case.ranks]:
            tasks.put((self._number, case, str(self._case_folder), self.fault))

    def end(self) -> list[Answer]:
        """The ranks' answers; a rank that did not answer has the kind ``hang`` or ``crash``."""
        found: dict[int, Answer] = {}
        deadline = time.monotonic() + PATIENCE
        while len(found) < self._ranks and time.monotonic() < deadline:
            try:
                rank, number, answer = self._answers.get(timeout=0.5)
            except queue.Empty:
                ended = [rank for rank in range(self._ranks) if rank not in found and not self._processes[rank].is_alive()]
                for rank in ended:
                    code = self._processes[rank].exitcode
                    name = signal.Signals(-code).name if code and code < 0 else f"exit code {code}"
                    found[rank] = Answer("crash", f"the process ended: {name}")
                    deadline = min(deadline, time.monotonic() + GRACE)
                continue
            if number != self._number:
                continue
            found[rank] = answer
            if answer.kind != "well":
                deadline = min(deadline, time.monotonic() + GRACE)
        whole = len(found) == self._ranks
        kinds = {answer.kind for answer in found.values()}
        answers = [found.get(rank, Answer("hang", "no answer")) for rank in range(self._ranks)]
        shutil.rmtree(self._case_folder, ignore_errors=True)
        if not whole or len(kinds) > 1 or "crash" in kinds or self._compiles:
            self.stop()
        return answers

    def stop(self) -> None:
        """Ends the ranks."""
        for process in self._processes:
            process.kill()
            process.join()
        if self._processes:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._processes = []
