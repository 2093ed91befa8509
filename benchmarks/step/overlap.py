"""The share of a step's communication that is hidden behind computation, from the profiler's kernel intervals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Interval = tuple[float, float]
#: Words in the names of kernels: cuBLAS's and CUTLASS's products, and the fused attention's.
_KINDS = {"products": ("gemm", "nvjet", "xmma", "cutlass"), "attention": ("flash", "fmha", "sdpa")}


def profile_step(step: Callable[[], Any], trace: Path | None) -> dict[str, float]:
    """Milliseconds of one `step` on this device: communication, the part hidden behind computation, computation, of it matrix
    products and attention, and idle.
    """
    import torch
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        step()
        torch.cuda.synchronize()
    kernels = [e for e in seen.events() if str(e.device_type).endswith("CUDA") and e.time_range.elapsed_us() > 0]
    if trace is not None:
        seen.export_chrome_trace(str(trace))
    spans = {
        nccl: union([(e.time_range.start, e.time_range.end) for e in kernels if ("nccl" in e.name.lower()) is nccl])
        for nccl in (True, False)
    }
    named = {
        what: length(
            union([(e.time_range.start, e.time_range.end) for e in kernels if any(w in e.name.lower() for w in words)])
        )
        for what, words in _KINDS.items()
    }
    communication, computation = length(spans[True]), length(spans[False])
    busy = length(union(spans[True] + spans[False]))
    whole = max((b for _, b in spans[False]), default=0.0) - min((a for a, _ in spans[False]), default=0.0)
    return {
        "communication_ms": round(communication / 1e3, 3),
        "hidden_ms": round((communication + computation - busy) / 1e3, 3),
        "computation_ms": round(computation / 1e3, 3),
        "idle_ms": round(max(whole - busy, 0.0) / 1e3, 3),
        **{f"{what}_ms": round(took / 1e3, 3) for what, took in named.items()},
    }


def union(intervals: list[Interval]) -> list[Interval]:
    """Merge intervals into disjoint ones in order, over the same points in time."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def length(intervals: list[Interval]) -> float:
    """Sum up the lengths."""
    return sum(end - begin for begin, end in intervals)
