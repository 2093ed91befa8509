"""A module and a batch in plain torch, as users have them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

WIDTH, VOCAB = 40, 300


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens: torch.Tensor, kind: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return {"loss": functional.cross_entropy(self.head(x.mean(1)).float(), kind)}


def batch() -> dict[str, torch.Tensor]:
    return {"tokens": torch.arange(16 * 32).view(16, 32) % VOCAB, "kind": torch.arange(16) % 3}
