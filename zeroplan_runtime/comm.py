"""Collectives and streams, behind one face for NCCL on GPUs and gloo on CPUs.

Note [Lanes]
    Work runs in three lanes: the model's own stream, a gather lane and a reduce lane. A lane waits for another by an event,
    never by the host. On a CPU the lanes are one and everything happens in order.
    Buffers that lanes hand to each other belong to the Arena and are never freed, so no stream needs to be recorded on them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist

from zeroplan_runtime.watchdog import RankLost


class Mark:
    """A point in one lane that another lane can wait for. On a CPU it is nothing."""

    __slots__ = ("_event",)

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def record(self, lane: Lane) -> None:
        """Marks what `lane` has been given so far."""
        if self._event is not None:
            self._event.record(lane.stream())

    def done(self) -> bool:
        """Whether the marked work is done (true, if never recorded)."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self, lane: Lane) -> None:
        """Makes `lane` wait until the marked work is done (nothing, if never recorded)."""
        if self._event is not None:
            lane.stream().wait_event(self._event)

    def finish(self) -> None:
        """Makes the calling thread wait until the marked work is done; other threads go on."""
        if self._event is not None:
            self._event.synchronize()


class Lane:
    """An order of work: a CUDA stream, or (`own` False) whatever stream is current, which the model computes on."""

    def __init__(self, device: torch.device, *, own: bool) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1) if own and device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._device = device

    def stream(self) -> torch.cuda.Stream:
        """The CUDA stream. Only called on CUDA devices."""
        return self._stream if self._stream is not None else torch.cuda.current_stream(self._device)

    def run(self) -> AbstractContextManager[object]:
        """Within it, work goes to this lane."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


# torch 2.13 renamed both; the old names warn there.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Ranks:
    """The ranks that share a model, and their collectives. Each runs in the lane that is current when it is called."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.count = dist.get_world_size(group) if dist.is_initialized() else 1
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self.explain: Callable[[str], str] | None = None  # says which rank is to blame for a failed collective

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as fault:  # gloo's and NCCL's errors name addresses, not ranks
            if self.explain is None:
                raise
            raise RankLost(self.explain(f"could not {what}")) from fault

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        """Fills `whole` with every rank's `shard`, which may be this rank's part of `whole`."""
        with self._named("gather"):
            _all_gather(whole, shard, group=self.group)

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor) -> None:
        """Writes this rank's part of the mean of `whole` over the ranks to `shard`, which may be that part of `whole`."""
        with self._named("reduce"):
            _reduce_scatter(shard, whole, op=dist.ReduceOp.AVG, group=self.group)

    def all_reduce_mean(self, whole: torch.Tensor) -> None:
        """Replaces `whole` by its mean over the ranks."""
        with self._named("reduce"):
            dist.all_reduce(whole, op=dist.ReduceOp.AVG, group=self.group)

    def all_reduce_sum(self, values: torch.Tensor) -> None:
        """Replaces `values` by their sum over the ranks."""
        with self._named("reduce"):
            dist.all_reduce(values, group=self.group)

    def all_reduce_max(self, values: torch.Tensor) -> None:
        """Replaces `values` by their largest over the ranks, one by one."""
        with self._named("reduce"):
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replaces `tensor` by the first rank's."""
        dist.broadcast(tensor, group_src=0, group=self.group)

    def from_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """The first rank's `tensor`, as it lies there."""
        if self.count == 1 or not tensor.numel():
            return tensor
        values = tensor.contiguous()
        self.broadcast(values.view(-1).view(torch.uint8))
        return values if values is tensor else tensor.clone().copy_(values)

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        if self.count > 1:
            with self._named("meet"):
                dist.barrier(self.group)
