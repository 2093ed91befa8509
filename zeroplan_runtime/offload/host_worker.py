"""A worker thread that runs the updates on the host, in the order in which they were submitted.

The routines that it calls (``libzeroplan_cpu``, copies, waits for events) release the GIL, so the model's thread issues work
meanwhile. After an exception the worker does nothing more; waiting for a task raises the exception.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable

import torch

from zeroplan_runtime.kernels import native_backend


class HostTask:
    """A function that was submitted to a worker."""

    __slots__ = ("_done", "_worker")

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._done = threading.Event()

    def done(self) -> bool:
        """Returns whether :meth:`wait` would return at once."""
        return self._done.is_set()

    def wait(self) -> None:
        """Blocks until the task is done.

        Raises:
            RuntimeError: when this task or one before it failed; its cause is that exception.
        """
        self._done.wait()
        if self._worker.fault is not None:
            raise RuntimeError(f"the update on the host failed: {self._worker.fault}") from self._worker.fault

    def finish(self) -> None:
        """Marks the task as done; the worker calls it."""
        self._done.set()


class Worker:
    """One thread that runs tasks in order.

    Args:
        device: becomes the thread's CUDA device, if it is one.
        threads: how many threads the native routines use.

    Attributes:
        fault: the exception that ended the worker's tasks; None if there was none.
    """

    def __init__(self, device: torch.device, threads: int) -> None:
        self.fault: BaseException | None = None
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], HostTask] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_serve, args=(weakref.ref(self), self._jobs, device, threads), name="zeroplan-host", daemon=True
        )
        self._thread.start()
        # Also when the interpreter ends: a daemon thread inside a CUDA call would crash it.
        self._end = weakref.finalize(self, _stop, self._jobs, self._thread)

    def submit(self, job: Callable[[], None]) -> HostTask:
        """Queues `job` behind all earlier ones."""
        task = HostTask(self)
        self._jobs.put((job, task))
        return task

    def close(self) -> None:
        """Waits for all tasks and ends the thread."""
        self._end()


def _serve(
    owner: weakref.ref[Worker],
    jobs: queue.SimpleQueue[tuple[Callable[[], None], HostTask] | None],
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


def _stop(jobs: queue.SimpleQueue[tuple[Callable[[], None], HostTask] | None], thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join()


def host_threads(cores_share: float) -> int:
    """Returns the number of threads of one rank's updates, at least 1.

    Args:
        cores_share: the fraction of the rank's cores to use. The ranks of a node (``LOCAL_WORLD_SIZE``, which torchrun sets)
            divide the cores that this process may run on evenly.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, int(cores * cores_share / ranks))
