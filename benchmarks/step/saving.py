r"""What a checkpoint costs the steps beside which it is written, at once or while training goes on.

    python -m benchmarks.step.saving --out saving.jsonl --folder FOLDER [--ranks 2] [--shape llama-1b] [--micro 4]

Undisturbed steps are timed first, then those from ``save_checkpoint`` on until the checkpoint has its name, each to the end of
its work on the device. `extra_ms` is what a save adds to them in all; `of_a_step`, as a part of the undisturbed time of
:data:`BETWEEN` steps. `least_s` is the time that the same bytes take from memory to the same folder by plain writes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.forked import failure, run_ranks
from benchmarks.measure.worker import versions
from benchmarks.step.case import Case
from benchmarks.step.timing import WARM_STEPS, batch, command, join, warm

#: Steps from one save to the next, over which its cost is spread.
BETWEEN = 100
_PIECE = 1 << 26


def measured(case: Case, asynchronous: bool, arguments: argparse.Namespace, rank: int) -> dict[str, Any]:
    """Run one rank; returns times in milliseconds."""
    import torch
    import torch.distributed as dist

    from benchmarks.step.engines import build

    device = join(rank)
    step, engine = build(case, arguments.shape, arguments.micro, device, async_checkpoints=asynchronous)
    tokens = [batch(number, rank, arguments).to(device) for number in range(4)]

    def one(number: int) -> float:
        begin = time.perf_counter()
        step(tokens[number % len(tokens)])
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) * 1e3

    for number in range(WARM_STEPS):
        one(number)
    alone = statistics.median(one(number) for number in range(arguments.steps))
    folder = arguments.folder / "saved"
    saves = []
    for save in range(arguments.saves):
        begin = time.perf_counter()
        path = engine.save_checkpoint(folder, tag=f"save{save}")
        call = (time.perf_counter() - begin) * 1e3
        steps: list[float] = []
        while True:  # ranks stop at the same step
            there = torch.tensor(float(path.exists()), device=device)
            dist.all_reduce(there, op=dist.ReduceOp.MIN)
            if there.item() or len(steps) >= arguments.most:
                break
            steps.append(one(len(steps)))
        begin = time.perf_counter()
        engine.wait_for_checkpoint()
        waited = (time.perf_counter() - begin) * 1e3
        extra = call + waited + sum(steps) - alone * len(steps)
        saves.append({"call_ms": call, "steps": len(steps), "waited_ms": waited, "longest_ms": max(steps, default=0.0)})
        saves[-1] |= {"extra_ms": extra, "of_a_step": extra / (BETWEEN * alone)}
    size = sum(one.stat().st_size for one in path.iterdir())
    least = _plain_writes(arguments.folder / f"plain{rank}", size // dist.get_world_size())
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    return {"step_ms": alone, "saves": saves, "checkpoint_bytes": size, "least_s": least, "gpu": _card(device)}


def _card(device: Any) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _plain_writes(file: Path, size: int) -> float:
    """Write `size` bytes and flush them; returns the seconds."""
    piece = bytes(_PIECE)
    begin = time.perf_counter()
    with file.open("wb") as stream:
        for _ in range(0, size, _PIECE):
            stream.write(piece)
        stream.flush()
        os.fsync(stream.fileno())
    seconds = time.perf_counter() - begin
    file.unlink()
    return seconds


def main() -> int:
    """Run both forms; add a row each, of the rank that lost the most."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shape", default="llama-1b")
    parser.add_argument("--micro", type=int, default=4)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--saves", type=int, default=2)
    parser.add_argument("--most", type=int, default=400, help="steps that are waited for a checkpoint")
    parser.add_argument("--case", type=Case.parse, default=Case.parse("zeroplan:3+compile"))
    parser.add_argument("--timeout", type=float, default=120)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    warm(arguments.case.engine)
    faults = 0
    for asynchronous in (True, False):
        rank = partial(measured, arguments.case, asynchronous, arguments)
        found = run_ranks(rank, arguments.ranks, timeout=arguments.timeout)
        fault = failure(found)
        row: dict[str, Any] = {"case": str(arguments.case), "asynchronous": asynchronous, "shape": arguments.shape}
        row |= {"ranks": arguments.ranks, "micro": arguments.micro, "seq": arguments.seq, "versions": versions()}
        row["command"] = command("benchmarks.step.saving")
        worst = {} if fault else max((one["value"] for one in found), key=lambda value: value["saves"][-1]["extra_ms"])
        row |= {"fault": fault} if fault else worst
        faults += fault is not None
        with arguments.out.open("a") as out:
            out.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
    return int(faults > 0)


if __name__ == "__main__":
    raise SystemExit(main())
