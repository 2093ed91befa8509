"""Runs whose ranks wait, or whose program is wrong, in other forms than ranks.py's: ``python ranks_again.py CASE``.

Of the second blind set. See :mod:`benchmarks.logs.make`.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import spawn

from benchmarks.logs import runs


def barrier_lightning() -> None:
    """Rank 1 evaluates for long while rank 0 of Lightning waits at a barrier."""
    from lightning.pytorch.strategies import DDPStrategy

    module = runs.lightning_module(runs.llama())
    module.on_train_batch_end = _Late()
    runs.fit(module, strategy=DDPStrategy(timeout=timedelta(seconds=6)), devices=2, enable_progress_bar=False)


class _Late:
    def __call__(self, *_: Any) -> None:
        if torch.distributed.get_rank() == 1:
            time.sleep(15)
        torch.distributed.barrier()


def store_wait() -> None:
    """Rank 0 waits for a key that rank 1 never sets."""
    runs.group()
    store = torch.distributed.distributed_c10d._get_default_store()
    if runs.rank() == 0:
        store.wait(["data/prepared"], timedelta(seconds=4))
    time.sleep(12)


def _alone(rank: int, port: int) -> None:
    runs.spawned_group(rank, port, 5)
    parts: list[Any] = [None, None]
    if rank == 0:
        torch.distributed.all_gather_object(parts, {"loss": 1.0})
    time.sleep(12)


def gather_spawn() -> None:
    """Only rank 0 of two spawned ranks gathers its metrics."""
    spawn(_alone, args=(runs.free_port(),), nprocs=2)


def left_accelerate() -> None:
    """Rank 1 of accelerate returns from main early, without a word."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = runs.llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for step, batch in enumerate(runs.batches(10)):
        if accelerator.process_index == 1 and step == 5:
            os._exit(0)
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        accelerator.print(f"step {step}: {loss.item():.4f}")


def _collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.stack([one["tokens"] for one in samples])}


def collate_worker() -> None:
    """The collate function asks, in a worker, for a column that is not there."""
    loader = torch.utils.data.DataLoader(runs.Tokens(16), batch_size=4, num_workers=2, collate_fn=_collate)
    for batch in loader:
        print(batch["input_ids"].shape)


def missing_keys() -> None:
    """A checkpoint of a model with fewer layers is loaded."""
    path = Path(tempfile.mkdtemp()) / "last.ckpt"
    torch.save(runs.llama(layers=1).state_dict(), path)
    runs.llama().load_state_dict(torch.load(path))


def size_mismatch() -> None:
    """Weights of another width are loaded by transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tempfile.mkdtemp()
    model = runs.llama()
    model.save_pretrained(folder)
    config = LlamaConfig(**{**model.config.to_dict(), "vocab_size": 80})
    LlamaForCausalLM.from_pretrained(folder, config=config)


def other_device() -> None:
    """Some of the weights were left on the meta device."""
    model = runs.llama()
    model.lm_head.to("meta")
    runs.steps(model, runs.say)


def no_cuda() -> None:
    """A script for a GPU is run where torch has no CUDA."""
    runs.llama().to("cuda:0")


def label_range() -> None:
    """A label lies beyond the classes."""
    head = torch.nn.Linear(16, 4)
    for step in range(8):
        logits = head(torch.randn(4, 16))
        loss = torch.nn.functional.cross_entropy(logits, torch.arange(4) + step // 4)
        loss.backward()
        print(f"step {step}, loss {loss.item():.4f}", flush=True)


def shape_accelerate() -> None:
    """A process of ``accelerate launch`` multiplies matrices that do not fit together."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(64, 8)))
    accelerator.backward(model(torch.randn(4, 64)).sum())


def frozen_deepspeed() -> None:
    """All of a loss's graph was cut off by no_grad before DeepSpeed's backward."""
    engine = runs.deepspeed_engine(runs.llama())
    for batch in runs.batches(2):
        with torch.no_grad():
            loss = engine(**batch).loss
        loss.backward()


def unused_parameters() -> None:
    """DDP finds parameters that had no part in the loss."""
    runs.group()
    model = runs.llama()
    model.extra = torch.nn.Linear(8, 8)
    model = torch.nn.parallel.DistributedDataParallel(model)
    runs.steps(model, runs.say)


def no_checkpoint() -> None:
    """The Trainer is to resume where no checkpoint is."""
    runs.trainer(runs.llama()).train(resume_from_checkpoint=True)


def _bound(rank: int, port: int) -> None:
    runs.spawned_group(rank, port)


def port_spawn() -> None:
    """Another run holds the port that spawned ranks meet at."""
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        spawn(_bound, args=(taken.getsockname()[1],), nprocs=2)


def folder_runtime() -> None:
    """Two ranks of this project's runtime are to save into different folders."""
    engine = runs.runtime_engine(runs.llama())
    runs.deepspeed_steps(engine)
    engine.save_checkpoint(str(Path(tempfile.gettempdir()) / "zeroplan-log-save") if runs.rank() else tempfile.mkdtemp())


if __name__ == "__main__":
    globals()[sys.argv[-1]]()  # DeepSpeed's launcher puts a flag of its own before
