"""What lets Megatron-Core's mixtures of experts run on the meta device: counts of tokens, as if they were balanced.

Data decides how many tokens an expert gets. Here each gets as many as the others: selections by a mask return that many, and
the counts that a dispatcher brings to the host are those. All else is Megatron's own code and torch's own autograd.
"""

from __future__ import annotations

from typing import Any
from unittest import mock


class Replaced:
    """A module with single names replaced."""

    def __init__(self, module: Any, **names: Any) -> None:
        self.__dict__.update(names, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def balance() -> None:
    """Put the stand-ins in place."""
    import torch
    from megatron.core.fusions import fused_bias_swiglu
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher

    class Select(torch.autograd.Function):
        """``masked_select`` with a known number of results; its backward is torch's."""

        @staticmethod
        def forward(ctx: Any, source: Any, mask: Any, count: int) -> Any:
            ctx.save_for_backward(source, mask)
            return source.new_empty(count)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            source, _ = ctx.saved_tensors
            return torch.zeros_like(source), None, None

    class Take(torch.autograd.Function):
        """``index_select``, whose backward adds in place, as torch's does where no dispatch mode watches it."""

        @staticmethod
        def forward(ctx: Any, source: Any, at: Any) -> Any:
            ctx.save_for_backward(at)
            ctx.shape = source.shape
            return source.new_empty((at.shape[0], *source.shape[1:]))

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient.new_zeros(ctx.shape), None

    class LogSumExp(torch.autograd.Function):
        """``logsumexp`` with the copies that torch's own makes."""

        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            shifted = x - x.amax(-1, keepdim=True)
            out = shifted.exp_().sum(-1)
            ctx.save_for_backward(x, out)
            return out

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            x, out = ctx.saved_tensors
            less = x - out[:, None]
            shares = less.exp()
            return gradient[:, None] * shares

    own = moe_utils.permute

    def permute(tokens: Any, routing_map: Any, probs: Any = None, num_out_tokens: Any = None, **options: Any) -> Any:
        with (
            mock.patch.object(
                torch.Tensor, "masked_select", lambda source, mask: Select.apply(source, mask, int(num_out_tokens))
            ),
            mock.patch.object(torch.Tensor, "index_select", lambda source, _, at: Take.apply(source, at)),
        ):
            return own(tokens, routing_map, probs=probs, num_out_tokens=num_out_tokens, **options)

    def counted(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
        """Return the counts that come to the host, once all are made."""
        if point != "before_permutation_1":
            return tokens_per_expert
        sent = self.num_out_tokens
        if isinstance(sent, torch.Tensor):  # experts that drop tokens
            rows, factor = self.routing_map.size(0) * self.config.moe_router_topk, self.config.moe_expert_capacity_factor
            most = moe_utils.get_capacity(rows, self.num_experts, factor)
            sent = self.num_out_tokens = self.num_experts * min(rows // self.num_experts, most)
        if self.ep_size > 1 or self.tp_size > 1:
            self.input_splits = self.output_splits = [sent // self.ep_size] * self.ep_size
            self.output_splits_tp = torch.tensor([sent] * self.tp_size)
        ranks = self.ep_size * self.tp_size
        if self.num_local_experts > 1:
            self.num_global_tokens_per_local_expert = torch.full((ranks, self.num_local_experts), sent // self.num_experts)
        return torch.full((self.num_local_experts,), sent * self.tp_size // self.num_local_experts)

    gathered = MoEAllGatherTokenDispatcher.dispatch_postprocess

    def evenly(self: Any, hidden_states: Any, probs: Any) -> Any:
        """Run the dispatcher's own code where counts that come to the host are even."""
        each = hidden_states.shape[0] * self.router_topk // self.config.num_moe_experts
        own = Select.apply
        with (
            mock.patch.object(torch.Tensor, "cpu", lambda counts: torch.full(counts.shape, each)),
            mock.patch.object(torch.Tensor, "masked_select", lambda source, mask: own(source, mask, each * mask.shape[0])),
        ):
            return gathered(self, hidden_states, probs)

    if gathered.__name__ != evenly.__name__:
        MoEAllGatherTokenDispatcher.dispatch_postprocess = evenly
    from megatron.core.transformer.moe import token_dispatcher

    moe_utils.te_general_gemm = None  # 0.16.1 leaves the name undefined without TransformerEngine
    token_dispatcher.permute = permute
    moe_utils.torch = Replaced(torch, logsumexp=lambda logits, dim: LogSumExp.apply(logits))
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = object()
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = counted
    fused_bias_swiglu.weighted_swiglu = lambda y, weights: y.new_empty((*y.shape[:-1], y.shape[-1] // 2))
    fused_bias_swiglu.weighted_swiglu_back = lambda g, y, weights: (torch.empty_like(y), torch.empty_like(weights))
