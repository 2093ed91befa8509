"""Runs DeepSpeed's Muon on CPUs and prints what it keeps between steps: how measured_muon.json was made.

Usage, one process a rank: ``python run_muon_on_cpu.py RANK RANKS PORT``. Prints one JSON line a case: elements and bytes of an
element of each state of the optimizer, of the staged momentum and of the gather buffers.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[3])
os.environ.update(RANK=sys.argv[1], LOCAL_RANK=sys.argv[1], WORLD_SIZE=sys.argv[2], LOCAL_SIZE=sys.argv[2])

import deepspeed
import torch

RANK, RANKS = int(sys.argv[1]), int(sys.argv[2])
ACCUM = {"data_types": {"grad_accum_dtype": "fp32"}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
#: name: (stage, dtype, zero_optimization, other blocks)
CASES: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    "0 fp32": (0, "fp32", {}, {}),
    "0 bf16": (0, "bf16", {}, {}),
    "1 bf16": (1, "bf16", {}, {}),
    "1 fp32": (1, "fp32", {}, {}),
    "1 bf16 accum": (1, "bf16", {}, ACCUM),
    "2 bf16": (2, "bf16", {}, {}),
    "2 fp32": (2, "fp32", {}, {}),
    "2 bf16 accum": (2, "bf16", {}, ACCUM),
    "2 bf16 offload": (2, "bf16", OFFLOAD, {}),
    "3 bf16": (3, "bf16", {"reduce_scatter": False}, {}),
    "3 fp32": (3, "fp32", {"reduce_scatter": False}, {}),
    "3 bf16 accum": (3, "bf16", {"reduce_scatter": False}, ACCUM),
    "3 bf16 offload": (3, "bf16", {"reduce_scatter": False, **OFFLOAD}, {}),
}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(96, 64, bias=False)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(64, 64) for _ in range(3)])
        self.last = torch.nn.Linear(64, 40, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x).float().mean()


def sizes(tensors: Any) -> list[list[int]]:
    return [[t.numel(), t.element_size()] for t in tensors]


def run(stage: int, dtype: str, zero: dict[str, Any], other: dict[str, Any]) -> dict[str, list[list[int]]]:
    """Three steps, then what is kept."""
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Muon", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": stage, **zero},
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == "bf16"},
        **other,
    }
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    torch.manual_seed(0)
    model = Model().to(kind)
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))
    for _ in range(3):
        engine.backward(engine(torch.randn(4, 96, dtype=kind)))
        engine.step()
    wrapper = engine.optimizer
    states = getattr(wrapper, "optimizer", wrapper).state.values()
    kept = {key: sizes(state[key] for state in states if key in state) for key in ("momentum_buffer", "exp_avg", "exp_avg_sq")}
    kept["staged"] = sizes(entry[0] for entry in getattr(wrapper, "_muon_pending_momentum", {}).values())
    cached = getattr(wrapper, "_muon_allgather_buffers", {}).values()
    return kept | {"gathers": sizes(t for entry in cached for t in entry[:2])}


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    for name, case in CASES.items():
        print("RESULT " + json.dumps({"ranks": RANKS, "rank": RANK, "case": name, "kept": run(*case)}), flush=True)
        gc.collect()
