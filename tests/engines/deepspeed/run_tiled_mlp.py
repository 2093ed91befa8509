"""Runs an MLP in DeepSpeed's tiles and in ours, on the same numbers. Started by test_tiled_mlp.

Usage: python run_tiled_mlp.py CASES.json. A case: ``[samples, tokens, tiles]``. Prints one JSON line a case: the blocks that
each allocates and frees, and whether the gradients are the same.
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
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

from tests.trace.eager_memory import GatedMlp, blocks_of, follow_gradients
from zeroplan.trace.tiled import tile_mlps


def answer(samples: int, tokens: int, tiles: int) -> dict[str, Any]:
    """Run both, and compare them."""
    torch.manual_seed(0)
    theirs = GatedMlp()
    ours = copy.deepcopy(theirs)
    tile_mlps(torch.nn.ModuleList([ours]), tiles)
    follow_gradients(ours)
    data, grad = torch.randn(samples, tokens, 256), torch.randn(samples, tokens, 256)
    inputs = [data.clone().requires_grad_(), data.clone().requires_grad_()]

    def run_theirs() -> None:
        TiledMLP.apply(GatedMlp.forward, theirs, inputs[0] * 2, tiles, list(theirs.parameters())).backward(grad)

    def run_ours() -> None:
        ours(inputs[1] * 2).backward(grad)

    blocks = [blocks_of(run_theirs), blocks_of(run_ours)]
    pairs = [*zip(theirs.parameters(), ours.parameters(), strict=True), (inputs[0], inputs[1])]
    same = all(torch.equal(a.grad, b.grad) for a, b in pairs)
    return {"theirs": blocks[0], "ours": blocks[1], "same": same}


if __name__ == "__main__":
    for case in json.loads(Path(sys.argv[1]).read_text()):
        print("RESULT " + json.dumps(answer(*case)), flush=True)
