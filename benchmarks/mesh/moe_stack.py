"""A stack of DeepSpeed's MoE layers: what a plan says of it, and a rank that trains it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from deepspeed.moe.layer import MoE
from torch import nn

import zeroplan

WIDTH, INNER, LAYERS = 1024, 4096, 8


class Stack(nn.Module):
    """Mixtures of experts between norms, with residuals; each layer's loss of balance is added."""

    def __init__(self, layers: Mapping[str, Any]) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))
        self.mixtures = nn.ModuleList([MoE(WIDTH, expert, **layers) for _ in range(LAYERS)])
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss of hidden states [B, S, WIDTH]."""
        balance: Any = 0.0
        for norm, mixture in zip(self.norms, self.mixtures, strict=True):
            made, loss, _ = mixture(norm(x))
            x, balance = x + made, balance + loss
        found: torch.Tensor = self.head(x).float().pow(2).mean() + 0.01 * balance
        return found


def planned(layers: Mapping[str, Any], samples: int, tokens: int, **asked: Any) -> Any:
    """Return the plan's GPU figures."""
    plans = zeroplan.estimate(Stack(layers), inputs=torch.empty(samples, tokens, WIDTH), engine="deepspeed", **asked)
    return plans[0].gpu


def step_of(layers: Mapping[str, Any], samples: int, tokens: int, config: dict[str, Any], device: Any) -> Callable[[], float]:
    """Return a function that trains one step of the stack on this rank."""
    import deepspeed

    model = Stack(layers).to(torch.bfloat16).to(device)
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))

    def step() -> float:
        for _ in range(config["gradient_accumulation_steps"]):
            loss = engine(torch.randn(samples, tokens, WIDTH, dtype=torch.bfloat16, device=device))
            engine.backward(loss)
            engine.step()
        return float(loss.detach())

    return step
