"""Runs functions on N gloo ranks: one pool of processes serves every test of a session, in groups of 1 to 4 ranks."""

from __future__ import annotations

import gc
import os
import queue
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

MOST = 4
#: Its processes are forked from one that has imported what they need. `use_deterministic_algorithms` imports inductor.
CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch._inductor.config", "tests.runtime.train", "transformers.trainer"])


def _work(rank: int, most: int, store: str, tasks: Any, results: Any) -> None:
    gc.freeze()  # what is imported stays; else the tests that collect would go through all of it
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=most, timeout=timedelta(seconds=60))
    groups = {n: dist.new_group(list(range(n))) for n in range(1, most + 1)}
    while (task := tasks.get()) is not None:
        gc.collect()
        gc.freeze()  # what earlier tests imported, too
        count, function, args = task
        if rank >= count:
            continue
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
        store = os.path.join(tempfile.mkdtemp(), "store")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        for rank in range(self._most):
            process = CONTEXT.Process(
                target=_work, args=(rank, self._most, store, self._tasks[rank], self._results), daemon=True
            )
            process.start()
            self._processes.append(process)

    def run(self, count: int, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
        """What ``function(group, *args)`` returns on each of `count` ranks, in order.

        Raises:
            AssertionError: with the traceback of the rank that failed first, or when `timeout` seconds have passed.
        """
        if not self._processes:
            self._start()
        for tasks in self._tasks:
            tasks.put((count, function, args))
        results: dict[int, Any] = {}
        while len(results) < count:
            try:
                rank, well, value = self._results.get(timeout=timeout)
            except queue.Empty:
                self.stop()
                raise AssertionError(f"ranks {sorted(set(range(count)) - set(results))} did not answer") from None
            if not well:
                self.stop()
                raise AssertionError(f"rank {rank} failed:\n{value}")
            results[rank] = value
        return [results[rank] for rank in range(count)]

    def stop(self) -> None:
        """Ends the workers."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes = []
