"""Expert parallelism: each rank has some of a block's experts, and tokens travel to those that they are routed to.

Note [Exchange of tokens]
    A rank sorts its tokens, once for each expert that a token takes, by expert, which is by rank. Ranks tell each other the
    numbers of tokens, then exchange the tokens (all-to-all). What arrives is in order of the ranks it comes from; it is put in
    order of this rank's experts, runs through grouped matrix products, is put back, and returns the same way.

    The router, the products and the sum of a token's results are transformers' own (``integrations/moe.py``); the exchange
    and its order follow torchtitan, ``models/common/token_dispatcher.py`` (``AllToAllTokenDispatcher``). The collectives are
    torch's, with gradients of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from zeroplan.core.errors import BadInput

#: See :func:`counted`.
Splits = Callable[[int, torch.Tensor, torch.Tensor], tuple[list[int], list[int]]]


def share_experts(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Distributes the experts of a model of transformers over the ranks of `mesh`, which exchange tokens in its forward.

    Every rank keeps its part of the values that it has. Give each of these ranks samples of its own.

    Args:
        model: the model, the same on every rank.
        mesh: one dimension, whose size divides the number of experts; ``ep`` of the mesh for
            :func:`zeroplan_runtime.initialize`.

    Returns:
        The model, whose experts' parameters are now DTensors, ``Shard(0)``.

    Raises:
        BadInput: for a model without experts that transformers runs by grouped products, or whose number is not divided.
    """
    where, group = "share_experts", mesh.get_group()
    for module in grouped_experts(model):
        if module.num_experts % group.size():
            raise BadInput(
                f"{group.size()} ranks do not divide {module.num_experts} experts",
                where=where,
                remedy=f"use a divisor of {module.num_experts}",
            )
        for name, param in list(module.named_parameters(recurse=False)):
            part = distribute_tensor(param.detach(), mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(part, requires_grad=param.requires_grad))
        module.forward = partial(run_experts, module, group)
    return model


def grouped_experts(model: nn.Module) -> list[Any]:
    """Returns the modules of experts that transformers runs by grouped matrix products (``use_experts_implementation``).

    Raises:
        BadInput: where there are none.
    """
    found = [module for module in model.modules() if hasattr(module, "is_transposed") and hasattr(module, "down_proj")]
    if not found:
        raise BadInput("no experts of grouped products are in this model", where="--ep", remedy="leave it at 1")
    return found


def counted(_rows: int, sent: torch.Tensor, received: torch.Tensor) -> tuple[list[int], list[int]]:
    """Returns how many rows this rank sends to each rank, and receives from each. The host waits for the numbers.

    Args:
        sent: ``(ranks, experts of each)``, the rows for each expert.
        received: ``(ranks, this rank's experts)``, likewise.
    """
    mine, others = torch.stack((sent.sum(1), received.sum(1))).long().tolist()
    return mine, others


def balanced(rows: int, sent: torch.Tensor, _received: torch.Tensor) -> tuple[list[int], list[int]]:
    """Returns numbers as equal as whole ones are, whatever the router says: `rows` to the ranks, and from them."""
    ranks = sent.shape[0]
    least, more = divmod(rows, ranks)
    equal = [least + (rank < more) for rank in range(ranks)]
    return equal, equal


def run_experts(
    module: Any,
    group: dist.ProcessGroup,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    splits: Splits = counted,
) -> torch.Tensor:
    """Runs the experts on this rank's tokens, wherever the experts are. See Note [Exchange of tokens].

    Args:
        module: the experts' module, with this rank's experts.
        group: the ranks that share the experts.
        hidden_states: ``(tokens, hidden)``.
        top_k_index: ``(tokens, k)``, the experts of each token.
        top_k_weights: ``(tokens, k)``, the weight of each.
        splits: how many rows go to each rank and come from each.

    Returns:
        ``(tokens, hidden)``.
    """
    tokens, k = top_k_index.shape
    expert, order = torch.sort(top_k_index.reshape(-1))
    rows = hidden_states[order // k]
    weights = top_k_weights.reshape(-1)[order]
    numbers = expert.float() if expert.device.type == "cpu" else expert.int()  # what its histogram takes
    counts = torch.histc(numbers, bins=module.num_experts, min=0, max=module.num_experts - 1).view(group.size(), -1)
    del expert, numbers
    with torch.no_grad():
        told = collectives.all_to_all_single(counts, None, None, group).reshape(-1).view(group.size(), -1)
    sent, arrive = splits(tokens * k, counts, told)
    received = collectives.all_to_all_single_autograd(rows, arrive, sent, group)
    del rows
    local = told.sum(0)
    place = _by_expert(told, received.shape[0])
    out = _products(module, received[place], local)
    back = torch.empty_like(out)
    back[place] = out
    del received, out
    returned = collectives.all_to_all_single_autograd(back, sent, arrive, group)
    del back
    weighted = returned * weights.unsqueeze(-1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    return weighted[inverse].view(tokens, k, -1).sum(dim=1).to(hidden_states.dtype)


def _by_expert(counts: torch.Tensor, rows: int) -> torch.Tensor:
    """Returns where each row that the experts read lies among those that arrived, from the counts ``(ranks, experts)``."""
    flat = counts.reshape(-1).long()
    begins = (flat.cumsum(0) - flat).view_as(counts).t().reshape(-1)
    lengths = counts.t().reshape(-1).long()
    piece = torch.arange(lengths.shape[0], device=counts.device).repeat_interleave(lengths, output_size=rows)
    own = lengths.cumsum(0) - lengths
    return begins[piece] + torch.arange(rows, device=counts.device) - own[piece]


def _products(module: Any, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Runs the local experts on rows in their order: up, gate, down."""
    from transformers.integrations.moe import _grouped_linear

    offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
    first = "gate_up_proj" if module.has_gate else "up_proj"
    up = _grouped_linear(rows, _own(module, first), offsets, _bias(module, first, rows, counts), module.is_transposed)
    inner = module._apply_gate(up) if module.has_gate else module.act_fn(up)
    del up
    down = _bias(module, "down_proj", rows, counts)
    out: torch.Tensor = _grouped_linear(inner, _own(module, "down_proj"), offsets, down, module.is_transposed)
    return out


def _own(module: Any, name: str) -> torch.Tensor:
    """Returns this rank's part of a parameter of the experts."""
    param: torch.Tensor = getattr(module, name)
    return param.to_local() if isinstance(param, DTensor) else param


def _bias(module: Any, name: str, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor | None:
    if not module.has_bias:
        return None
    return _own(module, f"{name}_bias").repeat_interleave(counts.long(), dim=0, output_size=rows.shape[0])
