"""Mixtures of experts as DeepSpeed's AutoEP puts them in a model of transformers: one of the ranks that share the experts.

Note [AutoEP's layer]
    Whole blocks of experts are replaced. A router in fp32 picks each token's experts. The tokens, one row for each expert that
    a token takes, are sorted by expert and sent to the ranks that have them (all-to-all). What arrives is put in order of this
    rank's experts, with each expert's rows padded to a multiple of 8, runs through grouped products (gate, up, down) and
    returns the same way; a token's rows are weighted in fp32 and added. Gradients of rows are gathered, never added. A shared
    expert is kept as it is.

    A rank is planned to receive as many rows as it sends (balanced routing). The number of padded rows follows from that of the
    rows and of the experts alone, so that only the exchange depends on it.

    The steps, and how long Python keeps their tensors, are those of DeepSpeed 0.19.8 on a GPU of Hopper or newer, with its
    Triton kernels: module_inject/auto_ep_layer.py (``AutoEPMoELayer``), moe/ep_router.py, moe/ep_experts.py
    (``_run_experts_grouped_mm``), moe/ep_kernels.py, ops/triton_ops/swiglu_triton.py. Which values a model's config gives its
    router: module_inject/auto_ep.py (``ep_parser``), auto_ep_presets.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zeroplan.core.auto_ep import ROW_MULTIPLE, SHARED
from zeroplan.trace.ranks import Ranks, receiving


class TokenChoiceTopKRouter(nn.Module):
    """Picks each token's experts by scores in fp32.

    Args:
        source: the router of transformers, whose weight is kept.
        config: the model's.
    """

    def __init__(self, source: Any, config: Any) -> None:
        super().__init__()
        kind = config.model_type
        self.gate: Any = nn.Linear(source.weight.shape[1], source.weight.shape[0], bias=False, device="meta")
        self.gate.weight = nn.Parameter(source.weight.detach().clone(), requires_grad=source.weight.requires_grad)
        scores = getattr(config, "scoring_func", None)
        self.sigmoid = (scores or ("sigmoid" if kind == "deepseek_v3" else "softmax")) == "sigmoid"
        self.top_k = config.num_experts_per_tok
        norm = getattr(config, "norm_topk_prob", None)
        self.norm = False if kind == "deepseek_v2" else bool(norm if norm is not None else kind != "deepseek_v3")
        self.scale = float(getattr(config, "routed_scaling_factor", None) or 1.0)
        self.groups: Any = getattr(config, "n_group", None)
        self.limited: Any = getattr(config, "topk_group", None)
        self.by_best = getattr(config, "topk_method", None) == "group_limited_greedy" and kind == "deepseek_v2"
        bias = getattr(source, "e_score_correction_bias", None)
        if bias is not None:
            self.register_buffer("e_score_correction_bias", bias.detach().clone())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return scores [T, K], experts [T, K] and the number of rows of each expert, for tokens [T, H]."""
        scores = self.gate(x)
        if self.sigmoid:
            scores = torch.sigmoid(scores.to(torch.float32))
        else:
            scores = torch.softmax(scores.to(torch.float32), dim=1)
        choice = scores
        if "e_score_correction_bias" in self._buffers:
            choice = choice + self.get_buffer("e_score_correction_bias").unsqueeze(0)
        if self.groups is not None:
            choice = self._limited_to_groups(choice)
        _best, experts = torch.topk(choice, k=self.top_k, dim=-1, sorted=False)
        weights = scores.gather(dim=1, index=experts)
        if self.norm:
            total = weights.sum(dim=-1, keepdim=True) + 1e-20
            weights = weights / total
        weights = weights * self.scale
        counts = _rows_of_experts(experts, scores.shape[1])
        return weights, experts, counts

    def _limited_to_groups(self, choice: torch.Tensor) -> torch.Tensor:
        """Mask the experts of all but the best groups."""
        grouped = choice.view(-1, self.groups, choice.shape[1] // self.groups)
        if self.by_best:
            of_groups = grouped.max(dim=-1).values
        else:
            two, _where = grouped.topk(2, dim=-1)
            of_groups = two.sum(dim=-1)
        _where, chosen = torch.topk(of_groups, k=self.limited, dim=-1, sorted=False)
        mask = torch.ones_like(of_groups, dtype=torch.bool)
        mask.scatter_(1, chosen, False)
        masked: torch.Tensor = grouped.masked_fill(mask.unsqueeze(-1), float("-inf")).view(-1, choice.shape[1])
        return masked


def _rows_of_experts(experts: torch.Tensor, count: int) -> torch.Tensor:
    flat = experts.reshape(-1)
    counts = torch.zeros(count, dtype=torch.int32, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    return counts


class GroupedExperts(nn.Module):
    """This rank's experts, as three tensors.

    Args:
        source: the experts' module of transformers.
        ranks: that share them.
    """

    def __init__(self, source: Any, ranks: int) -> None:
        super().__init__()
        both, down = source.gate_up_proj, source.down_proj
        experts, width, hidden = both.shape[0] // ranks, both.shape[1] // 2, both.shape[2]
        self.w1 = nn.Parameter(both.new_empty(experts, width, hidden), requires_grad=both.requires_grad)
        self.w2 = nn.Parameter(both.new_empty(experts, hidden, width), requires_grad=down.requires_grad)
        self.w3 = nn.Parameter(both.new_empty(experts, width, hidden), requires_grad=both.requires_grad)

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return the experts' output for padded rows [N, H], of which each expert has `counts`."""
        offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
        gate = torch._grouped_mm(x, self.w1.to(x.dtype).transpose(-2, -1), offs=offsets)
        up = torch._grouped_mm(x, self.w3.to(x.dtype).transpose(-2, -1), offs=offsets)
        inner = _SwiGlu.apply(gate, up)
        return torch._grouped_mm(inner, self.w2.to(x.dtype).transpose(-2, -1), offs=offsets).type_as(x)


class _SwiGlu(torch.autograd.Function):
    """silu(gate) · up in one kernel, and both gradients in another."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        gate, up = ctx.saved_tensors
        grads[0].contiguous()
        return torch.empty_like(gate), torch.empty_like(up)


class _PaddedRows(torch.autograd.Function):
    """Rows in the padded order of this rank's experts; the backward gathers by the inverse."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, places: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places, inverse)
        return rows.contiguous().new_empty((places.numel(), rows.shape[1]))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        places, inverse = ctx.saved_tensors
        return _ArrivedRows.apply(grads[0], places, inverse), None, None


class _ArrivedRows(torch.autograd.Function):
    """Rows in the order in which they arrived; the backward gathers them with padding."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, places: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places, inverse)
        return rows.index_select(0, inverse)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        places, inverse = ctx.saved_tensors
        return _PaddedRows.apply(grads[0], places, inverse), None, None


def _inverse(places: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the padded place of each of `rows` rows, a view of a tensor that also has one element for each place."""
    positions = torch.arange(places.numel(), device=places.device, dtype=torch.int64)
    wide = places.to(torch.int64)
    valid = (wide >= 0) & (wide < rows)
    targets = torch.where(valid, wide, rows + positions)
    inverse = torch.empty(rows + places.numel(), dtype=torch.int64, device=places.device)
    inverse.scatter_(0, targets, positions)
    return inverse[:rows]


def _padded_places(told: torch.Tensor, experts: int, places: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return where each padded row comes from, and the padded rows of each expert and where they end.

    Args:
        told: the rows of each expert from each rank, flat.
    """
    _begins = torch.cumsum(told, 0) - told
    total = told.view(-1, experts).sum(0)
    total = torch.clamp_min(total, ROW_MULTIPLE)
    sizes = ((total + ROW_MULTIPLE - 1) // ROW_MULTIPLE * ROW_MULTIPLE).to(torch.int32)
    ends = torch.cumsum(sizes, 0)
    _starts = ends - sizes
    where = torch.full((places,), -1, dtype=torch.int32, device=told.device)
    return where, sizes, ends.to(torch.int32)


class _SentRows(torch.autograd.Function):
    """An all-to-all of as many rows as are sent."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        with receiving():
            return rows.new_empty(rows.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        sent = grads[0].contiguous()
        with receiving():
            return sent.new_empty(sent.shape)


class AutoEPMoELayer(nn.Module):
    """A block of experts as AutoEP makes it. See Note [AutoEP's layer].

    Args:
        source: the block of transformers.
        config: the model's.
        ranks: that share its experts.
    """

    def __init__(self, source: Any, config: Any, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.router = TokenChoiceTopKRouter(source.gate, config)
        self.experts = GroupedExperts(source.experts, ranks)
        names = SHARED.get(config.model_type, ("", ""))
        self.shared_experts: Any = getattr(source, names[0]) if names[0] else None
        self.shared_experts_gate: Any = getattr(source, names[1]) if names[1] else None
        self.tokens_per_expert: torch.Tensor
        self.register_buffer("tokens_per_expert", self.router.gate.weight.new_zeros(self.router.gate.weight.shape[0]))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the block's output [B, S, H]."""
        batch, tokens, width = hidden_states.shape
        x = hidden_states.reshape(-1, width)
        routed = self.router(x)  # kept as one, so that Python frees all of it at once
        with torch.no_grad():
            self.tokens_per_expert.add_(routed[2])
        k = self.router.top_k
        output: Any = None  # Python frees a function's tensors in the order in which their names come up first
        order = torch.argsort(routed[1].view(-1), stable=True)
        _weights = routed[0].view(-1)[order]
        _experts = routed[1].reshape(-1).index_select(0, order)
        rows = x[order // k]
        if self.ranks == 1:
            own = routed[2]
            padded, places, sizes = self._permuted(rows, own)
            out = self.experts(padded, sizes)
            out = _ArrivedRows.apply(out, places, _inverse(places, order.numel()))
        else:
            told = self._counts_of_ranks(routed[2])
            rows = _SentRows.apply(rows)
            rows, places, sizes = self._permuted(rows, told)
            out = self.experts(rows, sizes)
            out = _ArrivedRows.apply(out, places, _inverse(places, order.numel()))
            out = _SentRows.apply(out)
        output = _combined(out, routed[0], order, k).reshape(batch, tokens, width)
        return self._with_shared(output, x, hidden_states)

    def _counts_of_ranks(self, counts: torch.Tensor) -> torch.Tensor:
        """Return the rows of this rank's experts from each rank; the host reads how many rows travel."""
        matrix = counts.view(self.ranks, -1)
        with receiving():
            told = torch.empty_like(counts)
        told = told.view(self.ranks, -1)
        torch.stack((matrix.sum(dim=1), told.sum(dim=1)))
        return told

    def _permuted(self, rows: torch.Tensor, told: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        local, count = self.experts.w1.shape[0], rows.shape[0]
        whole = -(-(count + local * ROW_MULTIPLE) // ROW_MULTIPLE) * ROW_MULTIPLE
        with torch.no_grad():
            places, sizes, _ends = _padded_places(told.reshape(-1), local, whole)
        padded = _PaddedRows.apply(rows, places, _inverse(places, count))
        return padded, places, sizes

    def _with_shared(self, output: torch.Tensor, x: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.shared_experts is None:
            return output
        gate = self.shared_experts_gate
        shared: torch.Tensor = self.shared_experts(hidden_states if gate is None else x)
        if gate is not None:
            weight = torch.sigmoid(gate(x))
            shared = weight * shared
        if shared.shape != output.shape:
            shared = shared.reshape_as(output)
        return output + shared


def _combined(rows: torch.Tensor, weights: torch.Tensor, order: torch.Tensor, k: int) -> torch.Tensor:
    """Return the sum of each token's rows, weighted in fp32: [T·K, H] to [T, H]."""
    tokens = weights.shape[0]
    output = torch.zeros(tokens * k, rows.shape[1], dtype=rows.dtype, device=rows.device)
    output[order] = rows
    output = output.reshape(tokens, k, rows.shape[1])
    return (output * weights.reshape(tokens, k, 1).float()).sum(dim=1).to(rows.dtype)


class AutoEpRank(Ranks):
    """One of `ranks` ranks that share the experts of every block."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def lay_out(self, model: nn.Module) -> None:
        """Put AutoEP's layers in the place of the blocks with experts."""
        whole: Any = model
        for block in whole.model.layers:
            if hasattr(block.mlp, "experts"):  # else the MLP is dense
                block.mlp = AutoEPMoELayer(block.mlp, whole.config, self._ranks)
