"""Runs that memory, signals or a disk stop, in other forms than host.py's: ``python host_again.py CASE``.

Of the second blind set. See :mod:`benchmarks.logs.make`.
"""

from __future__ import annotations

import copy
import ctypes
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import spawn

from benchmarks.logs import runs


class _Wide(runs.Tokens):
    """Samples that a worker has no memory for."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        import numpy as np

        if index == 5:
            runs.cap_host(100)
            np.ones((4096, 65536), dtype=np.float32)
        return super().__getitem__(index)


def loader_memory() -> None:
    """A worker of Lightning's data loader has no memory for a sample."""
    runs.fit(runs.lightning_module(runs.llama()), data=_Wide(64), workers=1)


def safetensors_memory() -> None:
    """A file of safetensors does not fit."""
    from safetensors.torch import load_file, save_file

    path = Path(tempfile.mkdtemp()) / "model.safetensors"
    save_file({f"layers.{index}.weight": torch.zeros(8 * runs.MIB) for index in range(4)}, path)
    runs.cap_host(60)
    load_file(path)


def torch_load_memory() -> None:
    """A checkpoint that torch.load maps does not fit."""
    path = Path(tempfile.mkdtemp()) / "consolidated.pth"
    torch.save({"weight": torch.zeros(64 * runs.MIB)}, path)
    runs.cap_host(150)
    torch.load(path, mmap=True)


def memmap_memory() -> None:
    """A file of tokens of one GiB is mapped by numpy, which is refused."""
    import numpy as np

    runs.cap_host(200)
    tokens = np.memmap(Path(tempfile.mkdtemp()) / "train.bin", dtype=np.uint16, mode="w+", shape=(1 << 29,))
    print(tokens.shape)


def tokenizer_memory() -> None:
    """A text that is tokenized whole does not fit, which Rust says."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"the": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    text = "the lamp and the sea " * 400_000
    print(f"tokenizing {len(text):,} characters", flush=True)
    runs.cap_host(250)
    tokenizer.encode(text)


def _copied(rank: int, port: int) -> None:
    runs.spawned_group(rank, port)
    model = torch.nn.parallel.DistributedDataParallel(runs.llama(512, 8, 8000))
    if rank == 1:
        runs.cap_host(60)
        copy.deepcopy(model.module.state_dict())
    torch.distributed.barrier()


def spawn_memory() -> None:
    """A spawned rank has no memory for a second copy of the weights, its moving average."""
    spawn(_copied, args=(runs.free_port(),), nprocs=2)


def logits_memory() -> None:
    """The logits that the Trainer's evaluation keeps do not fit."""
    made = runs.trainer(runs.llama(32, 1, 32000), vocab=32000, per_device_eval_batch_size=8)
    made.compute_metrics = lambda found: {"mean": float(found.predictions.mean())}
    runs.cap_host(400)
    made.evaluate(runs.Tokens(512, 64, 32000))


def _say_slowly(step: int, loss: float) -> None:
    runs.say(step, loss)
    time.sleep(0.2)


def killed_subprocess() -> None:
    """A script starts the training as a process of its own, which the kernel kills."""
    code = "from benchmarks.logs import host_again; host_again.killed_child()"
    subprocess.run([sys.executable, "-c", code], check=True)


def killed_child() -> None:
    """Train until the kernel kills this process."""
    runs.kill_above(200)
    for step, _ in enumerate(runs.leak()):
        print(f"iter {step}", flush=True)
        time.sleep(0.02)


def killed_lightning() -> None:
    """The kernel kills one of Lightning's forked ranks."""
    module = runs.lightning_module(runs.llama())
    module.on_train_batch_end = _Kill()
    runs.fit(module, data=runs.Tokens(256), strategy="ddp_fork", devices=2, max_steps=60, enable_progress_bar=False)


class _Kill:
    def __call__(self, *_: Any) -> None:
        if torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def killed_pool() -> None:
    """The kernel kills a process of a pool that prepares data."""
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(2) as pool:
        print(sum(pool.map(_prepared, range(8))))


def _prepared(shard: int) -> int:
    if shard == 3:
        runs.kill_above(100)
        for _ in runs.leak():
            time.sleep(0.01)
    return shard


def killed_runtime() -> None:
    """The kernel kills one of this runtime's ranks, which keeps its losses' graphs."""
    engine = runs.runtime_engine(runs.llama())
    for step, batch in enumerate(runs.batches(10)):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        if runs.rank() == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        if runs.rank() == 1 and step == 4:
            os.kill(os.getpid(), signal.SIGKILL)


def _crashed(rank: int) -> None:
    model = runs.llama()
    for batch in runs.batches(3):
        model(**batch).loss.backward()
    if rank == 1:
        ctypes.string_at(0)


def crash_spawn() -> None:
    """A spawned rank crashes in native code."""
    spawn(_crashed, nprocs=2)


def terminated_plain() -> None:
    """A scheduler ends the one process by SIGTERM."""
    threading.Timer(6, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    runs.steps(runs.llama(), _say_slowly, steps=100)


def interrupted_lightning() -> None:
    """A user presses Ctrl-C while Lightning trains."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(8, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    runs.fit(runs.lightning_module(runs.llama()), data=runs.Tokens(4000, seconds=lambda _: 0.05), max_steps=2000)


def _limit_files(mib: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (mib * runs.MIB, mib * runs.MIB))


def limit_safetensors() -> None:
    """A limit on the size of files stops the Trainer's model.safetensors."""
    made = runs.trainer(runs.llama(256, 4, 8000), vocab=8000, save_strategy="steps", save_steps=2, max_steps=4)
    _limit_files(4)
    made.train()


def disk_safetensors() -> None:
    """The disk is full when accelerate saves the model (run with a disk of 16 MiB)."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(runs.llama(512, 4, 8000))
    accelerator.save_model(model, os.environ["SMALL_DISK"])


def disk_numpy() -> None:
    """The disk is full when embeddings are saved by numpy (run with a disk of 16 MiB)."""
    import numpy as np

    with torch.no_grad():
        states = runs.llama(512, 2, 8000).model.embed_tokens.weight.numpy()
    for shard in range(4):
        print(f"saving shard {shard}", flush=True)
        np.save(Path(os.environ["SMALL_DISK"]) / f"embeddings_{shard}.npy", states)


if __name__ == "__main__":
    globals()[sys.argv[-1]]()  # DeepSpeed's launcher puts a flag of its own before
