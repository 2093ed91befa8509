"""Measures what modelled times of layouts rest on: collectives alone, kernels alone and beside them, and the host's part.

    torchrun --nproc-per-node 2 -m benchmarks.layouts.contention FILE
    python -m benchmarks.layouts.contention FILE --host 1 2

The first writes a line of JSON for each collective and size, then for each kernel alone and beside gathers, whose own time
beside it is told, too. The second writes what ``zeroplan doctor --calibrate`` measures of the host, with so many processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zeroplan.search.calibrate_host import measure_host

_MIB = 2**20
_SIZES = (1, 4, 16, 64, 128, 256, 1024)
_CALLS, _REPEATS = 10, 3
#: Collectives that are issued beside kernels of some 20 ms, to outlast them though these slow down.
_COLLECTIVES = 200


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--host", type=int, nargs="+", help="numbers of processes")
    parser.add_argument("--most", type=int, default=1024, help="MiB of the largest collective")
    asked = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def write(row: dict[str, Any]) -> None:
        if int(os.environ.get("RANK", "0")) == 0:
            with asked.file.open("a") as out:
                out.write(json.dumps(row) + "\n")
            print(row, flush=True)

    if asked.host:
        for ranks in asked.host:
            load = os.getloadavg()[0]
            write({"what": "host", "processes": ranks, "load": load, "cores": os.cpu_count(), **measure_host(ranks, device)})
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    gpu = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    machine = {"gpu": f"{dist.get_world_size()} × {gpu}", "torch": torch.__version__}
    for name, size, passed, run in _collectives(device, asked.most):
        seconds = _timed(run)
        write({**machine, "what": name, "mib": size / _MIB, "ms": 1e3 * seconds, "bus_gbs": passed / seconds / 1e9})
    _beside(device, asked.most, lambda row: write({**machine, **row}))
    dist.destroy_process_group()


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _timed(run: Callable[[], object]) -> float:
    """Return the mean seconds of calls that are issued one behind the other, of the fastest repetition on the slowest rank."""
    run()
    found = []
    for _ in range(_REPEATS):
        dist.barrier()
        _wait()
        begin = time.perf_counter()
        for _ in range(_CALLS):
            run()
        _wait()
        found.append((time.perf_counter() - begin) / _CALLS)
    slowest = torch.tensor(min(found), device="cuda" if torch.cuda.is_available() else "cpu")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def _collectives(device: str, most: int) -> list[tuple[str, int, float, Callable[[], object]]]:
    """Return collectives by name, bytes of the whole buffer and bytes that a rank sends, as nccl-tests count them."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.zeros(most * _MIB // 2, dtype=torch.bfloat16, device=device)
    part = torch.zeros(most * _MIB // 2 // ranks, dtype=torch.bfloat16, device=device)

    def send(size: int) -> None:
        ends = [
            dist.P2POp(dist.isend, part[: size // ranks // 2], (rank + 1) % ranks),
            dist.P2POp(dist.irecv, whole[: size // ranks // 2], (rank - 1) % ranks),
        ]
        for one in dist.batch_isend_irecv(ends):
            one.wait()

    found: list[tuple[str, int, float, Callable[[], object]]] = []
    for mib in _SIZES:
        size = mib * _MIB
        if mib > most:
            continue
        many, few = whole[: size // 2], part[: size // 2 // ranks]
        sent = size * (ranks - 1) / ranks
        wide, narrow = many.view(torch.float32), few.view(torch.float32)
        found += [
            ("all_gather", size, sent, partial(dist.all_gather_into_tensor, many, few)),
            ("reduce_scatter", size, sent, partial(dist.reduce_scatter_tensor, few, many)),
            ("reduce_scatter fp32", size, sent, partial(dist.reduce_scatter_tensor, narrow, wide)),
            ("all_reduce", size, 2 * sent, partial(dist.all_reduce, many)),
            ("send", size // ranks, size / ranks, partial(send, size)),
        ]
        if device == "cuda":
            found.append(("all_to_all", size, sent, partial(dist.all_to_all_single, torch.zeros_like(many), many)))
    return found


def _kernels(device: str) -> dict[str, Callable[[], object]]:
    """Return kernels of a training step, each of some tenths of a millisecond on an H100."""
    cuda = device == "cuda"
    n = 8192 if cuda else 64

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    a, b, square = some(n, n // 4), some(n // 4, n), some(n // 2, n // 2)
    values, result = some(n * n), some(n * n)
    q = some(1, 32, n // 2, 64)
    params = [torch.zeros(n * n, device=device, requires_grad=True)]
    params[0].grad = torch.zeros_like(params[0])
    adam = torch.optim.AdamW(params, fused=True)
    found: dict[str, Callable[[], object]] = {
        "product 8192 × 2048 × 8192": lambda: a @ b,
        "product 4096 × 4096 × 4096": lambda: square @ square,
        "sum": lambda: torch.add(values, values, out=result),
        "attention": lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True),
        "fused AdamW, 67,108,864 elements": adam.step,
    }
    if cuda:
        experts = some(128, 1536, 2048).transpose(1, 2)
        tokens = some(32768, 2048)
        ends = torch.arange(1, 129, device=device, dtype=torch.int32) * 256
        found["grouped products, 128 × 256 × 2048 × 1536"] = lambda: torch._grouped_mm(tokens, experts, ends)
    return found


def _beside(device: str, most: int, write: Callable[[dict[str, Any]], None]) -> None:
    """Time each kernel alone and beside collectives of another stream that last longer, and those beside it."""
    ranks = dist.get_world_size()
    size = min(256, most) * _MIB // 2
    whole = torch.zeros(size, dtype=torch.bfloat16, device=device)
    part = torch.zeros(size // ranks, dtype=torch.bfloat16, device=device)
    ways = {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
    }
    for name, run in _kernels(device).items():
        try:
            row: dict[str, Any] = {"what": name, "alone_ms": 1e3 * _timed(run)}
        except RuntimeError as error:  # a kernel that this torch or card lacks
            write({"what": name, "refused": str(error)[:200]})
            continue
        if device == "cuda":
            count = max(4, int(20 / row["alone_ms"]))
            for way, collective in ways.items():
                kernel, other = _both(run, count, collective)
                row[way] = {"kernel_ms": kernel, "collective_ms": other}
        write(row)


def _both(run: Callable[[], object], count: int, collective: Callable[[], object]) -> tuple[float, float]:
    """Return the ms of a kernel and of a collective which run beside each other for `count` kernels."""
    side = torch.cuda.Stream()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(_COLLECTIVES)]
    dist.barrier()
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)  # so that the host is ahead of both streams
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for mark in marks:
            collective()
            mark.record(side)
    begin.record()
    for _ in range(count):
        run()
    end.record()
    torch.cuda.synchronize()
    whole = begin.elapsed_time(end)
    within = [at for at in (begin.elapsed_time(mark) for mark in marks) if 0 < at < whole]
    spaces = [later - earlier for earlier, later in pairwise(within)]
    return whole / count, statistics.median(spaces) if spaces else 0.0


if __name__ == "__main__":
    main()
