"""What tests do on CPUs, on this rank's device: freezing, quantised bases, ``loss.backward()`` and rare scripts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

import zeroplan_runtime
from tests.runtime import (
    odd_scripts,
    rare_scripts,
    strange_scripts,
    test_freezing,
    test_odd_scripts,
    test_strangers,
    unusual_scripts,
)
from tests.runtime import test_quantized_base as quantized
from zeroplan_runtime.compat import deepspeed

Row = dict[str, Any]
RARE: list[Any] = [rare_scripts, unusual_scripts, strange_scripts]
MODULES: list[Any] = [test_strangers, test_freezing, odd_scripts, test_odd_scripts, *RARE]


def rows(device: torch.device) -> Iterator[Row]:
    """Runs all of it; a row says what was run and, under ``apart``, how far from plain torch, or what refused it."""
    host, initialize = test_strangers.data, zeroplan_runtime.initialize

    def data(number: int) -> torch.Tensor:
        with torch.device("cpu"):
            return host(number).to(device)

    def start(**given: Any) -> Any:
        return initialize(**{**given, "device": str(device)})

    for module in MODULES:
        if hasattr(module, "data"):
            module.data = data
    zeroplan_runtime.initialize = start
    yield from freezing(device)
    for bits in (4, 8):
        for stage in range(4):
            yield {"kind": "quantised", "bits": bits, "stage": stage, "apart": quantised(device, bits, stage)}
    for stage in range(4):
        for parts in (1, 2):
            yield {"kind": "loss.backward", "stage": stage, "parts": parts, "apart": loss_backward(device, stage, parts)}
    yield from scripts(device)
    if device.type == "cuda":  # torch synchronises batch norms on GPUs alone
        for stage in range(4):
            yield {"kind": "batch norm over the ranks", "stage": stage, "apart": batch_norm_over_the_ranks(device, stage)}
            yield {"kind": "autograd.grad", "stage": stage, "apart": gradients_of_inputs(device, stage)}


def far(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max((a.cpu() - b.detach().cpu()).abs().max().item() for a, b in zip(found, expected, strict=True))


def freezing(device: torch.device) -> Iterator[Row]:
    for stage, offload in [(0, "device"), (1, "device"), (2, "host"), (3, "device"), (3, "host, parameters")]:
        for name, script in test_freezing.SCRIPTS.items():
            plain = test_freezing.Torch("AdamW", test_freezing.ADAMW, 0.5)
            plain.module.to(device)
            more: Any = {"gradient_accumulation_steps": 2} if name == "within_an_accumulation" else {}
            engine = test_freezing.start(None, stage, clip=0.5, offload=test_freezing.OFFLOAD[offload], **more)
            apart = far(script(engine), script(plain))
            engine.destroy()
            yield {"kind": "freezing", "stage": stage, "offload": offload, "script": name, "apart": apart}


def quantised(device: torch.device, bits: int, stage: int) -> float:
    torch.manual_seed(0)
    model = quantized.Model(bits)
    plain = copy.deepcopy(model).to(device)
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2, eps=quantized.EPS)
    engine, *_ = zeroplan_runtime.initialize(model=model, config=quantized.config(stage))
    apart = 0.0
    for step in range(3):
        loss = engine(quantized.batch(step, dist.get_rank()).to(device))
        engine.backward(loss)
        engine.step()
        losses = [plain(quantized.batch(step, rank).to(device)) for rank in range(dist.get_world_size())]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        apart = max(apart, far([loss], [losses[dist.get_rank()]]))
    engine.destroy()
    return apart


def batch_norm_over_the_ranks(device: torch.device, stage: int) -> float:
    """``nn.SyncBatchNorm`` over batches that differ by rank is plain torch's batch norm over all of them."""
    torch.manual_seed(0)
    width, ranks, rank = test_strangers.WIDTH, dist.get_world_size(), dist.get_rank()
    layers = [torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Tanh(), torch.nn.Linear(width, width)]
    model: torch.nn.Module = torch.nn.Sequential(*layers)
    plain = copy.deepcopy(model).to(device)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    section = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}
    config: Row = {"train_micro_batch_size_per_gpu": 4, "optimizer": section, "gradient_clipping": 0.0}
    config["zero_optimization"] = {"stage": stage}
    engine, *_ = zeroplan_runtime.initialize(model=torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), config=config)
    apart = 0.0
    for step in range(4):
        batches = [test_strangers.data(10 * step + one) for one in range(ranks)]
        loss = (engine(batches[rank]) - batches[rank]).square().mean()
        engine.backward(loss)
        engine.step()
        other = (plain(torch.cat(batches)) - torch.cat(batches)).square()
        other.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        apart = max(apart, far([loss], [other.chunk(ranks)[rank].mean()]))
    apart = max(apart, far(list(engine.module.buffers()), list(plain.buffers())))
    engine.destroy()
    return apart


