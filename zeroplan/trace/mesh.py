"""One rank of a mesh of fake ranks, to be traced.

Note [Fake ranks]
    The ranks beside the traced one are those of a ``FakeProcessGroup``: collectives return at once, with outputs of the right
    shapes. Data-parallel ranks are left out, since what they do is an engine's and lies over the tape. Operators on this rank's
    parts, and the collectives between them, are recorded as they are on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils._python_dispatch import _disable_current_modes

from zeroplan.core.errors import BadInput
from zeroplan.trace.context_parallel import ring_attention
from zeroplan.trace.expert_parallel import share_experts
from zeroplan.trace.ranks import Ranks
from zeroplan.trace.tensor_parallel import parallelize


@contextlib.contextmanager
def fake_mesh(ep: int, cp: int, tp: int) -> Iterator[DeviceMesh]:
    """Make a mesh of `ep` × `cp` × `tp` fake ranks of which this process is the first of the last context-parallel rank's.

    On real ranks the experts' groups lie across the others; of a group, the traced rank sees the number of its ranks alone.

    Raises:
        BadInput: when the process already is a rank of something.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise BadInput("a rank of a run cannot trace a mesh", where="--tp", remedy="estimate in a process of its own")
    _forget_layouts()
    dist.init_process_group("fake", store=FakeStore(), rank=(cp - 1) * tp, world_size=ep * cp * tp)
    try:
        yield init_device_mesh("cpu", (ep, cp, tp), mesh_dim_names=("ep", "cp", "tp"))
    finally:
        dist.destroy_process_group()
        _forget_layouts()


def _forget_layouts() -> None:
    """Clear what DTensor remembers of operators' layouts: it names groups, and takes meshes of the same ranks for the same
    mesh, so that a mesh would compute in groups of an earlier one that are gone.
    """
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache_clear()
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)  # torch 2.10 and later have it
    if clear is not None:
        clear()


class MeshRank(Ranks):
    """The rank of a mesh with the dimensions ``ep``, ``cp`` and ``tp``."""

    def __init__(self, mesh: DeviceMesh, *, sequence: bool, across: bool = False) -> None:
        """`across`: ranks of ``tp`` are among those of ``ep``, so that experts' matrices are whole."""
        self._mesh, self._sequence, self._across = mesh, sequence, across
        self._tp, self._cp, self._ep = (mesh[name].size() for name in ("tp", "cp", "ep"))
        self.unwrapped = (DTensor,) if self._tp * self._cp > 1 else ()

    def lay_out(self, model: nn.Module) -> None:
        """See :func:`~zeroplan.trace.tensor_parallel.parallelize`, :func:`~zeroplan.trace.expert_parallel.share_experts`."""
        if self._ep > 1:
            share_experts(model, self._mesh["ep"].get_group())
        if self._tp > 1:
            parallelize(model, self._mesh["tp"], sequence=self._sequence, across=self._across)

    def inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return what this rank has of a batch. torch resizes the tensors, whose memory stays whole (``context_parallel``); the
        Trainer of transformers adds labels that are shifted before they are split, and positions.
        """
        if self._cp == 1:
            return batch
        ids = batch["input_ids"]
        batch = batch | {"shift_labels": torch.empty_like(ids), "position_ids": torch.empty_like(ids[:1])}
        for tensor in {id(tensor): tensor for tensor in batch.values()}.values():
            tensor.resize_(tensor.shape[0], tensor.shape[1] // self._cp)
        return batch

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a DTensor; any other tensor itself."""
        return tensor._local_tensor if isinstance(tensor, DTensor) else tensor

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Compute the loss over split logits, let no collective wait, and record nothing of how DTensor plans its layouts.

        On the meta device the wrapper that waits for a collective would make another tensor; on a GPU it makes none. DTensor
        runs each new operator on fake tensors of the whole shapes first, which the recorder would take for the rank's own.
        """
        wrap, propagate = collectives._maybe_wrap_tensor, ShardingPropagator._propagate_tensor_meta_non_cached

        def unseen(*args: Any) -> Any:
            with _disable_current_modes():
                return propagate(*args)

        collectives._maybe_wrap_tensor = lambda tensor: tensor  # type: ignore[assignment]
        ShardingPropagator._propagate_tensor_meta_non_cached = unseen  # type: ignore[method-assign,assignment]
        shared = ring_attention(self._mesh["cp"].get_group()) if self._cp > 1 else contextlib.nullcontext()
        try:
            with shared, loss_parallel() if self._tp > 1 else contextlib.nullcontext():
                yield
        finally:
            collectives._maybe_wrap_tensor = wrap
            ShardingPropagator._propagate_tensor_meta_non_cached = propagate  # type: ignore[method-assign]
