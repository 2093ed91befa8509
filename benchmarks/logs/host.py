"""Runs that the host's memory, shared memory or disk stops: ``python host.py CASE``. See :mod:`benchmarks.logs.make`."""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import threading
import time

import torch

from benchmarks.logs import runs


def refused_plain() -> None:
    """AdamW's states do not fit into the host's memory."""
    model = runs.llama(512, 8, 8000)
    runs.cap_host(350)
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in runs.batches(3, vocab=8000):
        model(**batch).loss.backward()
        optimizer.step()


def refused_list() -> None:
    """A data set that is read into one list does not fit."""
    runs.cap_host(300)
    samples: list[list[int]] = []
    while True:
        samples.append([len(samples)] * 100_000)


def refused_numpy() -> None:
    """An array of tokens does not fit."""
    import numpy as np

    runs.cap_host(300)
    print(np.zeros((100_000, 2048), dtype=np.int64).shape)


def refused_load() -> None:
    """The weights do not fit."""
    from transformers import AutoModelForCausalLM

    folder = tempfile.mkdtemp()
    runs.llama(512, 16, 16000).save_pretrained(folder)
    runs.cap_host(200)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def refused_threads() -> None:
    """Stacks of threads do not fit."""
    runs.cap_host(200)
    threads = [threading.Thread(target=time.sleep, args=(5,)) for _ in range(2000)]
    for thread in threads:
        thread.start()


def refused_trainer() -> None:
    """The Trainer's activations do not fit."""
    model = runs.llama(128, 4, 8000)
    made = runs.trainer(model, seq=1024, vocab=8000, per_device_train_batch_size=16)
    runs.cap_host(700)
    made.train()


def refused_accelerate() -> None:
    """The gradients of one rank do not fit."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = runs.llama(512, 8, 8000)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    runs.cap_host(150)
    for batch in runs.batches(3, vocab=8000):
        accelerator.backward(model(**batch).loss)
        optimizer.step()


def refused_lightning() -> None:
    """AdamW's states do not fit under Lightning."""
    module = runs.lightning_module(runs.llama(512, 8, 8000))
    runs.cap_host(450)
    runs.fit(module, data=runs.Tokens(64, vocab=8000))


def refused_deepspeed() -> None:
    """DeepSpeed's fp32 master and its states do not fit."""
    model = runs.llama(512, 8, 8000)
    import deepspeed  # noqa: F401  # before the limit: what it maps is not what the run needs

    runs.cap_host(300)
    runs.deepspeed_steps(runs.deepspeed_engine(model, bf16={"enabled": True}))


def refused_runtime() -> None:
    """This project's runtime takes its buckets, which do not fit."""
    engine = runs.runtime_engine(runs.llama(512, 8, 8000))
    runs.cap_host(16)
    runs.deepspeed_steps(engine)


def refused_offload() -> None:
    """One of two ranks has no memory for the states that it holds on the host."""
    model = runs.llama(512, 8, 8000)
    import deepspeed  # noqa: F401  # before the limit: what it maps is not what the run needs

    if runs.rank() == 1:
        runs.cap_host(250)
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    runs.deepspeed_steps(runs.deepspeed_engine(model, bf16={"enabled": True}, zero_optimization=zero))


def killed_torchrun() -> None:
    """The kernel kills a rank of DDP that keeps its outputs."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(runs.llama())
    if runs.rank() == 1:
        runs.kill_above(400)
    for step, (batch, _) in enumerate(zip(runs.batches(400), runs.leak(), strict=True)):
        loss = model(**batch).loss
        loss.backward()
        if runs.rank() == 0:
            print(f"step {step} | loss {loss.item():.3f}", flush=True)


def killed_accelerate() -> None:
    """The kernel kills one of accelerate's ranks."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = runs.llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    if runs.rank() == 0:
        runs.kill_above(400)
    for batch, _ in zip(runs.batches(400), runs.leak(), strict=True):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        accelerator.print(f"loss: {loss.item():.4f}")


