"""The collectives of the ranks that share a model, over NCCL on GPUs and gloo on CPUs.

Note [Order of collectives]
    All ranks must issue the same collectives in the same order. So all-gathers and reductions are issued from the forward and
    backward of *modules*, which all ranks run alike, and never from the arrival of single gradients, which may differ
    between ranks (an expert that one rank did not use). A unit's gradients are reduced when the backward reaches the next
    unit; those of the root, and of units whose backward was not seen, when the whole backward has ended.
    Where a rank's data decides which units run, the order can still differ, and collectives of equal size would mix two
    units' bytes without an error. So each rank hashes its order, and the step compares the hashes
    (:attr:`Communicator.collectives_hash`).

Note [A collective that has ended]
    A thread of gloo's wakes who waits for a collective before it lets go of the tensors. Until it does, memory of a temporary
    that is dropped stays, and a parameter's memory has a use that looks like an alias. So a collective on a CPU returns when
    the tensors have as many uses as before. It waits some microseconds; on a busy machine, until that thread has a turn.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from zeroplan_runtime.watchdog import RankLost

# torch 2.13 renamed both; the old names warn there.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

#: The largest prime below 2²⁴, so that fp32 holds every hash exactly.
_HASH_MODULUS = 16777213


#: What gloo's errors begin with.
_SOURCE_PLACE = re.compile(r"^\[[^\]]*\] ")

_TRANSPORT = re.compile(r"^\[[^\]]*(gloo|NCCL|nccl)[^\]]*\] ")

_use_count: Any = getattr(torch._C, "_storage_Use_Count", None)
#: How long a collective waits for gloo's thread to let go, in seconds. Another thread may have taken a view to keep.
_MOST_SECONDS = 1.0


class Communicator:
    """The ranks that share a model and their collectives, each issued on the stream that is current when it is called.

    Args:
        group: the process group; all ranks by default, and one rank where torch.distributed is not initialised.

    Attributes:
        collectives_hash: the hash of the order of units' collectives since the last step, below 2²⁴.
        sent_bytes: what this rank has sent to others since the Communicator was made, if every collective but those of
            Python objects goes around a ring.
        explain: given what failed, names the rank that is to blame; every collective then raises RankLost with it.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.world_size = dist.get_world_size(group) if dist.is_initialized() else 1
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self.collectives_hash = self.sent_bytes = 0
        self.explain: Callable[[str], str] | None = None

    @classmethod
    def alone(cls) -> Communicator:
        """This rank without others, whatever torch.distributed has."""
        made = cls.__new__(cls)
        made.group, made.world_size, made.rank = None, 1, 0
        made.collectives_hash = made.sent_bytes = 0
        made.explain = None
        return made

    def record_collective(self, number: int) -> None:
        """Adds the collective `number` to the hash, just before or after it is issued."""
        self.collectives_hash = (self.collectives_hash * 31 + number + 1) % _HASH_MODULUS

    @contextmanager
    def naming_lost_ranks(self, what: str) -> Iterator[None]:
        """Enters a context in which a collective that fails raises an error that names the rank to blame.

        Args:
            what: what the collective does, as in "could not gather".

        Raises:
            RankLost: where :attr:`explain` is set.
        """
        try:
            yield
        except RankLost:
            raise
        except RuntimeError as fault:  # gloo's and NCCL's errors name addresses, not ranks
            if self.explain is None:
                raise
            reason = _SOURCE_PLACE.sub("", (str(fault).splitlines() or [""])[0])[:160]
            raise RankLost(self.explain(f"could not {what} ({reason})")) from None

    @contextmanager
    def naming_ranks_that_computing_lost(self) -> Iterator[None]:
        """Enters a context of computations whose own collectives, those of ``tp`` and ``ep``, fail where a rank is lost.

        Raises:
            RankLost: where :attr:`explain` is set and the transport failed; other errors pass.
        """
        try:
            yield
        except RankLost:
            raise
        except RuntimeError as fault:
            if not transport_failed(fault):
                raise
            with self.naming_lost_ranks("compute"):
                raise

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        """Fills `whole` [ranks × n] with every rank's `shard` [n], which may be this rank's part of `whole`."""
        if self.world_size == 1:
            _copy(whole, shard)
            return
        self._count(shard, self.world_size - 1)
        with self.naming_lost_ranks("gather"), _let_go(whole, shard):
            _all_gather(whole, shard, group=self.group)

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor) -> None:
        """Writes this rank's part of the mean of `whole` [ranks × n] to `shard` [n], which may be that part of `whole`."""
        if self.world_size == 1:
            _copy(shard, whole)
            return
        self._count(shard, self.world_size - 1)
        with self.naming_lost_ranks("reduce"), _let_go(shard, whole):
            _reduce_scatter(shard, whole, op=dist.ReduceOp.AVG, group=self.group)

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Sends part i of `sent` [ranks × n] to rank i, and fills part i of `received` [ranks × n] with what it sends."""
        self._count(sent, (self.world_size - 1) / self.world_size)
        with self.naming_lost_ranks("exchange"), _let_go(received, sent):
            dist.all_to_all_single(received, sent, group=self.group)

    def all_reduce_mean(self, whole: torch.Tensor) -> None:
        """Replaces `whole` by its mean over the ranks."""
        self._all_reduce(whole, dist.ReduceOp.AVG)

    def all_reduce_sum(self, values: torch.Tensor) -> None:
        """Replaces `values` by their sum over the ranks."""
        self._all_reduce(values, dist.ReduceOp.SUM)

    def all_reduce_max(self, values: torch.Tensor) -> None:
        """Replaces each of `values` by its maximum over the ranks."""
        self._all_reduce(values, dist.ReduceOp.MAX)

    def _all_reduce(self, values: torch.Tensor, operation: Any) -> None:
        if self.world_size == 1:
            return
        self._count(values, 2 * (self.world_size - 1) / self.world_size)
        with self.naming_lost_ranks("reduce"), _let_go(values):
            dist.all_reduce(values, op=operation, group=self.group)

    def _count(self, tensor: torch.Tensor, times: float) -> None:
        self.sent_bytes += round(times * tensor.numel() * tensor.element_size())

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replaces the contiguous `tensor` by the first rank's."""
        self._count(tensor, (self.world_size - 1) / self.world_size)
        with _let_go(tensor):
            dist.broadcast(tensor, group_src=0, group=self.group)

    def broadcast_from_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the first rank's `tensor`, with the strides of this rank's; any dtype and layout."""
        if self.world_size == 1 or not tensor.numel():
            return tensor
        values = tensor.contiguous()
        self.broadcast(values.view(-1).view(torch.uint8))
        if values is tensor:
            return tensor
        # In place, for what else is a view of the same memory, unless elements share memory themselves.
        return values if torch._debug_has_internal_overlap(tensor) == 1 else tensor.copy_(values)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Returns every rank's `value`, in the order of the ranks. It must be possible to pickle."""
        if self.world_size == 1:
            return [value]
        found: list[Any] = [None] * self.world_size
        with self.naming_lost_ranks("exchange objects"):
            dist.all_gather_object(found, value, group=self.group)
        return found

    def barrier(self) -> None:
        """Blocks until every rank has called it."""
        if self.world_size > 1:
            with self.naming_lost_ranks("meet"):
                dist.barrier(self.group)


def transport_failed(fault: RuntimeError) -> bool:
    """Returns whether gloo or NCCL could not reach a rank, as their errors tell."""
    return isinstance(fault, dist.DistError) or bool(_TRANSPORT.match(str(fault)))


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)


@contextmanager
def _let_go(*tensors: torch.Tensor) -> Iterator[None]:
    """Enters the context of one collective; see Note [A collective that has ended]."""
    if _use_count is None or tensors[0].device.type != "cpu":
        yield
        return
    before = _uses(tensors)
    yield
    waited = 0.0
    while _uses(tensors) > before and waited < _MOST_SECONDS:
        pause = min(waited, 0.001)  # at first it gives others a turn
        time.sleep(pause)
        waited += pause or 1e-5


def _uses(tensors: tuple[torch.Tensor, ...]) -> int:
    return sum(_use_count(tensor.untyped_storage()._cdata) for tensor in tensors)
