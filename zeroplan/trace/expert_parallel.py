"""Expert parallelism: each rank has some of a block's experts, and tokens travel to those that they are routed to.

Note [Exchange of tokens]
    A rank sorts its tokens, once for each expert that a token takes, by expert, which is by rank. Ranks tell each other the
    numbers of tokens, then exchange the tokens (all-to-all). What arrives is in order of the ranks it comes from; it is put in
    order of this rank's experts, runs through grouped matrix products, is put back, and returns the same way.

    Routing is taken to be balanced: a rank receives as many tokens as it sends. The router, the products and the sum of a
    token's results are transformers' own (``integrations/moe.py``); the exchange and its order follow torchtitan,
    ``models/common/token_dispatcher.py`` (``AllToAllTokenDispatcher``).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as collectives

from zeroplan.core.errors import BadInput


def share_experts(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Leave one rank's experts in a model, and let its forward exchange tokens with the ranks of `group`.

    Raises:
        BadInput: a model without experts that transformers runs by grouped products.
    """
    found = [module for module in model.modules() if hasattr(module, "is_transposed") and hasattr(module, "down_proj")]
    if not found:
        raise BadInput("no experts of grouped products are in this model", where="--ep", remedy="leave it at 1")
    for module in found:
        for name, param in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(param[: param.shape[0] // group.size()].detach().clone()))
        module.forward = partial(_forward, module, group)


def _forward(
    module: Any, group: dist.ProcessGroup, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Run the experts on this rank's tokens, wherever the experts are. See Note [Exchange of tokens].

    Args:
        module: the experts' module, with this rank's experts.
        group: the ranks that share the experts.
        hidden_states: ``(tokens, hidden)``.
        top_k_index: ``(tokens, k)``, the experts of each token.
        top_k_weights: ``(tokens, k)``, the weight of each.
    """
    tokens, k = top_k_index.shape
    expert, order = torch.sort(top_k_index.reshape(-1))
    rows = hidden_states[order // k]
    weights = top_k_weights.reshape(-1)[order]
    numbers = expert.float() if expert.device.type == "cpu" else expert.int()  # what its histogram takes
    counts = torch.histc(numbers, bins=module.num_experts, min=0, max=module.num_experts - 1)
    del expert, numbers
    with torch.no_grad():
        told = collectives.all_to_all_single(counts.view(group.size(), -1), None, None, group).reshape(-1)
    splits = balanced(tokens * k, group.size())
    received = collectives.all_to_all_single_autograd(rows, splits, splits, group)
    del rows
    local = told.view(group.size(), -1).sum(0)
    place = _by_expert(told.view(group.size(), -1), received.shape[0])
    out = _products(module, received[place], local)
    back = torch.empty_like(out)
    back[place] = out
    del received, out
    returned = collectives.all_to_all_single_autograd(back, splits, splits, group)
    del back
    weighted = returned * weights.unsqueeze(-1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    return weighted[inverse].view(tokens, k, -1).sum(dim=1).to(hidden_states.dtype)


def balanced(rows: int, ranks: int) -> list[int]:
    """Return how many of `rows` each rank gets, as equal as whole numbers are."""
    least, more = divmod(rows, ranks)
    return [least + (rank < more) for rank in range(ranks)]


def _by_expert(counts: torch.Tensor, rows: int) -> torch.Tensor:
    """Return where each row that the experts read lies among those that arrived, from the counts ``(ranks, experts)``."""
    flat = counts.reshape(-1).long()
    begins = (flat.cumsum(0) - flat).view_as(counts).t().reshape(-1)
    lengths = counts.t().reshape(-1).long()
    piece = torch.arange(lengths.shape[0], device=counts.device).repeat_interleave(lengths, output_size=rows)
    own = lengths.cumsum(0) - lengths
    return begins[piece] + torch.arange(rows, device=counts.device) - own[piece]


def _products(module: Any, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Run the local experts on rows in their order: up, gate, down."""
    from transformers.integrations.moe import _grouped_linear

    offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
    first = "gate_up_proj" if module.has_gate else "up_proj"
    up = _grouped_linear(rows, getattr(module, first), offsets, _bias(module, first, rows, counts), module.is_transposed)
    inner = module._apply_gate(up) if module.has_gate else module.act_fn(up)
    del up
    down = _bias(module, "down_proj", rows, counts)
    out: torch.Tensor = _grouped_linear(inner, module.down_proj, offsets, down, module.is_transposed)
    return out


def _bias(module: Any, name: str, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor | None:
    if not module.has_bias:
        return None
    bias: torch.Tensor = getattr(module, f"{name}_bias")
    return bias.repeat_interleave(counts.long(), dim=0, output_size=rows.shape[0])
