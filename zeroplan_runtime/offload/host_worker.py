"""A thread that works beside the model's: updates on the host, in the order in which they were asked for.

The routines it calls (``libzeroplan_cpu``, copies, waits for events) release the interpreter's lock, so the model's thread
goes on issuing work meanwhile. A fault ends the thread's work for good and is raised where its results are waited for.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable

import torch

from zeroplan_runtime.kernels import native_backend


class Task:
    """One job that was asked for."""

    __slots__ = ("_done", "_worker")

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._done = threading.Event()

    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._done.is_set()

    def wait(self) -> None:
        """Returns when the job is done.

        Raises:
            RuntimeError: when it, or a job before it, failed; its cause is the fault.
        """
        self._done.wait()
        if self._worker.fault is not None:
            raise RuntimeError(f"the update on the host failed: {self._worker.fault}") from self._worker.fault

    def finish(self) -> None:
        """Called by the worker."""
        self._done.set()


class Worker:
    """One thread that does jobs in order, with `threads` helpers for the native routines.

    `device` is made the thread's CUDA device.
    """

    def __init__(self, device: torch.device, threads: int) -> None:
        self.fault: BaseException | None = None
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Task] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_serve, args=(weakref.ref(self), self._jobs, device, threads), name="zeroplan-host", daemon=True
        )
        self._thread.start()
        # Also when the interpreter ends: a daemon thread inside a CUDA call would crash it.
        self._end = weakref.finalize(self, _stop, self._jobs, self._thread)

    def submit(self, job: Callable[[], None]) -> Task:
        """Asks for `job`, after all that were asked for before."""
        task = Task(self)
        self._jobs.put((job, task))
        return task

    def close(self) -> None:
        """Waits for what was asked for and ends the thread."""
        self._end()


def _serve(
    owner: weakref.ref[Worker],
    jobs: queue.SimpleQueue[tuple[Callable[[], None], Task] | None],
    device: torch.device,
    threads: int,
) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    native_backend.use_threads(threads)
    broken = False
    while (item := jobs.get()) is not None:
        job, task = item
        try:
            if not broken:
                with torch.no_grad():
                    job()
        except BaseException as fault:
            broken = True
            worker = owner()
            if worker is not None:
                worker.fault = fault
            del worker
        finally:
            task.finish()
        del item, job, task


def _stop(jobs: queue.SimpleQueue[tuple[Callable[[], None], Task] | None], thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join()


def host_threads(cores_share: float) -> int:
    """Threads of one rank's updates: its part of the node's cores, times `cores_share`, and one at least.

    The ranks of a node (``LOCAL_WORLD_SIZE``, as torchrun sets it) share the cores that this process may run on evenly.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, int(cores * cores_share / ranks))
