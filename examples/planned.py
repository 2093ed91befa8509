"""What the examples share: the plan of a run before it starts, its steps, and what was measured beside the plan at its end.

On a GPU what torch's allocator took is held against the plan. On a CPU, where activations lie in the host's memory as all else,
what the runtime keeps in place of a GPU is, and that is planned to the byte.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.data import Dataset

import zeroplan
import zeroplan_runtime
from zeroplan.core.buffers import Place
from zeroplan.core.sizes import format_bytes

#: First parts of the names of what the runtime itself allocates; activations and the like are torch's.
OWN = ("param", "grad", "optim", "comm", "stage", "swap")


def ds_config(micro_batch: int, stage: int, rate: float, dtype: str) -> dict[str, Any]:
    """The config of a run: AdamW, gradients clipped at 1."""
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": rate, "betas": [0.9, 0.95]}},
        "zero_optimization": {"stage": stage},
        **({} if dtype == "fp32" else {dtype: {"enabled": True}}),
    }


def plan(model: Any, config: dict[str, Any], **asked: Any) -> Any:
    """What the run will take on a GPU, said before anything is allocated. `model` is a config or a module."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))  # torchrun's, which no process group knows yet
    (found,) = zeroplan.estimate(model, engine="zeroplan", ds_config=config, gpus=ranks, **asked)
    states, total = format_bytes(found.gpu.model_states), found.gpu.total
    if is_first():
        print(f"plan: {states} of model states" + ("" if total is None else f", {format_bytes(total)} in all a GPU"))
    return found


def is_first() -> bool:
    """Whether this is the first rank, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def own(found: Any, place: Place) -> int:
    """The runtime's own bytes at a place, by the plan. What is simulated, without a formula, is torch's."""
    lines = [line for line in found.lines if line.place == place and not line.formula.startswith("simulated")]
    return sum(line.bytes for line in lines if line.buffer.split(".")[0] in OWN)


def train(
    model: Any,
    config: dict[str, Any],
    data: Dataset[Any],
    steps: int,
    loss_of: Callable[[Any, Any], torch.Tensor] = lambda engine, batch: engine(**batch).loss,
    **options: Any,
) -> Any:
    """Train for some steps, print the loss and the speed, and return the engine. `options` are those of `initialize`."""
    engine, _, loader, _ = zeroplan_runtime.initialize(model=model.train(), config=config, training_data=data, **options)
    assert loader is not None
    begins, batches = [], _forever(loader)
    for step in range(steps):
        begins.append(time.perf_counter())
        batch = torch.utils._pytree.tree_map(lambda tensor: tensor.to(engine.device), next(batches))
        loss = loss_of(engine, batch)
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0 and (step % 10 == 0 or step + 1 == steps):
            print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)
    engine.drain()
    took = median(b - a for a, b in pairwise([*begins[len(begins) // 2 :], time.perf_counter()]))
    if engine.global_rank == 0:
        print(f"{1000 * took:,.0f} ms a step")
    return engine


def _forever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def print_beside(planned: Any, engine: Any) -> None:
    """Print plan beside measurement, a row for each place."""
    if engine.device.type == "cuda":
        gpu = ("reserved on the GPU", planned.gpu.peak_reserved, torch.cuda.max_memory_reserved())
    else:
        gpu = ("the runtime's, in place of a GPU", own(planned, Place.HBM), engine.arena.peak(Place.HBM))
    rows = [gpu, ("pinned", planned.cpu.pinned, engine.arena.peak(Place.PINNED))]
    rows += [
        (what, own(planned, place), engine.arena.peak(place))
        for what, place in (("pageable", Place.DRAM), ("in files", Place.NVME))
    ]
    if not is_first():
        return
    print(f"{'':34}{'planned':>12}{'measured':>12}")
    for what, before, after in rows:
        print(f"{what:34}{format_bytes(before):>12}{format_bytes(after):>12}")


class Text(Dataset[dict[str, torch.Tensor]]):
    """The text of Python's own library, which every Python has, as bytes in pieces of one length."""

    VOCABULARY = 256

    def __init__(self, length: int, most: int = 1 << 22) -> None:
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)[:most]
        pieces = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.tokens = pieces[: len(text) // length * length].view(-1, length).long()

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}
