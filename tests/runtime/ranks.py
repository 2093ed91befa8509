"""Runs functions on N gloo ranks: one pool of processes serves every test of a session, in groups of 1 to 4 ranks."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import queue
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.patience import COLLECTIVE, PATIENCE, RANKS

MOST = 4
#: Its processes are forked from one that has imported what they need. `use_deterministic_algorithms` imports inductor.
CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch._inductor.config", "tests.runtime.train", "transformers.trainer"])


def _work(rank: int, most: int, folder: Path, tasks: Any, results: Any) -> None:
    gc.freeze()  # what is imported stays; else the tests that collect would go through all of it
    faulthandler.register(signal.SIGUSR1, (folder / f"stacks{rank}").open("w"))
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    limit = timedelta(seconds=COLLECTIVE)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=most, timeout=limit)
    groups = {n: dist.new_group(list(range(n))) for n in range(1, most + 1)}
    while (task := tasks.get()) is not None:
        gc.collect()
        gc.freeze()  # what earlier tests imported, too
        count, function, args = task
        if rank >= count:
            continue
        torch.manual_seed(0)  # what it draws does not depend on the tests before it
        try:
            results.put((rank, True, function(groups[count], *args)))
        except BaseException:
            results.put((rank, False, traceback.format_exc()))
    os._exit(0)  # groups of unequal members have nothing to agree on


class RankPool:
    """Worker processes, started once. After a failure the pool is replaced, since ranks may wait for each other.

    Args:
        most: their number, and that of the ranks in the default process group, which tools of others use.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._processes: list[Any] = []

    def _start(self) -> None:
        self._results = CONTEXT.Queue()
        self._tasks = [CONTEXT.Queue() for _ in range(self._most)]
        self._folder = Path(tempfile.mkdtemp())
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        for rank in range(self._most):
            process = CONTEXT.Process(
                target=_work, args=(rank, self._most, self._folder, self._tasks[rank], self._results), daemon=True
            )
            process.start()
            self._processes.append(process)

    def run(self, count: int, function: Callable[..., Any], *args: Any, timeout: float = RANKS) -> list[Any]:
        """What ``function(group, *args)`` returns on each of `count` ranks, in order.

        Raises:
            AssertionError: with the traceback of the rank that failed first, the rank whose process has ended, or where the
                ranks hang when `timeout` seconds have passed.
        """
        if not self._processes:
            self._start()
        for tasks in self._tasks:
            tasks.put((count, function, args))
        results: dict[int, Any] = {}
        end = time.monotonic() + timeout
        while len(results) < count:
            ended = [rank for rank, process in enumerate(self._processes[:count]) if not process.is_alive()]
            try:
                # What a rank said before it ended has been sent by then, or never is.
                rank, well, value = self._results.get(timeout=1)
            except queue.Empty:
                silent = [rank for rank in range(count) if rank not in results]
                if dead := [rank for rank in silent if rank in ended]:
                    self._fail("; ".join(f"rank {rank} ended with exit code {self._processes[rank].exitcode}" for rank in dead))
                if time.monotonic() > end:
                    self._fail(f"ranks {silent} did not answer within {timeout:g} s\n{self._stacks(silent)}")
                continue
            if not well:
                self._fail(f"rank {rank} failed:\n{value}")
            results[rank] = value
        return [results[rank] for rank in range(count)]

    def _fail(self, why: str) -> None:
        self.stop()
        raise AssertionError(why)

    def _stacks(self, ranks: Iterable[int]) -> str:
        """Where the threads of these ranks are."""
        files = {rank: self._folder / f"stacks{rank}" for rank in ranks}
        for rank in files:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        end, before = time.monotonic() + PATIENCE, [-1]
        while time.monotonic() < end:  # until each has written, and nothing comes any more
            sizes = [file.stat().st_size if file.exists() else 0 for file in files.values()]
            if all(sizes) and sizes == before:
                break
            before = sizes
            time.sleep(0.5)
        return "\n".join(f"rank {rank}:\n{file.read_text()}" for rank, file in files.items() if file.exists())

    def stop(self) -> None:
        """Ends the workers."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes = []
