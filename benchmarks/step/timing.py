"""The shared part of timed cases: how a rank joins, the batches, the timed steps, and what a row says of its making."""

from __future__ import annotations

import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

#: Untimed steps, which repeat one batch so that their losses tell whether two engines train alike.
WARM_STEPS = 6


def warm(cases: str) -> None:
    """Imports what the cases need, once, without touching CUDA."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    needed = ["torch.distributed.fsdp", "transformers.models.llama.modeling_llama", "zeroplan_runtime"]
    for module in needed + ["deepspeed"] * ("deepspeed" in cases):
        import_module(module)


def command(module: str) -> str:
    """The command that made a result; of absolute paths, which are this machine's, the last part."""
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    return " ".join(["python3 -m", module, *words])


def join(rank: int) -> Any:
    """Makes this process a rank, and returns its device."""
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def batch(number: int, rank: int, arguments: Namespace) -> Any:
    """Return the token ids [micro, seq], the same for every engine."""
    import torch

    from benchmarks.step.case import SHAPES

    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randint(0, SHAPES[arguments.shape]["vocab_size"], (arguments.micro, arguments.seq), generator=generator)


def timed(
    step: Callable[[Any], Any], arguments: Namespace, rank: int, device: Any, *, finish: Callable[[], object] | None = None
) -> dict[str, Any]:
    """Time the steps; returns losses of the warm ones, the median of the timed ones, and the peaks of torch's allocator over
    these.

    `finish` is called after the last step, outside the time.
    """
    import torch

    cuda = device.type == "cuda"
    inputs = [batch(max(n, 0), rank, arguments).to(device) for n in range(1 - WARM_STEPS, arguments.steps + 1)]
    losses = [step(tokens) for tokens in inputs[:WARM_STEPS]]
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    marks, host = [_mark(cuda)], time.perf_counter()
    for tokens in inputs[WARM_STEPS:]:
        step(tokens)
        marks.append(_mark(cuda))
    host = time.perf_counter() - host
    if finish is not None:
        finish()
    if cuda:
        torch.cuda.synchronize()
    seconds = [a.elapsed_time(b) / 1e3 if cuda else b - a for a, b in pairwise(marks)]
    found: dict[str, Any] = {
        "step_ms": round(statistics.median(seconds) * 1e3, 3),
        "host_ms": round(host / arguments.steps * 1e3, 3),
        "losses": [round(loss.item(), 5) for loss in losses],
        "gpu": torch.cuda.get_device_name() if cuda else "cpu",
    }
    if cuda:
        found |= {"peak_allocated": torch.cuda.max_memory_allocated(), "peak_reserved": torch.cuda.max_memory_reserved()}
    return found


def _mark(cuda: bool) -> Any:
    if not cuda:
        return time.perf_counter()
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
