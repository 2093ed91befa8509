"""What a function allocates and frees in eager torch, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from zeroplan.trace import tiled

#: Bytes below which a block is not looked at: scalars, and what kernels of a CPU take for themselves.
LEAST = 4096


class GatedMlp(nn.Module):
    """An MLP as Llama's."""

    def __init__(self, hidden: int = 256, inner: int = 704) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[B, S, H] to [B, S, H]."""
        made: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))
        return made


def blocks_of(function: Callable[[], Any]) -> list[int]:
    """The bytes that the function allocates (above zero) and frees (below), in order."""
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        function()
    inner: Any = profiled.profiler
    found = [event for event in inner.kineto_results.events() if event.name() == "[memory]"]
    found.sort(key=lambda event: event.start_ns())
    return lasting(event.nbytes() for event in found if abs(event.nbytes()) >= LEAST)


def lasting(blocks: Iterable[int]) -> list[int]:
    """The blocks without those that are freed before another is made or freed, as kernels' own are."""
    kept: list[int] = []
    for size in blocks:
        if size < 0 and kept and kept[-1] == -size:
            kept.pop()
        else:
            kept.append(size)
    return kept


def follow_gradients(module: nn.Module) -> None:
    """Let the module's gradients add up over tiles, as the tracer's hooks do."""

    def hook(param: torch.Tensor) -> None:
        tiled.held_back(param)

    for param in module.parameters():
        param.register_post_accumulate_grad_hook(hook)
