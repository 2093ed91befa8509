"""Attention as CUDA's fused kernels allocate for it: what they save, and what their backward takes.

Each class stands for one kernel of ``aten/src/ATen/native/transformers/cuda``. Shapes: query [B, H, S, D], key and value
[B, Hkv, S, D]; lse is the log-sum-exp of the scores, fp32 [B, H, S].
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from zeroplan.tape.sizes import MASK_ALIGNMENT, align
from zeroplan.trace import kernels
from zeroplan.trace.kernels import block

#: How many fused kernels are being run, one inside another.
_depth = 0


def inside_kernel() -> bool:
    """Return whether what is allocated now is a fused kernel's: part of one operator on CUDA."""
    return _depth > 0


#: What runs in place of a kernel where ranks share the tokens (:mod:`zeroplan.trace.context_parallel`); None elsewhere.
ring: Callable[..., torch.Tensor] | None = None


@contextlib.contextmanager
def kernel() -> Iterator[None]:
    """What is allocated in this context is one operator's on CUDA."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def _like_transposed(tensor: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Empty [B, H, S, D] whose memory is laid out as [B, S, H, D]."""
    batch, heads, seq, own_dim = tensor.shape
    return tensor.new_empty((batch, seq, heads, dim or own_dim)).transpose(1, 2)


def laid_out_as(query: torch.Tensor, dim: int) -> torch.Tensor:
    """Empty [B, H, S, dim] whose dimensions lie in memory in the order of the query's."""
    order = sorted(range(query.dim()), key=query.stride, reverse=True)
    shape = (*query.shape[:-1], dim)
    made = query.new_empty([shape[axis] for axis in order])
    return made.permute([order.index(axis) for axis in range(query.dim())])


