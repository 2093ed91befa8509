"""Measures the cases: ``python -m benchmarks.mesh.measure ROWS.jsonl [--two-gpus] [--only RE] [--tiny]``.

On one GPU the other ranks are those of torch's fake process group, whose collectives return at once; operators, FSDP2 and the
caching allocator are real. With ``--two-gpus`` both ranks and NCCL are real. Each rank runs in a process of its own, forked
from one that has imported everything. ``--tiny`` shrinks the models, so that the program can be tried on a CPU.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.forked import failure, run_ranks
from benchmarks.measure.probe import Device
from benchmarks.mesh.cases import CASES, TWO_GPUS, Case
from benchmarks.mesh.ranks import ENGINES
from zeroplan.engines.torch_step import STEPS_UNTIL_STEADY

SECONDS = 60.0
LIBRARIES = ("torch", "transformers", "deepspeed")


def main() -> None:
    """Measure, and write a row a case. Rows of cases that failed are replaced."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--two-gpus", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    kept = [line for line in asked.rows.read_text().splitlines() if json.loads(line)["ok"]] if asked.rows.exists() else []
    asked.rows.write_text("".join(f"{line}\n" for line in kept))
    done = {json.loads(line)["id"] for line in kept}
    for case in TWO_GPUS if asked.two_gpus else CASES:
        if case.id in done or not re.search(asked.only, case.id):
            continue
        began = time.monotonic()
        tried = _tiny(case) if asked.tiny else case
        ranks = case.ranks if asked.two_gpus else 1
        found = run_ranks(partial(measure, tried, fake=not asked.two_gpus), ranks, timeout=SECONDS)
        fault = failure(found)
        row: dict[str, Any] = {
            "id": case.id,
            "case": case.to_dict(),
            "ok": fault is None,
            "seconds": round(time.monotonic() - began, 1),
        }
        row |= {"fault": fault} if fault else _row(case, [answer["value"] for answer in found])
        with asked.rows.open("a") as out:
            out.write(json.dumps(row) + "\n")
        print(case.id, f"{row['seconds']} s", fault or _shown(row), flush=True)


def _row(case: Case, found: list[dict[str, Any]]) -> dict[str, Any]:
    """The measured rank's figures, and those of all ranks where there are others."""
    if len(found) == 1:
        return found[0]
    names = ("allocated", "reserved", "total", "owned")
    each = [{name: rank[name] for name in names if name in rank} for rank in found]
    return found[case.place] | {"per_rank": each}


def _shown(row: dict[str, Any]) -> str:
    names = ("allocated", "reserved", "total", "owned")
    return " ".join(f"{name} {row[name] / 2**20:.1f}" for name in names if name in row)


def _tiny(case: Case) -> Case:
    small = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 512, "head_dim": 8, "moe_intermediate_size": 64}
    return replace(case, model=case.model | small, seq_len=128, alloc_conf="")


def measure(case: Case, rank: int, *, fake: bool) -> dict[str, Any]:
    """Run some steps of a case on one of its ranks; returns the peaks and the state after each part of a step, in bytes.

    Args:
        case: the case.
        rank: this process' number among the real ones.
        fake: whether this is the measured rank among fake ones.
    """
    gpu = Device(rank)
    before = gpu.used()
    device = torch.device("cuda", rank) if gpu.cuda else torch.device("cpu")
    if gpu.cuda:
        if case.alloc_conf:
            torch.cuda.memory._set_allocator_settings(case.alloc_conf)
        torch.cuda.set_device(device)
    place = case.place if fake else rank
    if fake:
        dist.init_process_group("fake", store=FakeStore(), rank=place, world_size=case.ranks)
    else:
        dist.init_process_group("nccl" if gpu.cuda else "gloo", device_id=device if gpu.cuda else None)
    torch.manual_seed(0)
    marks: list[dict[str, Any]] = []
    step = ENGINES[case.engine](case, device, place, lambda name: marks.append(_state(name)), fake=fake)
    for number in range(STEPS_UNTIL_STEADY):
        step(number)
    if gpu.cuda:
        torch.cuda.synchronize()
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
