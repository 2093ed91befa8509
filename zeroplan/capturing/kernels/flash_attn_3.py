"""The package flash_attn_interface, FlashAttention-3 on Hopper; unmeasured. Shapes as of :mod:`.flash_attn`.

Beside what FlashAttention-2 takes, the backward holds a second number a row, and sums the gradients of keys that several heads
share in fp32. Rows are rounded up to a block of queries, whose size the head's decides; packed rows take a block more a sample.

Source: flash-attention, ``hopper/flash_api.cpp`` (``mha_fwd``, ``mha_bwd``: the sizes of blocks on sm90).
"""

from __future__ import annotations

from typing import Any

import torch

from zeroplan.capturing.kernels.flash_attn import padded
from zeroplan.trace.kernels import block

_WIDTHS = (64, 96, 128, 192, 256)


def _up(number: int, to: int) -> int:
    return -(-number // to) * to


class FlashAttention3(torch.autograd.Function):
    """Attention; `samples` is 0 for inputs that are not packed."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, samples: int
    ) -> torch.Tensor:
        """query: [B, S, H, D] or [T, H, D]; returns the like."""
        out = torch.empty_like(query)
        lse = block(4 * query.numel() // query.shape[-1])
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.causal, ctx.samples = causal, samples
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradients of the inputs."""
        query, key, value = ctx.saved_tensors[:3]
        heads, shared, dim = query.shape[-2], key.shape[-2], query.shape[-1]
        width = next(one for one in _WIDTHS if dim <= one)
        rows = 128 if width <= 64 else 80 if width == 128 and not ctx.causal else 64
        columns = 128 if width <= 128 else 96 if width <= 192 else 80

        def rounded(tensor: torch.Tensor, to: int) -> int:
            if ctx.samples:
                return _up(tensor.shape[0] + ctx.samples * to, to)
            return tensor.shape[0] * _up(tensor.shape[1], to)

        found = [torch.empty_like(one) for one in (query, key, value)]
        wide, deep = rounded(query, rows), rounded(key, columns)
        held = [block(4 * heads * wide), block(4 * heads * wide), block(4 * heads * wide * width)]
        if shared != heads:
            held += [block(4 * shared * deep * width), block(4 * shared * deep * width)]
        held.append(block(4 * heads * (wide // rows)))
        del held
        return *found, None, None


def _causal(kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.get("causal")) or tuple(kwargs.get("window_size", (-1, -1))) != (-1, -1)


def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **kwargs: Any) -> torch.Tensor:
    """Attention of [B, S, H, D]."""
    return padded(lambda *inputs: FlashAttention3.apply(*inputs, _causal(kwargs), 0), q, k, v)


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, *_: Any, **kwargs: Any
) -> torch.Tensor:
    """Attention of packed rows [T, H, D]."""
    samples = cu_seqlens_q.shape[0] - 1
    return padded(lambda *inputs: FlashAttention3.apply(*inputs, _causal(kwargs), samples), q, k, v)


RULES = {one.__name__: one for one in (flash_attn_func, flash_attn_varlen_func)}