def killed_deepspeed() -> None:
    """The kernel kills one of DeepSpeed's ranks."""
    engine = runs.deepspeed_engine(runs.llama())
    if runs.rank() == 1:
        runs.kill_above(400)
    for step, (batch, _) in enumerate(zip(runs.batches(400), runs.leak(), strict=True)):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        print(f"step {step} loss {loss.item():.4f}", flush=True)


def killed_trainer() -> None:
    """The kernel kills the Trainer's one process while it keeps logits."""
    kept = iter(runs.leak())
    made = runs.trainer(runs.llama(), max_steps=200)
    runs.after_each_step(made, lambda: next(kept))
    runs.kill_above(300)
    made.train()


def _spawned(rank: int) -> None:
    if rank == 1:
        runs.kill_above(200)
        list(runs.leak())
    time.sleep(20)


def killed_spawn() -> None:
    """The kernel kills a process of torch.multiprocessing.spawn."""
    from torch.multiprocessing.spawn import spawn

    spawn(_spawned, nprocs=2)


class _Grows(runs.Tokens):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == 9:
            runs.kill_above(100)
            list(runs.leak())
        return super().__getitem__(index)


def killed_worker() -> None:
    """The kernel kills a worker of the data loader."""
    model = runs.llama()
    for step, batch in enumerate(torch.utils.data.DataLoader(_Grows(64), batch_size=2, num_workers=2)):
        print(step, model(**batch).loss.item(), flush=True)


def killed_worker_trainer() -> None:
    """The kernel kills a worker of the Trainer's data loader."""
    runs.trainer(runs.llama(), data=_Grows(64), dataloader_num_workers=2, max_steps=30).train()


def shm_worker() -> None:
    """/dev/shm is too small for the data loader's batches (run with 4 MiB of it)."""
    data = [torch.zeros(4 << 20) for _ in range(8)]
    for step, batch in enumerate(torch.utils.data.DataLoader(data, batch_size=2, num_workers=2)):  # type: ignore[arg-type]
        print(step, batch.shape, flush=True)


def disk_save() -> None:
    """The disk is full at ``torch.save`` (run with a disk of 16 MiB)."""
    model = runs.llama(512, 4, 8000)
    print("saving checkpoint to step-100.pt", flush=True)
    torch.save(model.state_dict(), os.path.join(os.environ["SMALL_DISK"], "step-100.pt"))


def disk_trainer() -> None:
    """The disk is full when the Trainer saves (run with a disk of 16 MiB)."""
    folder = os.path.join(os.environ["SMALL_DISK"], "checkpoints")
    runs.trainer(runs.llama(512, 4, 8000), vocab=8000, save_strategy="steps", save_steps=2, output_dir=folder).train()


def disk_lightning() -> None:
    """The disk is full when Lightning saves (run with a disk of 16 MiB)."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    save = ModelCheckpoint(dirpath=os.environ["SMALL_DISK"], every_n_train_steps=2)
    module = runs.lightning_module(runs.llama(512, 4, 8000))
    runs.fit(module, data=runs.Tokens(64, vocab=8000), enable_checkpointing=True, callbacks=[save])


def disk_deepspeed() -> None:
    """The disk is full when DeepSpeed saves (run with a disk of 16 MiB)."""
    engine = runs.deepspeed_engine(runs.llama(512, 4, 8000))
    runs.deepspeed_steps(engine, 2)
    engine.save_checkpoint(os.environ["SMALL_DISK"])


def file_limit() -> None:
    """A limit on the size of files (``ulimit -f``) stops a checkpoint."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, 4 << 20))
    model = runs.llama(512, 4, 8000)
    model.save_pretrained(tempfile.mkdtemp())


if __name__ == "__main__":
    globals()[sys.argv[-1]]()  # DeepSpeed's launcher puts a flag of its own before
