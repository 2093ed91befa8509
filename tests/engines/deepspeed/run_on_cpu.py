"""Runs DeepSpeed on the CPU and prints the sizes of what it allocates, phase by phase. Started by test_against_deepspeed.

Usage: python run_on_cpu.py CASES.json. A case: ``{"id", "dtype", "shapes", "config"}``. Prints one JSON line a case:
``{"id", "phases": [[name, [bytes, …]], …]}``, allocations of at least `LEAST` bytes in order.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1")

import deepspeed
import torch
from torch.profiler import ProfilerActivity, profile

LEAST = 100_000
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Chain(torch.nn.Module):
    """Linear layers without bias, one after another."""

    def __init__(self, shapes: list[list[int]]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(into, out, bias=False) for out, into in shapes])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x[..., : layer.in_features])
        return x.float().mean()


def allocated(action: Any) -> tuple[Any, list[int]]:
    """What an action returns, and the sizes it allocates."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        result = action()
    events = found.profiler.kineto_results.events()
    return result, [e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() >= LEAST]


def run(case: dict[str, Any]) -> dict[str, Any]:
    """One case: initialisation and two steps of a window each."""
    config, dtype = case["config"], DTYPES[case["dtype"]]
    window = config.get("gradient_accumulation_steps", 1)
    model = Chain(case["shapes"]).to(dtype)
    params = list(model.parameters())
    phases = []
    (engine, *_), sizes = allocated(lambda: deepspeed.initialize(model=model, config=config, model_parameters=params))
    phases.append(["init", sizes])
    x = torch.randn(4, case["shapes"][0][1], dtype=dtype)

    def step() -> None:
        for _ in range(window):
            engine.backward(engine(x))
            engine.step()

    for i in range(2):
        _, sizes = allocated(step)
        phases.append([f"step{i}", sizes])
    engine.destroy()
    return {"id": case["id"], "phases": phases}


if __name__ == "__main__":
    gc.freeze()  # else every collection, and DeepSpeed asks for many, goes through all that torch has imported
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # for inference; it would be compiled here
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)  # needs no port
    deepspeed.init_distributed("gloo", verbose=False)
    for one in json.loads(Path(sys.argv[1]).read_text()):
        print("RESULT " + json.dumps(run(one)), flush=True)
        gc.collect()
        gc.freeze()
