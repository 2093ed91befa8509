"""A model laid out on the mesh that ``verify`` runs the included runtime on.

Note [Forced balance]
    An untrained router sends each rank another number of tokens at each step. A measurement that can be held against a plan
    wants the plan's case, so each token takes the experts that follow one another: all experts get as many tokens. The
    router itself runs, and its weights and their gradients are kept. torchtitan has the same as ``moe_force_load_balance``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zeroplan.core.parallel import ParallelLayout
from zeroplan_runtime.expert_parallel import grouped_experts, share_experts


def lay_out(model: nn.Module, layout: ParallelLayout, device: torch.device) -> DeviceMesh | None:
    """Share a model's experts as a layout says, and return the mesh of this run's ranks; None for data parallelism alone.

    Args:
        model: a causal language model of transformers.
        layout: the degree of expert parallelism.
        device: where the ranks compute.
    """
    if layout.ep == 1:
        return None
    sizes = {"dp": layout.world_size // layout.ep, "ep": layout.ep}
    sizes = {name: size for name, size in sizes.items() if size > 1}  # a dimension of one rank has a communicator, too
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    share_experts(model, mesh["ep"])
    balance(model, device)
    return mesh


def balance(model: nn.Module, device: torch.device) -> None:
    """Let every expert get as many tokens as the others. See Note [Forced balance]."""
    for module in grouped_experts(model):
        module.forward = _balanced(module.forward, module.num_experts, device)


def _balanced(forward: Callable[..., torch.Tensor], experts: int, device: torch.device) -> Callable[..., torch.Tensor]:
    kept: dict[torch.Size, torch.Tensor] = {}

    def balanced(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        shape = top_k_index.shape
        if shape not in kept:
            kept[shape] = (torch.arange(shape.numel(), device=device) % experts).view(shape)
        return forward(hidden_states, kept[shape], top_k_weights)

    return balanced
