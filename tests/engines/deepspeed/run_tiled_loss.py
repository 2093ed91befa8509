"""Runs head and loss in DeepSpeed's tiles and in ours, on the same numbers. Started by test_tiled_loss.

Usage: python run_tiled_loss.py CASES.json. A case: ``[samples, tokens, tiles]``. Prints one JSON line a case: the blocks that
each allocates and frees, and whether loss and gradients are the same.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss
from torch import nn

from tests.trace.eager_memory import blocks_of, follow_gradients
from zeroplan.trace.tiled_loss import TiledLossCall

WORDS, WIDTH = 1000, 256


def loss_of(head: nn.Module, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean loss of some tokens."""
    return nn.functional.cross_entropy(head(rows).double(), labels)


def answer(samples: int, tokens: int, tiles: int) -> dict[str, Any]:
    """Run both, and compare them."""
    torch.manual_seed(0)
    theirs = nn.Linear(WIDTH, WORDS, bias=False)
    ours = copy.deepcopy(theirs)
    follow_gradients(ours)
    data, labels = torch.randn(samples, tokens, WIDTH), torch.randint(WORDS, (samples, tokens))
    inputs = [data.clone().requires_grad_(), data.clone().requires_grad_()]
    losses = []

    def run_theirs() -> None:
        found = TiledFusedLogitsLoss.apply(
            loss_of, theirs, inputs[0] * 2, labels, None, tiles, list(theirs.parameters()), "mean"
        )
        found.backward()
        losses.append(found.detach())

    def run_ours() -> None:
        found = TiledLossCall.apply(lambda rows, part: loss_of(ours, rows, part), inputs[1] * 2, labels, tiles)
        found.backward()
        losses.append(found.detach())

    blocks = [blocks_of(run_theirs), blocks_of(run_ours)]
    pairs = [*zip(theirs.parameters(), ours.parameters(), strict=True), (inputs[0], inputs[1])]
    same = torch.equal(*losses) and all(torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-8) for a, b in pairs)
    return {"theirs": blocks[0], "ours": blocks[1], "same": same}


if __name__ == "__main__":
    for case in json.loads(Path(sys.argv[1]).read_text()):
        print("RESULT " + json.dumps(answer(*case)), flush=True)
