"""Attention as CUDA's fused kernels allocate for it: what they save, and what their backward takes.

Each class stands for one kernel of ``aten/src/ATen/native/transformers/cuda``. Shapes: query [B, H, S, D], key and value
[B, Hkv, S, D]; lse is the log-sum-exp of the scores, fp32 [B, H, S].
"""

from __future__ import annotations

from typing import Any

import torch

from zeroplan.core.tape_sizes import align
from zeroplan.trace import kernels
from zeroplan.trace.kernels import block


def _like_transposed(tensor: torch.Tensor, heads: int | None = None, dim: int | None = None) -> torch.Tensor:
    """Empty [B, H, S, D] whose memory is laid out as [B, S, H, D]."""
    batch, own_heads, seq, own_dim = tensor.shape
    return tensor.new_empty((batch, seq, heads or own_heads, dim or own_dim)).transpose(1, 2)


class FusedAttention(torch.autograd.Function):
    """cuDNN's attention, or FlashAttention-2 as PyTorch builds it, whichever the device prefers. KV heads are not repeated.

    Both save query, key, value, output and lse; they differ in the random state and in what the backward takes, so the
    blocks of either have no bytes where the other runs.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, fixed: str
    ) -> torch.Tensor:
        batch, heads, seq, _ = query.shape
        seed, offset = block(("cudnn", 8)), block(("cudnn", 8))
        out = torch.empty_like(query)  # both lay it out as the query is (MHA.cpp, flash_api.cpp)
        lse = query.new_empty((batch, heads, seq), dtype=torch.float32)
        block(("cudnn", 256))
        state, unused = block(("flash", 16)), block(("flash", 8))
        ctx.save_for_backward(bias, key, query, value, lse, out, offset, seed, state, unused)
        ctx.bias_grad = bias is not None and ctx.needs_input_grad[3]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        bias, key, query, value = ctx.saved_tensors[:4]
        batch, heads, seq, dim = query.shape
        grouped = key.shape[1] != heads
        grad_q, grad_k, grad_v = (torch.empty_like(t) for t in (query, key, value))
        grad_bias = torch.empty_like(bias) if ctx.bias_grad else None
        block(("cudnn_backward", batch * heads * seq, dim, int(grouped)))
        width = _flash_width(dim)
        delta = block(("flash_rows", seq, 4 * batch * heads))
        accumulator = block(("flash_rows", seq, 4 * batch * heads * width))
        if grouped:
            whole = query.element_size() * batch * heads * key.shape[2] * dim
            whole_k, whole_v = block(("flash", whole)), block(("flash", whole))
            del whole_k, whole_v
        del delta, accumulator
        return grad_q, grad_k, grad_v, grad_bias, None


def _flash_width(dim: int) -> int:
    """The head dimension that FlashAttention's fp32 accumulator is padded to (``flash_api.cpp``)."""
    return align(dim, 32) if dim <= 192 else 256


class EfficientAttention(torch.autograd.Function):
    """``_scaled_dot_product_efficient_attention``: takes fp32 and masks; lse is padded to a multiple of 32 rows."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        batch, heads, seq, _ = query.shape
        out = _like_transposed(query, dim=value.shape[-1])
        lse = query.new_empty((batch, heads, align(seq, 32)), dtype=torch.float32)
        seed = torch.empty((), dtype=torch.int64, device=query.device)
        offset = torch.empty((), dtype=torch.int64, device=query.device)
        ctx.save_for_backward(query, key, value, bias, out, lse, seed, offset)
        ctx.bias_grad = bias is not None and ctx.needs_input_grad[3]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, bias, _out, _lse, _seed, _offset = ctx.saved_tensors
        batch, heads, seq, _ = query.shape
        grad_q, grad_k, grad_v = _like_transposed(query), _like_transposed(key), _like_transposed(value)
        grad_bias = torch.empty_like(bias) if ctx.bias_grad else None
        delta = query.new_empty((batch, heads, seq), dtype=torch.float32)
        del delta
        return grad_q, grad_k, grad_v, grad_bias


def _repeat(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    return tensor if tensor.shape[1] == heads else tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """``F.scaled_dot_product_attention`` with the kernel that CUDA would choose (``sdp_utils.cpp``)."""
    dim = query.shape[-1]
    half = query.dtype in (torch.float16, torch.bfloat16)
    four = query.dim() == 4 and key.dim() == 4
    square = not is_causal or query.shape[-2] == key.shape[-2]
    if four and half and attn_mask is None and dim == value.shape[-1] and dim <= 256 and square:
        if dim % 8:
            pad = [0, 8 - dim % 8]
            query, key, value = (torch.nn.functional.pad(t, pad) for t in (query, key, value))
            return FusedAttention.apply(query, key, value, None, "")[..., :dim]
        return FusedAttention.apply(query, key, value, None, "")  # type: ignore[no-any-return]
    alignment = 8 if half else 4
    if four and not enable_gqa and dim % alignment == 0 and value.shape[-1] % alignment == 0:
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                attn_mask = torch.where(attn_mask, 0.0, torch.empty((), dtype=query.dtype, device=query.device))
            last = attn_mask.shape[-1]
            if last % 16:
                attn_mask = torch.nn.functional.pad(attn_mask, [0, 16 - last % 16])[..., :last]
            attn_mask = attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], last)
        return EfficientAttention.apply(query, key, value, attn_mask)  # type: ignore[no-any-return]
    math = torch.ops.aten._scaled_dot_product_attention_math
    kernels.in_math_attention = True
    try:
        return math(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]  # type: ignore[no-any-return]
    finally:
        kernels.in_math_attention = False
