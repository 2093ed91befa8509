"""The worker beside the model's thread: order, faults, its end."""

from __future__ import annotations

import gc
import os
import threading
import weakref

import pytest
import torch

import zeroplan_runtime
from tests.patience import PATIENCE
from zeroplan_runtime.kernels import native_backend
from zeroplan_runtime.offload.host_worker import Worker, host_threads

CPU = torch.device("cpu")


def test_jobs_run_in_order_on_another_thread_without_gradients() -> None:
    worker = Worker(CPU, 3)
    seen: list[object] = []
    held = threading.Event()
    first = worker.submit(held.wait)  # type: ignore[arg-type]
    tickets = [worker.submit(lambda i=i: seen.append(i)) for i in range(5)]  # type: ignore[misc]
    last = worker.submit(lambda: seen.append((torch.is_grad_enabled(), native_backend._threads(), threading.get_ident())))
    assert not first.done()
    assert not last.done()
    held.set()
    last.wait()
    assert seen[:5] == [0, 1, 2, 3, 4]
    assert seen[5][:2] == (False, 3)  # type: ignore[index]
    assert seen[5][2] != threading.get_ident()  # type: ignore[index]
    assert all(ticket.done() for ticket in tickets)
    assert native_backend._threads() == torch.get_num_threads()
    worker.close()


def test_a_fault_is_raised_by_every_later_wait_and_nothing_more_runs() -> None:
    worker = Worker(CPU, 1)
    ran: list[int] = []
    before = worker.submit(lambda: ran.append(1))
    before.wait()

    def fail() -> None:
        raise OSError("No space left on device")

    failing, after = worker.submit(fail), worker.submit(lambda: ran.append(2))
    with pytest.raises(RuntimeError, match="No space left") as caught:
        after.wait()
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(RuntimeError):
        failing.wait()
    assert ran == [1]
    worker.close()


def test_an_abandoned_worker_ends_its_thread() -> None:
    worker = Worker(CPU, 1)
    threads, alive = [], weakref.ref(worker)
    worker.submit(lambda: threads.append(threading.current_thread())).wait()
    (thread,) = threads
    del worker
    gc.collect()
    assert alive() is None
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_ranks_of_a_node_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert host_threads(0.8) == 12
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert host_threads(0.8) == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert host_threads(0.8) == 1


@pytest.mark.parametrize("built", [True, False])
def test_a_missing_library_is_warned_of(built: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Python's twin takes ten times as long, which nothing else would say."""
    if not built:
        monkeypatch.setattr(native_backend, "library", lambda: None)
    elif native_backend.library() is None:
        pytest.skip("no library was built here")
    section = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": section}
    engine, *_ = zeroplan_runtime.initialize(model=torch.nn.Linear(4, 4), config=config)
    engine.destroy()
    assert ("libzeroplan_cpu" in caplog.text) != built
