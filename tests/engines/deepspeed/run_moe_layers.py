"""Runs DeepSpeed on a module with its MoE layers on one rank of many, beside our plan of it. Started by test_moe_layers.

The rank is on the CPU, with a process group that does nothing.

Usage: python run_moe_layers.py CASES.json. A case: ``{"id", "dtype", "ranks", "rank", "layers", "config", "least"}``, of which
`layers` are arguments of ``deepspeed.moe.layer.MoE``. Prints one JSON line a case: ``{"id", "ours", "theirs"}``, each
``[[phase, [bytes, …]], …]``: allocations of at least `least` bytes, in order.
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
from deepspeed.moe.layer import MoE

from tests.engines.deepspeed import phases
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.workload import DType, OptimizerKind, Precision, Workload
from zeroplan.ds_config.reader import read_ds_config
from zeroplan.engines.deepspeed.rank import deepspeed_rank
from zeroplan.engines.deepspeed.schedule import record_deepspeed
from zeroplan.tape.options import options_for
from zeroplan.trace.example import trace_example

WIDTH, SAMPLES, TOKENS, STEPS = 256, 2, 8, 2
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Mixture(torch.nn.Module):
    """Two linear layers around two mixtures of experts, whose sizes are odd."""

    def __init__(self, layers: dict[str, Any]) -> None:
        super().__init__()
        expert = torch.nn.Sequential(torch.nn.Linear(WIDTH, 517), torch.nn.GELU(), torch.nn.Linear(517, WIDTH))
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.mixtures = torch.nn.ModuleList([MoE(WIDTH, expert, **layers) for _ in range(2)])
        self.last = torch.nn.Linear(WIDTH, 501)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, balance = self.first(x), 0.0
        for mixture in self.mixtures:
            made, loss, _ = mixture(hidden)
            hidden, balance = hidden + made, balance + loss
        return self.last(hidden).float().pow(2).mean() + 0.01 * balance


def theirs(case: dict[str, Any]) -> list[Any]:
    """What DeepSpeed allocates at initialisation and in each step of a window."""
    phases.begin(case)
    dtype, config = DTYPES[case["dtype"]], case["config"]
    model = Mixture(case["layers"]).to(dtype)

    x = torch.randn(SAMPLES, TOKENS, WIDTH, dtype=dtype)
    return phases.of_deepspeed(
        case,
        lambda: deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters())),
        lambda engine: engine(x),
        STEPS,
    )


def ours(case: dict[str, Any]) -> list[Any]:
    """Return what the plan's schedule allocates and frees in the same case, phase by phase."""
    config = read_ds_config(case["config"])
    dtype = DType(case["dtype"])
    workload = Workload.of(
        micro_batch=SAMPLES,
        seq_len=TOKENS,
        grad_accum=case["config"]["gradient_accumulation_steps"],
        dtype=dtype,
        precision=Precision.FP32 if dtype is DType.FP32 else Precision.MIXED,
        optimizer_kind=OptimizerKind.LOOP,
    )
    model = Mixture(case["layers"])
    tape = trace_example(model, torch.empty(SAMPLES, TOKENS, WIDTH), options_for(workload)).expand(SAMPLES, TOKENS)
    layout = ParallelLayout(case["ranks"], ep=case["layers"].get("ep_size", 1), own_experts=True)
    rank = deepspeed_rank(tape.parameters, workload, config.zero, layout, rank=case["rank"])
    return phases.of_plan(record_deepspeed(rank, tape, steps=STEPS), case["least"])


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # for inference; it would be compiled here
    for one in json.loads(Path(sys.argv[1]).read_text()):
        found = {"id": one["id"], "ours": ours(one), "theirs": theirs(one)}
        print("RESULT " + json.dumps(found), flush=True)
        gc.collect()
