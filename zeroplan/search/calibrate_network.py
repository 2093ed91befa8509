"""Measures the network between the nodes of a run that torchrun started, in the fields of :class:`zeroplan.core.rates.Rates`.

    torchrun --nnodes 2 --nproc-per-node 8 … -m zeroplan doctor --calibrate

A ring over all GPUs uses every adapter; a message from each GPU to its like on the next node leaves by its own. No cluster has
measured anything by this yet: it was run on gloo's ranks alone, and its profile says so by its note.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

#: Bytes of the large and the small collective, and repetitions.
_LARGE, _SMALL, _REPEATS = 1 << 28, 1 << 20, 5
NOTE = "between nodes: measured by a way that was tried on gloo alone"


def spans_nodes() -> bool:
    """Return whether torchrun started this process as one of several nodes' ranks."""
    world, local = (os.environ.get(name, "") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return world.isdigit() and local.isdigit() and int(world) > int(local) >= 1


def measure_network(*, large: int = _LARGE, small: int = _SMALL) -> tuple[int, dict[str, float]]:
    """Measure all-gathers and messages; every rank of the run has to call this.

    Args:
        large: bytes of the whole buffer that bandwidths are taken from.
        small: bytes of the one that the latency of a step is taken from.

    Returns:
        This process's rank, and ``ring_gbs``, ``adapter_gbs`` and ``network_us``, the same on every rank.
    """
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    started = not dist.is_initialized()
    if started:
        dist.init_process_group("nccl" if cuda else "gloo")
    device = "cuda" if cuda else "cpu"
    rank, world, local = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])

    def timed(run: Callable[[], object]) -> float:
        best = float("inf")
        for _ in range(_REPEATS + 1):  # the first makes connections
            dist.barrier()
            begin = time.perf_counter()
            run()
            if cuda:
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - begin)
        slowest = torch.tensor(best, device=device, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest)

    def gathered(size: int) -> float:
        part = torch.empty(size // world, dtype=torch.uint8, device=device)
        whole = torch.empty(size // world * world, dtype=torch.uint8, device=device)
        return timed(lambda: dist.all_gather_into_tensor(whole, part))

    sent = torch.empty(large // local, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    ahead, behind = (rank + local) % world, (rank - local) % world

    def message() -> None:
        ends = [dist.P2POp(dist.isend, sent, ahead), dist.P2POp(dist.irecv, received, behind)]
        for one in dist.batch_isend_irecv(ends):
            one.wait()

    ring = large * (world - 1) / world / gathered(large)
    latency = max(0.0, gathered(small) - small * (world - 1) / world / ring) / (world // local - 1)
    found: dict[str, Any] = {
        "ring_gbs": ring / 1e9,
        "adapter_gbs": sent.numel() / timed(message) / 1e9,
        "network_us": latency * 1e6,
    }
    if started:
        dist.destroy_process_group()
    return rank, {name: round(value, 4) for name, value in found.items()}
