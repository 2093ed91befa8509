"""The experts of one expert-parallel rank, whose router spreads tokens evenly, as programs that measure force it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from zeroplan.engines.runtime.trainer_mesh import balance
from zeroplan.trace.expert_parallel import share_experts
from zeroplan_runtime.expert_parallel import grouped_experts
from zeroplan_runtime.units import find_blocks


def share_balanced(model: nn.Module, mesh: DeviceMesh, device: torch.device, *, fake: bool) -> list[nn.Module]:
    """Leave this rank's experts in a model, with a forced balance. Returns the modules of experts.

    Args:
        model: a model of transformers with experts, on the meta device.
        mesh: the ranks that share the experts.
        device: where the tokens are.
        fake: whether the other ranks are fake. These then have as many tokens for each expert as this one.
    """
    share_experts(model, mesh.get_group())
    balance(model, device)
    if fake:
        told = mock.patch.object(collectives, "all_to_all_single", lambda tensor, *_: tensor.clone())
        told.start()
    return grouped_experts(model)


def shard_blocks(model: nn.Module, experts: list[nn.Module], options: dict[str, Any], expert_mesh: DeviceMesh) -> None:
    """Shard blocks and their experts, each over its own ranks, and gather the next block's while one runs.

    Source: torchtitan, ``distributed/fsdp.py`` (``apply_fsdp_to_decoder``).
    """
    for module in experts:
        fully_shard(module, **{**options, "mesh": expert_mesh})
    blocks: list[Any] = list(find_blocks(model).values())
    for block in blocks:
        fully_shard(block, **options)
    parts = [[block, *(module for module in block.modules() if module in experts)] for block in blocks]
    for at, block in enumerate(blocks):
        if at + 1 < len(blocks):
            block.set_modules_to_forward_prefetch(parts[at + 1])
        if at:
            block.set_modules_to_backward_prefetch(parts[at - 1])


def clip(parameters: list[nn.Parameter], experts: set[nn.Parameter], limit: float) -> None:
    """Clip the gradients by the norm of all: those of experts are distributed over other ranks than the rest."""
    groups = [p for p in parameters if p not in experts], [p for p in parameters if p in experts]
    norms: list[Any] = [nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups]
    norm = torch.linalg.vector_norm(torch.stack([norm.full_tensor() for norm in norms]))
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, limit, norm)
