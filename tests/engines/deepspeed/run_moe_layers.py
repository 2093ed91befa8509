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
from deepspeed.utils import groups
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.workload import DType, OptimizerKind, Precision, Workload
from zeroplan.ds_config.reader import read_ds_config
from zeroplan.engines.deepspeed.rank import deepspeed_rank
from zeroplan.engines.deepspeed.schedule import record_deepspeed
from zeroplan.simulate.allocator.events import OP_BITS, AllocatorOp
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
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=case["rank"], world_size=case["ranks"])
    deepspeed.init_distributed("gloo", verbose=False)
    dtype, config = DTYPES[case["dtype"]], case["config"]
    model = Mixture(case["layers"]).to(dtype)
    phases = []

    def allocated(name: str, action: Any) -> Any:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            result = action()
        events = found.profiler.kineto_results.events()
        phases.append([name, [e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() >= case["least"]]])
        return result

    engine, *_ = allocated(
        "init", lambda: deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))
    )
    x = torch.randn(SAMPLES, TOKENS, WIDTH, dtype=dtype)

    def step() -> None:
        for _ in range(config["gradient_accumulation_steps"]):
            engine.backward(engine(x))
            engine.step()

    for number in range(STEPS):
        allocated(f"step{number}", step)
    engine.destroy()
    torch.distributed.destroy_process_group()
    deepspeed.comm.comm.cdb = None
    for known in (groups._EXPERT_PARALLEL_GROUP, groups._EXPERT_DATA_PARALLEL_GROUP):
        known.clear()
    groups._WORLD_GROUP = None
    return phases


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
    recorder = record_deepspeed(rank, tape, steps=STEPS)
    phases: list[Any] = []
    sizes: list[int] = []
    for code, value in zip(recorder.code, recorder.value, strict=True):
        op = code & ((1 << OP_BITS) - 1)
        if op == AllocatorOp.ALLOC and value >= case["least"]:
            sizes.append(value)
        elif op == AllocatorOp.MARK and (name := recorder.marks[value]) not in ("fwd", "bwd"):
            phases.append([name, sizes])
            sizes = []
    return phases[1:]


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # for inference; it would be compiled here
    for one in json.loads(Path(sys.argv[1]).read_text()):
        found = {"id": one["id"], "ours": ours(one), "theirs": theirs(one)}
        print("RESULT " + json.dumps(found), flush=True)
        gc.collect()
