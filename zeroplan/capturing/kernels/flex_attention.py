"""torch's FlexAttention, compiled: its Triton kernels keep inputs, output and a fp32 number a query and head; unmeasured.

Called without ``torch.compile`` it is the plain products, with whole scores, which torch runs by itself.

Source: torch 2.13, ``_inductor/kernel/flex/flex_attention.py`` (``flex_attention``, ``flex_attention_backward``),
``_higher_order_ops/flex_attention.py``.
"""

from __future__ import annotations

from typing import Any

import torch

from zeroplan.trace.kernels import block


class FlexAttention(torch.autograd.Function):
    """Attention of [B, H, S, D]."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and the sums."""
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.mark_non_differentiable(sums)
        return out, sums

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradients of the inputs."""
        query, key, value = ctx.saved_tensors[:3]
        delta = block(4 * query.numel() // query.shape[-1])
        found = [torch.empty_like(one) for one in (query, key, value)]
        del delta
        return tuple(found)


def compiled_flex_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, return_lse: bool = False, **__: Any
) -> Any:
    """``torch.compile(flex_attention)``."""
    out, sums = FlexAttention.apply(query, key, value)
    return (out, sums) if return_lse else out
