"""FSDP2 over a mesh, as torchtitan lays it out: what is split before it is sharded, and over which ranks.

Imports torch: only trainers import this module, and only a rank's process imports those.

Note [Experts' gradients]
    An expert's gradient is that of the tokens of all ranks that send it some, any other parameter's that of one rank's.
    FSDP2 divides both by the ranks that they are sharded over; so those of experts are multiplied by the quotient of the two.
    torchtitan has FSDP2 itself divide by the same number for both (``set_gradient_divide_factor``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from zeroplan.core.expert_parallel import sharded_dimension
from zeroplan.core.parallel import ParallelLayout
from zeroplan.engines.torch_mesh import balance, context_mesh, mesh_on, without_masks
from zeroplan.trace.expert_parallel import share_experts
from zeroplan.trace.tensor_parallel import parallelize
from zeroplan_runtime.expert_parallel import Splits, counted, grouped_experts
from zeroplan_runtime.units import find_blocks


@dataclass(frozen=True, slots=True)
class Fsdp2Mesh:
    """The ranks of a run by what they share.

    Attributes:
        layout: the degrees.
        dense: the dimensions ``fsdp`` (those that hold the same, context-parallel ranks among them), before it ``pp`` and
            ``replicate``, after it ``tp``, as far as they have several ranks.
        context: the ranks that share each sample; None where there is one.
        experts: the same ranks by what they have of experts: ``replicate``, ``efsdp``, ``ep``, ``etp``; None without ``ep``.
    """

    layout: ParallelLayout
    dense: DeviceMesh
    context: DeviceMesh | None
    experts: DeviceMesh | None

    @classmethod
    def of(cls, layout: ParallelLayout, device: torch.device) -> Fsdp2Mesh:
        """Make the mesh of a layout; every rank must call it."""
        sizes = {"pp": layout.pp, "replicate": layout.dp_replicate, "fsdp": layout.shard_group, "tp": layout.tp}
        dense = mesh_on(device, {name: size for name, size in sizes.items() if size > 1 or name == "fsdp"})
        experts = None
        if layout.ep > 1:
            own = {"efsdp": layout.expert_shard_group, "ep": layout.ep, "etp": layout.etp}
            sizes = {"pp": layout.pp, "replicate": layout.dp_replicate, **own}
            sizes = {name: size for name, size in sizes.items() if size > 1 or name == "efsdp"}
            experts = mesh_on(device, sizes, silent=("pp",))
        return cls(layout, dense, context_mesh(layout, device), experts)

    def sharding(self, mesh: DeviceMesh, dimension: str) -> DeviceMesh:
        """Return the ranks over which FSDP2 shards, with their replicas as a dimension before them."""
        return mesh[dimension] if self.layout.dp_replicate == 1 else mesh["replicate", dimension]


def split(model: Any, mesh: Fsdp2Mesh, device: torch.device, *, splits: Splits = counted) -> None:
    """Leave this rank its part of a model's matrices and experts, and its attention what a ring takes.

    Args:
        model: a causal language model of transformers, on the meta device.
        device: where they compute.
        splits: how the ranks of experts learn how many tokens they send each other.
    """
    layout = mesh.layout
    if mesh.experts is not None:
        share_experts(model, mesh.experts["ep"].get_group(), splits=splits)
        balance(model, device)
    if layout.tp > 1:
        parallelize(model, mesh.dense["tp"], sequence=layout.sp, across=layout.experts_across)
    if mesh.context is not None:
        without_masks(model)


def shard(model: nn.Module, mesh: Fsdp2Mesh, options: dict[str, Any], blocks: Iterable[nn.Module] | None = None) -> None:
    """Shard blocks and the model, and where ranks share experts those over their own ranks.

    Args:
        model: what :func:`split` has left.
        options: of `fully_shard`, but for the mesh.
        blocks: what is gathered by itself; None for the model's blocks.
    """
    found: list[Any] = list(find_blocks(model).values() if blocks is None else blocks)
    options = {**options, "mesh": mesh.sharding(mesh.dense, "fsdp")}
    if mesh.experts is None:
        for block in found:
            fully_shard(block, **options)
    else:
        _shard_mixtures(found, grouped_experts(model), mesh, mesh.experts, options)
    fully_shard(model, **options)


def _shard_mixtures(blocks: list[Any], experts: list[Any], mesh: Fsdp2Mesh, over: DeviceMesh, options: dict[str, Any]) -> None:
    """Shard blocks and their experts, each over its own ranks, and gather the next block's while one runs.

    Source: torchtitan, ``distributed/fsdp.py`` (``apply_fsdp_to_decoder``).
    """
    own = {**options, "mesh": mesh.sharding(over, "efsdp")}
    for module in experts:
        dimension = sharded_dimension(mesh.layout, module.num_experts)
        along: dict[str, Any] = {"shard_placement_fn": partial(_along, dimension)} if dimension else {}
        fully_shard(module, **own, **along)
    for block in blocks:
        fully_shard(block, **options)
    parts = [[block, *(module for module in block.modules() if module in experts)] for block in blocks]
    for at, block in enumerate(blocks):
        if at + 1 < len(blocks):
            block.set_modules_to_forward_prefetch(parts[at + 1])
        if at:
            block.set_modules_to_backward_prefetch(parts[at - 1])


def _along(dimension: int, _: nn.Parameter) -> Shard:
    return Shard(dimension)


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Give this rank's parts random values. What several ranks hold alike is alike if they draw from one seed."""
    for parameter in model.parameters():
        (parameter.to_local() if isinstance(parameter, DTensor) else parameter).normal_(0, 0.02)


def scale_experts(model: nn.Module, layout: ParallelLayout) -> None:
    """Give the gradients of shared experts the weight of the others'. See Note [Experts' gradients]."""
    factor = layout.expert_shard_group / layout.shard_group
    if layout.ep == 1 or factor == 1:
        return
    for module in grouped_experts(model):
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
