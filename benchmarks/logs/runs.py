"""What the runs of these logs share: small models, data, loops, and the limits that make a run fail."""

from __future__ import annotations

import os
import resource
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch

MIB = 1 << 20


def llama(hidden: int = 32, layers: int = 2, vocab: int = 64) -> Any:
    """Build a Llama on the host, in fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=2,
            max_position_embeddings=4096,
        )
    )


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """`count` samples of `seq` random tokens; each takes `seconds(index)` to load."""

    def __init__(self, count: int, seq: int = 32, vocab: int = 64, seconds: Any = None) -> None:
        self.count, self.seq, self.vocab, self.seconds = count, seq, vocab, seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= self.count:
            raise IndexError(index)
        if self.seconds is not None:
            time.sleep(self.seconds(index))
        tokens = torch.randint(0, self.vocab, (self.seq,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def batches(count: int, micro: int = 2, seq: int = 32, vocab: int = 64) -> Iterator[dict[str, torch.Tensor]]:
    """Yield `count` batches."""
    for index in range(count):
        tokens = torch.randint(0, vocab, (micro, seq), generator=torch.Generator().manual_seed(index))
        yield {"input_ids": tokens, "labels": tokens}


def trainer(model: Any, *, count: int = 64, seq: int = 32, vocab: int = 64, data: Any = None, **options: Any) -> Any:
    """Build transformers' Trainer on the CPU."""
    from transformers import Trainer, TrainingArguments

    options = {"max_steps": 6, "logging_steps": 1, "per_device_train_batch_size": 2, **options}
    options.setdefault("output_dir", tempfile.mkdtemp())
    arguments = TrainingArguments(report_to=[], use_cpu=True, save_strategy=options.pop("save_strategy", "no"), **options)
    return Trainer(model=model, args=arguments, train_dataset=data or Tokens(count, seq, vocab))


def after_each_step(made: Any, action: Callable[[], object]) -> None:
    """Let a Trainer call `action` after each step."""
    from transformers import TrainerCallback

    def on_step_end(*_: Any, **__: Any) -> None:
        action()

    made.add_callback(type("After", (TrainerCallback,), {"on_step_end": on_step_end}))


def lightning_module(model: Any, lr: float = 1e-3, optimizer: Any = None) -> Any:
    """Wrap a model for Lightning, which logs its loss."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch).loss
            self.log("train_loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            made: torch.optim.Optimizer = (optimizer or torch.optim.AdamW)(self.parameters(), lr=lr)
            return made

    return Module()


def fit(module: Any, *, data: Any = None, workers: int = 0, micro: int = 2, **options: Any) -> None:
    """Train by Lightning on the CPU."""
    import lightning

    options = {"max_steps": 6, "log_every_n_steps": 1, "logger": False, "enable_checkpointing": False, **options}
    loader = torch.utils.data.DataLoader(data or Tokens(64), batch_size=micro, num_workers=workers)
    lightning.Trainer(accelerator="cpu", default_root_dir=tempfile.mkdtemp(), **options).fit(module, loader)


def deepspeed() -> Any:
    """Import DeepSpeed, which then takes gloo's own collectives and compiles none."""
    import deepspeed as found

    found.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return found


def deepspeed_engine(model: Any, **config: Any) -> Any:
    """Start DeepSpeed over gloo ranks."""
    whole = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 2},
        **config,
    }
    engine, *_ = deepspeed().initialize(model=model, config={k: v for k, v in whole.items() if v is not None})
    return engine


def deepspeed_steps(engine: Any, steps: int = 6) -> None:
    """Train some steps, as DeepSpeed's own examples do."""
    for step, batch in enumerate(batches(steps)):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        print(f"step {step} loss {loss.item():.4f}", flush=True)


def runtime_engine(model: Any, **config: Any) -> Any:
    """Start this project's runtime over gloo ranks."""
    import zeroplan_runtime

    whole = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        **config,
    }
    engine, *_ = zeroplan_runtime.initialize(model=model, config=whole)
    return engine


def cap_host(spare_mib: int) -> None:
    """Let the system refuse this process more than `spare_mib` MiB of address space, as ``ulimit -v`` does."""
    with open("/proc/self/statm", encoding="ascii") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    limit = held + spare_mib * MIB
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def resident_mib() -> float:
    """Return this process's resident memory in MiB."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / MIB


def kill_above(spare_mib: int) -> None:
    """Kill this process with signal 9 once it holds `spare_mib` MiB more than now, as the kernel does in a full container."""
    limit = resident_mib() + spare_mib

    def watch() -> None:
        while resident_mib() < limit:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def leak(mib: int = 16, count: int = 400) -> Iterator[list[torch.Tensor]]:
    """Keep `mib` MiB more at each step, as a list of outputs that is never emptied does."""
    kept: list[torch.Tensor] = []
    for _ in range(count):
        kept.append(torch.ones(mib * MIB // 4))
        yield kept


def rank() -> int:
    """Return this process's rank, as launchers give it."""
    return int(os.environ.get("RANK", "0"))


def steps(model: Any, say: Callable[[int, float], object], *, steps: int = 12, lr: float = 1e-3, seq: int = 32) -> None:
    """Train by a plain loop, which gives each step and its loss to `say`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step, batch in enumerate(batches(steps, seq=seq)):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        say(step, loss.item())


def say(step: int, loss: float) -> None:
    """Print a step and its loss."""
    print(f"[{step:>4}] loss={loss:.3f}", flush=True)


def group(seconds: float = 30) -> None:
    """Join the launcher's gloo ranks, with a time-out of so many seconds."""
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=seconds))


def spawned_group(rank: int, port: int, seconds: float = 30) -> None:
    """Join two spawned gloo ranks at a port."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=timedelta(seconds=seconds)
    )


def free_port() -> int:
    """Return a port that nobody holds."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port
