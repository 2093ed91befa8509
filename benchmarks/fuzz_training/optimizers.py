"""LAMB and Lion in plain torch, tensor by tensor and as their papers write them, for the plain side."""

from __future__ import annotations

import math
from typing import Any

import torch


class Lamb(torch.optim.Optimizer):
    """You et al. 2020, algorithm 2, in DeepSpeed's form: the corrections are in the rate, trust ratios have bounds."""

    def __init__(self, params: Any, *, betas: tuple[float, float], eps: float, least: float = 0.01, most: float = 10.0) -> None:
        super().__init__(params, {"lr": 0.1, "betas": betas, "eps": eps, "weight_decay": 0.0, "least": least, "most": most})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), decay = group["betas"], group["weight_decay"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["step"] += 1
                state["m"].lerp_(p.grad, 1 - beta1)
                state["v"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                update = state["m"] / (state["v"].sqrt() + group["eps"]) + decay * p
                weight, length = p.double().norm(), update.double().norm()
                trust = min(max((weight / length).item(), group["least"]), group["most"]) if weight and length else 1.0
                correction = math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
                p.sub_(update, alpha=group["lr"] * correction * trust)


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, algorithm 2."""

    def __init__(self, params: Any, *, betas: tuple[float, float]) -> None:
        super().__init__(params, {"lr": 0.1, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), rate = group["betas"], group["lr"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                direction = torch.lerp(m, p.grad, 1 - beta1).sign_()
                p.mul_(1 - rate * group["weight_decay"]).sub_(direction, alpha=rate)
                m.lerp_(p.grad, 1 - beta2)
