"""Trains a model of linear layers, saves and resumes it, and tells how this process's resident memory grew in each phase."""

from __future__ import annotations

import ctypes
import gc
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeroplan_runtime
from zeroplan.core.buffers import Phase, Place
from zeroplan.validate.rank.probe import give_back_freed, reset_resident, resident

#: The width, the inner width and the number of blocks: 25 million parameters. And those of what goes first.
SIZES, FIRST = (1024, 2048, 6), (64, 96, 3)
#: glibc keeps freed blocks of up to 32 MiB for itself, once it has seen one; it is told to map all above 1 MiB.
_M_MMAP_THRESHOLD = -3


class Block(nn.Module):
    """Two linear layers, one with a bias."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """`depth` blocks."""

    def __init__(self, width: int, hidden: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


class Growth:
    """Resident memory beyond what was there at the start."""

    def __init__(self) -> None:
        give_back_freed()
        self._before = resident()[0]
        reset_resident()

    def look(self) -> tuple[int, int]:
        """Bytes at the highest since the last look, and now, with what is free given back."""
        most = resident()[1]
        give_back_freed()
        now = resident()[0]
        reset_resident()
        return most - self._before, now - self._before


def grow(group: dist.ProcessGroup, configs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each config: the growth by phase, the Arena's rows, the layout and what there is in files.

    A small model goes first, so that libraries, threads and the communicator are there.
    """
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    gc.freeze()  # each look collects, which would go through all that torch has imported
    return [_grow(group, config, *FIRST) and _grow(group, config, *SIZES) for config in configs]


def _grow(group: dist.ProcessGroup, config: dict[str, Any], width: int, hidden: int, depth: int) -> dict[str, Any]:
    phases: dict[Phase, tuple[int, int]] = {}
    growth = Growth()
    with torch.device("meta"):
        model: nn.Module = Stack(width, hidden, depth).to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    phases[Phase.LOAD] = growth.look()
    engine, *_ = zeroplan_runtime.initialize(model=model, config=config, group=group, device="cpu")
    phases[Phase.INIT] = growth.look()
    for _ in range(2):
        engine.backward(engine(torch.ones(1, width, dtype=torch.bfloat16)))
        engine.step()
    phases[Phase.STEP] = growth.look()
    with tempfile.TemporaryDirectory() as folder:
        shared: list[Any] = [folder]
        dist.broadcast_object_list(shared, src=0, group=group)
        engine.save_checkpoint(shared[0])
        phases[Phase.SAVE] = growth.look()
        engine.load_checkpoint(shared[0])
        phases[Phase.RESUME] = growth.look()
        dist.barrier(group)
    path = config["zero_optimization"]["offload_optimizer"].get("nvme_path")
    swapped = Path(path).glob(f"zeroplan_swap_*_rank{dist.get_rank(group)}/*.swap") if path else ()
    found = {
        "phases": phases,
        "layout": engine.model_states.layout,
        "device": engine.arena.live(Place.HBM),
        "host": engine.arena.live(Place.PINNED) + engine.arena.live(Place.DRAM),
        "params": sum(shape.numel for unit in engine.model_states.layout.units for shape in unit.shape.params),
        "files": sum(file.stat().st_size for file in swapped),
        "in_files": engine.arena.live(Place.NVME),
    }
    engine.destroy()
    return found