def _cudnn_takes(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether cuDNN's kernels take these head dimensions, forward and backward (``sdp_utils.cpp``), and are allowed."""
    dim, value_dim = query.shape[-1], value.shape[-1]
    if dim % 8 or value_dim % 8 or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    return (dim <= 128 and value_dim <= 128) or (dim, value_dim) == (192, 128)


class FusedAttention(torch.autograd.Function):
    """cuDNN's attention, or FlashAttention-2 as PyTorch builds it, whichever the device prefers. KV heads are not repeated.

    Both save query, key, value, output and lse; they differ in the random state and in what the backward takes, so the
    blocks of either have no bytes where the other runs. Head dimensions that cuDNN does not take run flash everywhere.
    With a mask, devices without cuDNN run the memory-efficient kernel, which takes the row sums alone.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Allocate what the forward kernel allocates; returns the output, laid out as the query."""
        out, lse, offset, seed, state, unused = fused_forward(query, value)
        ctx.save_for_backward(bias, key, query, value, lse, out, offset, seed, state, unused)
        ctx.bias_grad = bias is not None and ctx.needs_input_grad[3]
        ctx.cudnn = _cudnn_takes(query, value)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Allocate what the backward kernel allocates; returns the gradients of the inputs."""
        saved = ctx.saved_tensors  # kept whole: recomputed tensors have no other holder
        bias, key, query, value = saved[:4]
        grad_q, grad_k, grad_v, *grad_bias = fused_backward(
            query, key, value, masked=bias is not None, bias=bias if ctx.bias_grad else None, cudnn=ctx.cudnn
        )
        return grad_q, grad_k, grad_v, grad_bias[0] if grad_bias else None


def fused_forward(
    query: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Allocate what the fused forward kernel allocates; returns its output, lse, and what else is saved: two random states of
    cuDNN, and two of flash.
    """
    batch, heads, seq, dim = query.shape
    cudnn = _cudnn_takes(query, value)
    seed, offset = (block(("cudnn", 8)), block(("cudnn", 8))) if cudnn else (None, None)
    # Both kernels lay the output out as the query is (MHA.cpp, alloc_with_matching_layout; flash_api.cpp).
    out = torch.empty_like(query) if value.shape[-1] == dim else laid_out_as(query, value.shape[-1])
    lse = query.new_empty((batch, heads, seq), dtype=torch.float32)
    if cudnn:
        block(("cudnn", 256))
        state, unused = block(("flash", 16)), block(("flash", 8))
    else:
        state, unused = block(16), block(8)
    return out, lse, offset, seed, state, unused


def fused_backward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, masked: bool, bias: torch.Tensor | None = None,
    cudnn: bool | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Allocate what the fused backward kernel allocates; returns the gradients of query, key, value, and of `bias` if given.

    `cudnn` says whether its forward was cuDNN's where the device has it; None for what is allowed now.
    """
    batch, heads, seq, dim = query.shape
    cudnn = _cudnn_takes(query, value) if cudnn is None else cudnn
    grouped = key.shape[1] != heads
    made = [torch.empty_like(t) for t in (query, key, value)]
    if bias is not None:
        made.append(torch.empty_like(bias))
    rows, flash = ("flash_rows", "flash") if cudnn else ("rows", "")
    if cudnn:
        others = (batch * heads * key.shape[2],) if key.shape[2] != seq else ()  # as where a ring's keys are halved
        block(("cudnn_backward", batch * heads * seq, dim, int(grouped), *others))
    delta = block((rows, seq, 128, 4 * batch * heads))
    if not masked:
        accumulator = block((rows, seq, 128, 4 * batch * heads * _flash_width(dim)))
        if grouped:
            whole = query.element_size() * batch * heads * key.shape[2] * dim
            size = (flash, whole) if flash else whole
            whole_k, whole_v = block(size), block(size)
            del whole_k, whole_v
        del accumulator
    del delta
    return tuple(made)


def _flash_width(dim: int) -> int:
    """The head dimension that FlashAttention's fp32 accumulator is padded to (``flash_api.cpp``)."""
    return align(dim, 32) if dim <= 192 else 256


class EfficientAttention(torch.autograd.Function):
    """``_scaled_dot_product_efficient_attention``: takes fp32 and masks; lse is padded to a multiple of 32 rows."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Allocate what the forward kernel allocates; returns the output, laid out as the query."""
        batch, heads, seq, _ = query.shape
        copy = None
        if bias is not None and bias.shape[-1] % MASK_ALIGNMENT == 0:  # a length that stands for others; see _additive
            rows = math.prod(size for size, stride in zip(bias.shape[:-1], bias.stride(), strict=False) if stride)
            copy = block(("mask_rows", bias.shape[-1], bias.element_size() * rows))
        out = _like_transposed(query, dim=value.shape[-1])
        lse = block(("rows", seq, 32, 4 * batch * heads))
        seed = torch.empty((), dtype=torch.int64, device=query.device)
        offset = torch.empty((), dtype=torch.int64, device=query.device)
        ctx.save_for_backward(query, key, value, bias, out, lse, seed, offset, copy)
        ctx.bias_grad = bias is not None and ctx.needs_input_grad[3]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Allocate what the backward kernel allocates; returns the gradients of the inputs."""
        query, key, value, bias, _out, _lse, _seed, _offset, _copy = ctx.saved_tensors
        batch, heads, seq, _ = query.shape
        grad_q, grad_k, grad_v = _like_transposed(query), _like_transposed(key), _like_transposed(value)
        grad_bias = torch.empty_like(bias) if ctx.bias_grad else None
        delta = query.new_empty((batch, heads, seq), dtype=torch.float32)
        del delta
        return grad_q, grad_k, grad_v, grad_bias


def _additive(mask: torch.Tensor, query: torch.Tensor, *, padded: bool) -> torch.Tensor:
    """The mask as numbers to add to the scores.

    The memory-efficient kernel takes and keeps a copy where the rows are not aligned (``attention.cpp``, ``pad_bias``). A
    length that stands for many is a multiple of the alignment; the copy of others is then a block that is kept beside the mask.
    """
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, torch.empty((), dtype=query.dtype, device=query.device))
    last = mask.shape[-1]
    if padded and last % MASK_ALIGNMENT:
        mask = torch.nn.functional.pad(mask, [0, MASK_ALIGNMENT - last % MASK_ALIGNMENT])[..., :last]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], last)


#: What runs in place of a kernel while a graph is traced (:mod:`zeroplan.trace.compiled_attention`): given the name of its
#: class, and its arguments; None elsewhere.
in_graph: Callable[..., torch.Tensor] | None = None


def _run(function: type[torch.autograd.Function], *args: torch.Tensor | None) -> torch.Tensor:
    if in_graph is not None:
        return in_graph(function.__name__, *args)
    with kernel():
        found: torch.Tensor = function.apply(*args)
        return found


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
    """``F.scaled_dot_product_attention`` with the kernel that CUDA would choose of those allowed (``sdp_utils.cpp``)."""
    if ring is not None:
        return ring(query, key, value, masked=attn_mask is not None or not is_causal)
    dim = query.shape[-1]
    half = query.dtype in (torch.float16, torch.bfloat16)
    dense = _dense(query, key, value, attn_mask, enable_gqa)
    square = not is_causal or query.shape[-2] == key.shape[-2]
    unmasked = half and attn_mask is None and dim == value.shape[-1] and dim <= 256 and square
    if dense and unmasked and (torch.backends.cuda.flash_sdp_enabled() or _cudnn_takes(query, value)):
        if dim % 8:
            pad = [0, 8 - dim % 8]
            query, key, value = (torch.nn.functional.pad(t, pad) for t in (query, key, value))
            return _run(FusedAttention, query, key, value, None)[..., :dim]
        return _run(FusedAttention, query, key, value, None)
    alignment = 8 if half else 4
    if dense and not enable_gqa and dim % alignment == 0 and value.shape[-1] % alignment == 0:
        learned = attn_mask is not None and attn_mask.requires_grad  # which cuDNN refuses (check_attn_mask_shape)
        fused = half and _cudnn_takes(query, value) and not learned
        if fused or torch.backends.cuda.mem_efficient_sdp_enabled():
            if attn_mask is not None:
                attn_mask = _additive(attn_mask, query, padded=not fused)
            return _run(FusedAttention if fused else EfficientAttention, query, key, value, attn_mask)
    whole = torch.ops.aten._scaled_dot_product_attention_math
    kernels.in_math_attention = True
    try:
        found: torch.Tensor = whole(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
        return found
    finally:
        kernels.in_math_attention = False


def _dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None, enable_gqa: bool
) -> bool:
    """Return whether the tensors lie as every fused kernel asks."""
    # T5's bias is a permuted view of its table's rows: they must lie together.
    rows = all(t.stride(-1) == 1 for t in (query, key, value, attn_mask) if t is not None)
    # Falcon-7B leaves it to broadcasting that one key serves all heads (check_batch_size_and_num_heads_dense).
    heads = enable_gqa or query.shape[:2] == key.shape[:2] == value.shape[:2]
    return rows and query.dim() == 4 and key.dim() == 4 and heads


#: The name under which transformers finds :func:`flash_attention`; one with "flash" in it would make it look for the package.
FLASH = "zeroplan_fa2"


class FlashAttention2(torch.autograd.Function):
    """The package ``flash-attn``: FlashAttention-2 on any device. Shapes [B, S, H, D]; KV heads are not repeated."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Allocate what the forward kernel allocates; returns the output, shaped as the query."""
        batch, seq, heads, _ = query.shape
        out = torch.empty_like(query)
        lse = query.new_empty((batch, heads, seq), dtype=torch.float32)
        state = torch.empty(2, dtype=torch.int64, device=query.device)
        ctx.save_for_backward(query, key, value, out, lse, state)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Allocate what the backward kernel allocates; returns the gradients of the inputs."""
        saved = ctx.saved_tensors
        query, key, value = saved[:3]
        batch, seq, heads, dim = query.shape
        grad_q, grad_k, grad_v = (torch.empty_like(t) for t in (query, key, value))
        delta = block(("rows", seq, 128, 4 * batch * heads))
        accumulator = block(("rows", seq, 128, 4 * batch * heads * _flash_width(dim)))
        if key.shape[2] != heads:
            whole_k, whole_v = (t.new_empty((batch, t.shape[1], heads, dim)) for t in (key, value))
            del whole_k, whole_v
        del delta, accumulator
        return grad_q, grad_k, grad_v


def flash_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Run ``flash_attention_2`` as transformers calls it: [B, H, S, D] in, [B, S, H, D] out, padded to query.s head size."""
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    short = query.shape[-1] - value.shape[-1]
    padded = torch.nn.functional.pad(value, [0, short]) if short else value
    out = _run(FlashAttention2, query, key, padded)
    return (out[..., : value.shape[-1]] if short else out), None


def register_flash() -> None:
    """Make :data:`FLASH` an attention implementation of transformers; it takes no mask when nothing is padded."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    AttentionInterface.register(FLASH, flash_attention)
    AttentionMaskInterface.register(FLASH, flash_attention_mask)
