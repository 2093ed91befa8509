"""The experts of one expert-parallel rank, whose router spreads tokens evenly, as programs that measure force it.

Note [Forced balance]
    An untrained router sends each rank another number of tokens at each step. A measurement that can be held against a plan
    wants the plan's case, so each token takes the experts that follow one another: all experts get as many tokens. The
    router itself runs, and its weights and their gradients are kept. torchtitan has the same as ``moe_force_load_balance``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from zeroplan.trace.expert_parallel import share_experts
from zeroplan_runtime.units import find_blocks


def share_balanced(model: nn.Module, mesh: DeviceMesh, device: torch.device, *, fake: bool) -> list[nn.Module]:
    """Leave this rank's experts in a model, with a forced balance. Returns the modules of experts. See Note [Forced balance].

    Args:
        model: a model of transformers with experts, on the meta device.
        mesh: the ranks that share the experts.
        device: where the tokens are.
        fake: whether the other ranks are fake. These then have as many tokens for each expert as this one.
    """
    share_experts(model, mesh.get_group())
    found = [module for module in model.modules() if hasattr(module, "is_transposed") and hasattr(module, "down_proj")]
    for module in found:
        module.forward = _balanced(module.forward, module.num_experts, device)  # type: ignore[arg-type]
    if fake:
        told = mock.patch.object(collectives, "all_to_all_single", lambda tensor, *_: tensor.clone())
        told.start()
    return found


def _balanced(forward: Callable[..., torch.Tensor], experts: int, device: torch.device) -> Callable[..., torch.Tensor]:
    kept: dict[torch.Size, torch.Tensor] = {}

    def balanced(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        shape = top_k_index.shape
        if shape not in kept:
            kept[shape] = (torch.arange(shape.numel(), device=device) % experts).view(shape)
        return forward(hidden_states, kept[shape], top_k_weights)

    return balanced


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
