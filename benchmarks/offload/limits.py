"""The machine's limits: memory bandwidth, the link's rates, and one forward and backward without any optimizer."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

#: Bytes that an AdamW step on 16-bit gradients moves for each element: master and two moments read and written, the gradient
#: read, the 16-bit parameter written.
UPDATE_BYTES = 3 * 4 * 2 + 2 + 2
#: Bytes of an element on the link: a gradient down, a parameter up.
LINK_BYTES = 2


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes a second of the host's memory (copies, read and written bytes together) and of pinned copies each way."""

    memory: float
    down: float
    up: float

    @classmethod
    def measure(cls, device: torch.device, nbytes: int = 1 << 30) -> Limits:
        """The best of several rounds, with all cores that this process may use."""
        from zeroplan_runtime.offload.pinned import allocate

        before = torch.get_num_threads()
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        cuda = device.type == "cuda"
        a, b = (allocate(nbytes // 4, torch.float32, register=cuda) for _ in range(2))
        memory = 2 * nbytes / _seconds(lambda: b.copy_(a))
        there = torch.empty(nbytes // 4, device=device)
        up = nbytes / _seconds(lambda: there.copy_(a, non_blocking=True), device)
        down = nbytes / _seconds(lambda: a.copy_(there, non_blocking=True), device)
        torch.set_num_threads(before)
        return cls(memory, down, up)

    def seconds(self, params: int) -> dict[str, float]:
        """Return the least time of the update of `params` elements, and of their way down and up."""
        link = LINK_BYTES * params
        return {"update": UPDATE_BYTES * params / self.memory, "down": link / self.down, "up": link / self.up}


def bound(limits: dict[str, float], compute: float, *, waits_for_all: bool) -> float:
    """The least seconds a step can take.

    Where the update waits for the last gradient: compute, then the longer of update and way up. Else the longest of all.
    """
    if waits_for_all:
        return compute + max(limits["update"], limits["up"])
    return max(compute, *limits.values())


def forward_and_backward(model: Any, tokens: list[torch.Tensor]) -> float:
    """Median seconds of a forward and backward of the plain model; its gradients are dropped."""
    device = tokens[0].device

    def once(batch: torch.Tensor) -> None:
        torch.autograd.backward(model(input_ids=batch, labels=batch).loss)
        model.zero_grad(set_to_none=True)

    for batch in tokens[:2]:
        once(batch)
    return statistics.median(_once(lambda batch=batch: once(batch), device) for batch in tokens)  # type: ignore[misc]


def _seconds(work: Callable[[], object], device: torch.device | None = None, rounds: int = 5) -> float:
    work()
    return min(_once(work, device) for _ in range(rounds))


def _once(work: Callable[[], object], device: torch.device | None) -> float:
    cuda = device is not None and device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    work()
    if cuda:
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin
