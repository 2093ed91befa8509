"""One run that fails, or does not: ``python failing.py CASE``. See :mod:`benchmarks.logs.make`."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch


def _cap(gib: float) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(gib * 2**30 / total)


def _model(layers: int = 8, vocab: int = 32000, **options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        **options,
    )
    return LlamaForCausalLM(config)


def _small() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    )


def _train(model: Any, *, micro: int, seq: int, vocab: int, steps: int = 3, lr: float = 1e-4) -> None:
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(steps):
        tokens = torch.randint(0, vocab, (micro, seq), device=device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss: {loss.item():.4f}", flush=True)


def oom_load() -> None:
    """The weights do not fit."""
    _cap(0.3)
    folder = tempfile.mkdtemp()
    _model().save_pretrained(folder)
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map={"": 0})


def oom_forward() -> None:
    """The blocks' activations do not fit."""
    _cap(2)
    _train(_model().cuda(), micro=16, seq=1024, vocab=32000)


def oom_loss() -> None:
    """The logits do not fit."""
    _cap(6)
    _train(_model(layers=1, vocab=128000).cuda(), micro=8, seq=1024, vocab=128000)


def oom_backward() -> None:
    """The forward fits, its gradients do not."""
    model = _model().cuda()
    tokens = torch.randint(0, 32000, (4, 1024), device="cuda")
    loss = model(input_ids=tokens, labels=tokens).loss
    torch.cuda.empty_cache()
    _cap((torch.cuda.memory_reserved() + (100 << 20)) / 2**30)
    loss.backward()


def oom_step() -> None:
    """Parameters and gradients fit, the optimizer's states do not."""
    model = _model().cuda()
    tokens = torch.randint(0, 32000, (1, 64), device="cuda")
    model(input_ids=tokens, labels=tokens).loss.backward()
    torch.cuda.empty_cache()
    _cap((torch.cuda.memory_reserved() + (100 << 20)) / 2**30)
    torch.optim.AdamW(model.parameters()).step()


class _Data(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int, seq: int, vocab: int) -> None:
        self.count, self.seq, self.vocab = count, seq, vocab

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, self.vocab, (self.seq,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def _trainer(model: Any, *, seq: int, vocab: int, cpu: bool = False, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        tempfile.mkdtemp(), max_steps=options.pop("max_steps", 6), logging_steps=1, report_to=[], use_cpu=cpu, **options
    )
    data = _Data(64, seq, vocab)
    return Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data)


def oom_trainer() -> None:
    """The Trainer's micro batch does not fit."""
    _cap(5)
    _trainer(_model(), seq=1024, vocab=32000, per_device_train_batch_size=16, bf16=True).train()


def oom_save() -> None:
    """A gathered copy of the weights does not fit."""
    model = _model().cuda()
    _cap((torch.cuda.memory_reserved() + (200 << 20)) / 2**30)

    def save_checkpoint() -> None:
        torch.save({name: value.clone() for name, value in model.state_dict().items()}, os.path.join(tempfile.mkdtemp(), "x"))

    save_checkpoint()


def oom_fragmented() -> None:
    """Half of the memory is free, in pieces too small."""
    _cap(4)
    # Blocks of 1 to 10 MiB share segments of 20 MiB, which one live block keeps from being released.
    pieces = [torch.empty(4 << 20, dtype=torch.uint8, device="cuda") for _ in range(1000)]
    kept = pieces[::5]
    del pieces
    print(len(kept), "blocks are left")
    _ = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")


def oom_driver() -> None:
    """Let a kernel library's own allocation fail."""
    free, _ = torch.cuda.mem_get_info()
    _ = torch.empty(free - (64 << 20), dtype=torch.uint8, device="cuda")
    a = torch.empty(64, 64, device="cuda")
    print(a @ a)


def oom_two_ranks() -> None:
    """Let one rank of two die while the other one waits."""
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.cuda.set_device(0)
    if rank:
        _cap(0.5)
        _train(_model().cuda(), micro=8, seq=512, vocab=32000)
    dist.all_reduce(torch.ones(1))


def fp16_overflow() -> None:
    """Let fp16 overflow in every step."""
    scaler = torch.amp.GradScaler("cuda")
    weight = torch.nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scale = 65536.0
    for _ in range(40):
        loss = (weight * float("inf")).sum()
        torch.autograd.backward(scaler.scale(loss))
        scaler.step(optimizer)
        scaler.update()
        print(f"OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {scale}, reducing to {scaler.get_scale()}", flush=True)
        scale = scaler.get_scale()
        optimizer.zero_grad()


def fine_trainer() -> None:
    """Train by the Trainer to the end."""
    _trainer(_small(), seq=32, vocab=64, per_device_train_batch_size=2).train()


def nan_trainer() -> None:
    """The Trainer's losses are NaN."""
    model = _small()
    model.lm_head.weight.data.fill_(float("nan"))
    _trainer(model, seq=32, vocab=64, cpu=True, per_device_train_batch_size=2).train()


def nan_plain() -> None:
    """Let a plain loop diverge."""
    _train(_small(), micro=2, seq=32, vocab=64, steps=30, lr=1e18)


def killed_rank() -> None:
    """Let the kernel kill one rank of two."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def killed_plain() -> None:
    """Let the kernel kill the one process."""
    os.kill(os.getpid(), signal.SIGKILL)


def stuck_gloo() -> None:
    """Let one rank of two never come to a collective."""
    from datetime import timedelta

    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    if os.environ["RANK"] == "1":
        time.sleep(12)
    dist.all_reduce(torch.ones(1))


def cpu_refused() -> None:
    """Let the host refuse an allocation."""
    torch.empty(1 << 50, dtype=torch.uint8)


def key_error() -> None:
    """The program is wrong."""
    batch = _Data(1, 4, 8)[0]
    print(batch["attention_mask"])


def fine_plain() -> None:
    """Train by a plain loop to the end."""
    _train(_small(), micro=2, seq=32, vocab=64)
    print("Training completed")


if __name__ == "__main__":
    found: Callable[[], None] = globals()[sys.argv[1]]
    found()
