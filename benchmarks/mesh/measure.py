"""Measures the cases: ``python -m benchmarks.mesh.measure ROWS.jsonl [--two-gpus] [--only RE] [--tiny] [--histories FOLDER]``.

On one GPU the other ranks are those of torch's fake process group, whose collectives return at once; operators, FSDP2 and the
caching allocator are real. With ``--two-gpus`` both ranks and NCCL are real. Each rank runs in a process of its own, forked
from one that has imported everything. ``--tiny`` shrinks the models, so that the program can be tried on a CPU.
"""

from __future__ import annotations

import time
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.measure import history
from benchmarks.measure.probe import Device
from benchmarks.measured_cases import measure_cases
from benchmarks.mesh.cases import CASES, TWO_GPUS, Case
from benchmarks.mesh.ranks import ENGINES
from zeroplan.engines.torch_step import STEPS_UNTIL_STEADY

SECONDS = 60.0
LIBRARIES = ("torch", "transformers", "deepspeed")


def _tiny(case: Case) -> Case:
    small = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 512, "head_dim": 8, "moe_intermediate_size": 64}
    return replace(case, model=case.model | small, seq_len=128, alloc_conf="")


def measure(case: Case, rank: int, *, fake: bool, histories: Path | None = None) -> dict[str, Any]:
    """Run some steps of a case on one of its ranks; returns the peaks and the state after each part of a step, in bytes.

    Args:
        case: the case.
        rank: this process' number among the real ones.
        fake: whether this is the measured rank among fake ones.
        histories: where the recorded events of the allocator go; None records none.
    """
    gpu = Device(rank)
    before = gpu.used()
    device = torch.device("cuda", rank) if gpu.cuda else torch.device("cpu")
    if gpu.cuda:
        if case.alloc_conf:
            torch.cuda.memory._set_allocator_settings(case.alloc_conf)
        torch.cuda.set_device(device)
    recorded = gpu.cuda and histories is not None
    if recorded:
        history.start(cpp_stacks=False)
    place = case.place if fake else rank
    if fake:
        dist.init_process_group("fake", store=FakeStore(), rank=place, world_size=case.ranks)
    else:
        dist.init_process_group("nccl" if gpu.cuda else "gloo", device_id=device if gpu.cuda else None)
    torch.manual_seed(0)
    marks: list[dict[str, Any]] = []
    step = ENGINES[case.engine](case, device, place, lambda name: marks.append(_state(name, timed=recorded)), fake=fake)
    for number in range(STEPS_UNTIL_STEADY):
        step(number)
    if gpu.cuda:
        torch.cuda.synchronize()
    if recorded and histories is not None:
        events = history.collect(marks, {"case": case.to_dict(), "rank": place})
        history.write(events, histories / f"{case.id}-{place}.json.gz")
    row = {
        "allocated": max(mark.get("peak", 0) for mark in marks),
        "reserved": max(mark.get("peak_reserved", 0) for mark in marks),
        "marks": marks,
        "gpu": torch.cuda.get_device_name() if gpu.cuda else "cpu",
        "versions": {name: found for name in LIBRARIES if (found := _version(name))},
    }
    if not fake:
        row["total"] = gpu.used() - before
    arena = getattr(step, "arena", None)
    if arena is not None:
        row["owned"] = arena.peak()
    return row


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def _state(name: str, *, timed: bool) -> dict[str, Any]:
    """Return the allocated and reserved bytes, and their peaks since the last mark; where `timed` also when that was."""
    if not torch.cuda.is_available():
        return {"mark": name}
    if timed:
        torch.cuda.synchronize()
    found: dict[str, Any] = {"time_us": time.time_ns() // 1000} if timed else {}
    found |= {
        "mark": name,
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "peak": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
    }
    torch.cuda.reset_peak_memory_stats()
    return found


if __name__ == "__main__":
    measure_cases(__doc__ or "", CASES, TWO_GPUS, measure, tiny=_tiny, seconds=SECONDS, by_place=True)
