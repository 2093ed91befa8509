"""Measures the cases on one GPU: ``python -m benchmarks.mesh.measure ROWS.jsonl [--only RE] [--tiny]``.

The other ranks are those of torch's fake process group, whose collectives return at once; operators, FSDP2 and the caching
allocator are real. Each case runs in a process of its own, forked from one that has imported everything. ``--tiny`` shrinks
the models, so that the program can be tried on a CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.forked import failure, run_ranks
from benchmarks.mesh.cases import CASES, Case
from benchmarks.mesh.stage import schedule_on, stage_of
from zeroplan.engines.torch_step import STEPS_UNTIL_STEADY
from zeroplan.trace.tensor_parallel import parallelize
from zeroplan_runtime.units import find_blocks

SECONDS = 60.0


def main() -> None:
    """Measure, and write a row a case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    done = {json.loads(line)["id"] for line in asked.rows.read_text().splitlines()} if asked.rows.exists() else set()
    for case in CASES:
        if case.id in done or not re.search(asked.only, case.id):
            continue
        began = time.monotonic()
        found = run_ranks(partial(_on_rank, _tiny(case) if asked.tiny else case), 1, timeout=SECONDS)
        fault = failure(found)
        row: dict[str, Any] = {
            "id": case.id,
            "case": case.to_dict(),
            "ok": fault is None,
            "seconds": round(time.monotonic() - began, 1),
        }
        row |= {"fault": fault} if fault else found[0]["value"]
        with asked.rows.open("a") as out:
            out.write(json.dumps(row) + "\n")
        print(
            case.id, f"{row['seconds']} s", fault or f"{row['allocated'] / 2**20:.1f} {row['reserved'] / 2**20:.1f}", flush=True
        )


def _on_rank(case: Case, _: int) -> dict[str, Any]:
    return measure(case)


def _tiny(case: Case) -> Case:
    small = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 512, "head_dim": 8}
    return replace(case, model=case.model | small, seq_len=128, alloc_conf="")


def measure(case: Case) -> dict[str, Any]:
    """Run some steps of a case as the first of its ranks; returns the peaks and the state after each step, in bytes."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    if cuda:
        if case.alloc_conf:
            torch.cuda.memory._set_allocator_settings(case.alloc_conf)
        torch.cuda.set_device(device)
    shape = (case.pp, case.dp, case.tp)
    rank = case.pp_rank * case.dp * case.tp
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(shape))
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp", "tp"))
    model = _model(case)
    if case.tp > 1:
        parallelize(model, mesh["tp"], sequence=case.sp)
    if case.pp > 1:
        model = stage_of(model, case)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mesh": mesh["dp"], "reshard_after_forward": case.stage == 3, "mp_policy": policy}
    for block in find_blocks(model).values():
        fully_shard(block, **options)
    fully_shard(model, **options)
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            (parameter.to_local() if isinstance(parameter, DTensor) else parameter).normal_(0, 0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    samples = case.micro_batch * (case.grad_accum if case.pp > 1 else 1)
    ids = torch.randint(3, case.model["vocab_size"], (samples, case.seq_len), device=device)
    marks = [_state("init")]
    pipeline = schedule_on(model, case, mesh["pp"].get_group(), device) if case.pp > 1 else None
    for step in range(STEPS_UNTIL_STEADY):
        if pipeline is not None:
            with loss_parallel() if case.tp > 1 else nullcontext():
                pipeline(ids)
            marks.append(_state(f"bwd{step}"))
        for micro in range(case.grad_accum if pipeline is None else 0):
            model.set_requires_gradient_sync(micro + 1 == case.grad_accum)
            with loss_parallel():
                loss = model(input_ids=ids, labels=ids).loss
                marks.append(_state(f"fwd{step}.{micro}"))
                loss.backward()
            marks.append(_state(f"bwd{step}.{micro}"))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        marks.append(_state(f"step{step}"))
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {
        "allocated": max(mark.get("peak", 0) for mark in marks),
        "reserved": max(mark.get("peak_reserved", 0) for mark in marks),
        "marks": marks,
        "gpu": torch.cuda.get_device_name() if cuda else "cpu",
        "versions": versions,
    }


def _model(case: Case) -> Any:
    """Return the fp32 model on the meta device, ready to train."""
    values = dict(case.model)
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    model.train()
    model.config.use_cache = False
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _state(name: str) -> dict[str, Any]:
    """Return the allocated and reserved bytes, and their peaks since the last mark."""
    if not torch.cuda.is_available():
        return {"mark": name}
    found = {
        "mark": name,
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "peak": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
    }
    torch.cuda.reset_peak_memory_stats()
    return found


if __name__ == "__main__":
    main()
