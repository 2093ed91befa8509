"""Runs whose ranks die, hang, or do not fit together: ``python ranks.py CASE``. See :mod:`benchmarks.logs.make`."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from benchmarks.logs import runs


def _ddp(seconds: float = 30) -> Any:
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    return torch.nn.parallel.DistributedDataParallel(runs.llama())


def hang_ddp() -> None:
    """Rank 1's data loader hangs, rank 0 waits for its gradients."""
    model = _ddp(6)
    for step, batch in enumerate(runs.batches(10)):
        if runs.rank() == 1 and step == 3:
            time.sleep(20)
        loss = model(**batch).loss
        loss.backward()
        print(f"rank {runs.rank()} step {step} loss {loss.item():.3f}", flush=True)


def hang_monitored() -> None:
    """Rank 1 never comes to a monitored barrier."""
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=6))
    if runs.rank() == 1:
        time.sleep(15)
    dist.monitored_barrier(timeout=timedelta(seconds=5), wait_all_ranks=True)


def hang_join() -> None:
    """One of two nodes never starts."""
    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611", "RANK": "0", "WORLD_SIZE": "2"}
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))


def fewer_batches() -> None:
    """Rank 1 has fewer batches and leaves."""
    model = _ddp(20)
    for batch in runs.batches(10 if runs.rank() == 0 else 4):
        loss = model(**batch).loss
        loss.backward()
        print(f"rank {runs.rank()} loss {loss.item():.3f}", flush=True)


def type_error_rank() -> None:
    """Rank 1 has a fault of its own while rank 0 waits."""
    model = _ddp()
    for batch in runs.batches(4):
        loss = model(**batch).loss
        if runs.rank() == 1:
            loss = loss + len(batch["input_ids"], 1)  # type: ignore[call-arg]
        loss.backward()


def key_error_accelerate() -> None:
    """Every rank's loop asks for a column that is not there."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(runs.llama())
    for batch in runs.batches(4):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.log({"accuracy": (batch["targets"] == 0).sum()})


def value_error_deepspeed() -> None:
    """Labels have another length than the tokens."""
    engine = runs.deepspeed_engine(runs.llama())
    for batch in runs.batches(4):
        loss = engine(input_ids=batch["input_ids"], labels=batch["labels"][:1]).loss
        engine.backward(loss)


def error_lightning() -> None:
    """A LightningModule under DDP refers to an attribute that it lacks."""
    module = runs.lightning_module(runs.llama())
    module.on_train_batch_end = lambda *_: print(module.metrics)
    runs.fit(module, strategy="ddp", devices=2)


def index_error() -> None:
    """A token lies beyond the vocabulary."""
    runs.trainer(runs.llama(), vocab=100).train()


def shape_error_trainer() -> None:
    """Sequences of one batch have different lengths."""
    data = [{"input_ids": torch.arange(8 + index), "labels": torch.arange(8 + index)} for index in range(8)]
    runs.trainer(runs.llama(), data=data).train()


def error_runtime() -> None:
    """This project's runtime is given a stage that does not exist."""
    runs.runtime_engine(runs.llama(), zero_optimization={"stage": 4})


def batch_sizes() -> None:
    """train_batch_size belongs to another number of ranks."""
    runs.deepspeed_engine(runs.llama(), train_batch_size=10)


def resume_ranks() -> None:
    """A checkpoint of two ranks is loaded by one (the first start saves it)."""
    folder = Path(tempfile.gettempdir()) / "zeroplan-log-resume"
    engine = runs.deepspeed_engine(runs.llama())
    if int(os.environ["WORLD_SIZE"]) == 2:
        runs.deepspeed_steps(engine, 2)
        engine.save_checkpoint(str(folder))
    else:
        engine.load_checkpoint(str(folder))


def port_in_use() -> None:
    """Another run holds the port."""
    import socket

    import torch.distributed as dist

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1]), "RANK": "0", "WORLD_SIZE": "1"}
        dist.init_process_group("gloo")


def segfault() -> None:
    """Rank 1 crashes in native code."""
    model = _ddp()
    for batch in runs.batches(4):
        model(**batch).loss.backward()
        if runs.rank() == 1:
            ctypes.string_at(0)


def abort_trainer() -> None:
    """A library ends the process by abort."""
    made = runs.trainer(runs.llama())
    runs.after_each_step(made, os.abort)
    made.train()


def _after(seconds: float, number: int, process: int) -> None:
    threading.Timer(seconds, lambda: os.kill(process, number)).start()


def interrupted() -> None:
    """A user presses Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
    _after(8, signal.SIGINT, os.getpid())
    runs.trainer(runs.llama(), max_steps=2000, data=runs.Tokens(4000, seconds=lambda _: 0.05), logging_steps=20).train()


def terminated_launcher() -> None:
    """A scheduler ends the launcher by SIGTERM."""
    model = _ddp()
    if runs.rank() == 0:
        _after(4, signal.SIGTERM, os.getppid())
    for step, batch in enumerate(runs.batches(100)):
        time.sleep(0.2)
        loss = model(**batch).loss
        loss.backward()
        if runs.rank() == 0:
            print(f"step {step} loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    globals()[sys.argv[-1]]()  # DeepSpeed's launcher puts a flag of its own before
