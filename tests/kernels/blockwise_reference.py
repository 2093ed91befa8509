"""AdamW with moments in blocks of 8 or 4 bits, written from the papers and independently of the package: slow and plain.

Dettmers et al. 2022, sections 2.1 and 2.2; Li et al. 2023, section 4. The scale is the element of largest magnitude with its
sign, and the second moment has no level 0.
"""

from __future__ import annotations

from typing import Any

import torch

#: Elements that share a scale, by bits.
BLOCK = {8: 256, 4: 128}


def dynamic(decades: int, cells: int) -> list[float]:
    """The middles of evenly spaced points in each decade below 1, where the first has `cells` cells and each other twice as
    many as the one before.
    """
    found: list[float] = []
    for i in range(decades):
        points = torch.linspace(0.1, 1, cells * 2**i + 1, dtype=torch.float64)
        found += ((points[1:] + points[:-1]) / 2 * 10.0 ** (i + 1 - decades)).tolist()
    return found


def levels(bits: int, moment: int) -> torch.Tensor:
    """All values that a code of the first (0) or the second (1) moment stands for, fp64, rising."""
    if moment == 0:
        magnitudes = dynamic(bits - 1, 1)
        return torch.tensor([-x for x in reversed(magnitudes)] + [0.0, *magnitudes, 1.0], dtype=torch.float64)
    if bits == 4:
        return torch.arange(1, 17, dtype=torch.float64) / 16
    return torch.tensor([1e-7, *dynamic(7, 2), 1.0], dtype=torch.float64)


def rounded(values: torch.Tensor, bits: int, moment: int) -> torch.Tensor:
    """What `values`, fp32 of any length, become when they are kept as codes and scales."""
    block, numel = BLOCK[bits], values.numel()
    rows = torch.zeros(-(-numel // block) * block)
    rows[:numel] = values.flatten()
    rows = rows.view(-1, block)
    magnitudes = levels(bits, moment)
    magnitudes = magnitudes[magnitudes >= 0].float()
    middles = ((magnitudes[1:].double() + magnitudes[:-1].double()) / 2).float()
    made = torch.empty_like(rows)
    for i, row in enumerate(rows):
        high, low = float(row.max()), float(row.min())
        scale = row.new_tensor(low if -low >= high else high)
        if abs(float(scale)) < 2.0**-120:
            made[i] = 0.0
            continue
        scaled = row * (row.new_ones(()) / scale)  # fp32, as the kernels compute it
        rank = (scaled.abs().unsqueeze(1) >= middles).sum(1)  # the nearest, in the middle of two the larger
        if moment == 0:
            rank = torch.where(scaled < 0, rank.clamp(max=len(magnitudes) - 2), rank)  # −1 is no level
        made[i] = magnitudes[rank] * scaled.sign().where(torch.tensor(moment == 0), torch.ones(())) * scale
    return made.flatten()[:numel].view_as(values)


class BlockwiseAdamW(torch.optim.Optimizer):
    """One tensor after another; every operation rounds on its own, in the kernels' order, so it should agree bitwise."""

    def __init__(self, params: Any, lr: float, bits: int, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.bits = bits

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["step"] += 1
                m = state["m"] * 0.9 + p.grad * (1 - 0.9)
                v = state["v"] * 0.999 + p.grad * (1 - 0.999) * p.grad
                root = v.double().sqrt().float() * (1 / (1 - 0.999 ** state["step"]) ** 0.5)
                step = (m / (root + 1e-8)) * (group["lr"] / (1 - 0.9 ** state["step"]))
                p.copy_(p * (1 - group["lr"] * group["weight_decay"]) - step)
                state["m"], state["v"] = rounded(m, self.bits, 0), rounded(v, self.bits, 1)
