"""Small models of odd sizes, their data, and training them in plain torch, which the runtime is held against."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

VOCAB, WIDTH, LENGTH, BATCH = 53, 20, 7, 3


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width, bias=False)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(self.norm(x)).chunk(3, -1)
        x = x + functional.scaled_dot_product_attention(q, k, v, is_causal=True) * self.gain
        return x + self.down(functional.gelu(self.up(x)))


class Tiny(nn.Module):
    """A causal LM of 5 unequal blocks. `tied`: the head shares the embedding; `unused`: a parameter without gradient; `odd`:
    every other MLP has an odd number of channels.
    """

    def __init__(self, *, tied: bool = False, unused: bool = False, remat: str = "", depth: int = 5, odd: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, 31 + 5 * (i % 2) if odd else 32 + 4 * (i % 2)) for i in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if unused:
            self.blocks[1].register_parameter("never", nn.Parameter(torch.randn(11)))
        self.remat = remat

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            if self.remat and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=self.remat == "reentrant")
            else:
                x = block(x)
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def make(seed: int = 0, **options: Any) -> Tiny:
    torch.manual_seed(seed)
    return Tiny(**options)


def batch(step: int, micro: int, rank: int) -> torch.Tensor:
    """The tokens that `rank` sees in micro batch `micro` of `step`."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)


@dataclass
class Plain:
    """One process that computes what N ranks should: mean gradients, clipped, applied to fp32 masters."""

    model: nn.Module
    optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer]
    ranks: int = 1
    accum: int = 1
    dtype: torch.dtype = torch.float32
    clip: float = 0.0
    scale: float = 1.0
    length: int = LENGTH

    def __post_init__(self) -> None:
        self.model = copy.deepcopy(self.model)
        self.masters = {n: p.detach().clone() for n, p in self.model.named_parameters() if p.requires_grad}
        self.model.to(self.dtype)
        self.params = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.opt = self.optimizer(list(self.masters.values()))
        self.norm = 0.0

    def step(self, number: int) -> list[float]:
        """One step; returns each rank's mean loss."""
        losses = []
        sums: dict[str, torch.Tensor] = {}
        for rank in range(self.ranks):
            for p in self.params.values():
                p.grad = None
            total = 0.0
            for micro in range(self.accum):
                loss = self.model(batch(number, micro, rank)[:, : self.length]) / self.accum
                (loss * self.scale).backward()
                total += loss.item()
            losses.append(total)
            for name, p in self.params.items():
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                sums[name] = sums[name] + grad if name in sums else grad.clone()
        for name, master in self.masters.items():
            master.grad = (sums[name] / self.ranks).float() / self.scale
        self.norm = float(nn.utils.clip_grad_norm_(self.masters.values(), self.clip or float("inf")))
        self.opt.step()
        with torch.no_grad():
            for name, p in self.params.items():
                p.copy_(self.masters[name])
        return losses


class RoundedAdamW(torch.optim.Optimizer):
    """AdamW whose every operation rounds on its own, in the order that zeroplan_runtime's kernels keep.

    torch's own fuses some multiplications and additions, so it agrees to rounding only; this one should agree bitwise.
    """

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["step"] += 1
                m, v, root2 = state["m"], state["v"], 1 / (1 - 0.999 ** state["step"]) ** 0.5
                m.copy_(m * 0.9 + p.grad * (1 - 0.9))
                v.copy_(v * 0.999 + p.grad * (1 - 0.999) * p.grad)
                root = v.double().sqrt().float()  # correctly rounded, which torch's fp32 root is not everywhere
                step = (m / (root * root2 + 1e-8)) * (group["lr"] / (1 - 0.9 ** state["step"]))
                p.copy_(p * (1 - group["lr"] * group["weight_decay"]) - step)