class Deep(torch.nn.Module):
    """Layers that take a GPU long enough for the host to run ahead of it by several."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4096, 4096) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


def gradients_of_inputs(device: torch.device, stage: int) -> float:
    """The input's gradients by ``torch.autograd.grad``, relative to the largest."""
    torch.manual_seed(0)
    model = Deep()
    plain, x = copy.deepcopy(model).to(device), torch.randn(2048, 4096).to(device).requires_grad_()
    (expected,) = torch.autograd.grad(plain(x).square().mean(), x)
    config: Row = {"train_micro_batch_size_per_gpu": 2048, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}}
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.0}}
    engine, *_ = zeroplan_runtime.initialize(model=model, config=config)
    found = [torch.autograd.grad(engine(x).square().mean(), x)[0] for _ in range(3)]
    engine.destroy()
    return max(far([grad], [expected]) for grad in found) / expected.abs().max().item()


def loss_backward(device: torch.device, stage: int, parts: int) -> float:
    torch.manual_seed(0)
    model = test_strangers.Net().eval()
    plain = copy.deepcopy(model).to(device)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    section = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.0, "torch_adam": True}}
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": parts, "optimizer": section}
    engine, *_ = deepspeed.initialize(model=model, config={**config, "zero_optimization": {"stage": stage}})
    apart = 0.0
    for step in range(6):
        loss = engine(test_strangers.data(step)).square().mean()
        loss.backward()
        engine.step()
        other = plain(test_strangers.data(step)).square().mean()
        (other / parts).backward()
        if (step + 1) % parts == 0:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)  # DeepSpeed's default
            optimizer.step()
            optimizer.zero_grad()
        apart = max(apart, far([loss], [other]))
    engine.destroy()
    return apart


def scripts(device: torch.device) -> Iterator[Row]:
    """The rarest scripts, with the device as the user's default one."""
    zeros: Callable[..., Any] = test_odd_scripts.Zeros

    class OnDevice(test_odd_scripts.Zeros):
        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__(model.to(device))

    wanted = {
        name: one
        for name, one in odd_scripts.SCRIPTS.items()
        if one[1].__module__ in [module.__name__ for module in RARE] and name not in ON_CPU
    }
    test_odd_scripts.Zeros = OnDevice  # type: ignore[misc]
    try:
        for stage in (3, 1, 2, 0):
            for name, one in wanted.items():
                vars(test_odd_scripts)["SCRIPTS"] = {name: one}
                with torch.device(device):
                    said = test_odd_scripts.outcomes(None, stage)[name]  # type: ignore[arg-type]
                ends = said in ("equal",) or (str(stage) in one[2] and not said.startswith(("crash", "plain", "different")))
                yield {"kind": "script", "stage": stage, "script": name, "apart": 0.0 if ends else said}
    finally:
        test_odd_scripts.Zeros = zeros  # type: ignore[assignment,misc]


#: Scripts that make tensors by a generator of the CPU's, mean the CPU, or take all GPUs.
ON_CPU = ("no_op_moves", "an_optimizer_saved", "in_data_parallel")
