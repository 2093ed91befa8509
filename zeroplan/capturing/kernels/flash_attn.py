"""The package flash-attn, FlashAttention-2: queries, keys and values ``[B, S, H, D]``, or packed rows of samples ``[T, H, D]``.

The forward keeps its inputs, its output and a fp32 number a query and head; the backward takes an fp32 sum of the queries'
gradients and of the products' rows, and whole gradients of keys that several heads share. Packed rows take 128 more a sample.
Heads are padded to whole eights. Dense inputs are measured (:class:`zeroplan.trace.attention.FlashAttention2`), packed ones are
not.

Source: flash-attn 2.8, ``flash_attn/flash_attn_interface.py``, ``bert_padding.py``, ``flash_api.cpp``
(``mha_fwd``, ``mha_varlen_fwd``, ``mha_bwd``, ``mha_varlen_bwd``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zeroplan.trace.attention import FlashAttention2, _flash_width
from zeroplan.trace.kernels import block

_EIGHT, _ROWS = 8, 128


class Packed(torch.autograd.Function):
    """Attention within each of several samples that lie one behind the other."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, samples: int) -> torch.Tensor:
        """query: [T, H, D]; returns the like."""
        out = torch.empty_like(query)
        lse = query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)
        state = query.new_empty(2, dtype=torch.int64)
        ctx.save_for_backward(query, key, value, out, lse, state)
        ctx.samples = samples
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradients of the inputs."""
        query, key, value = ctx.saved_tensors[:3]
        rows, heads, dim = query.shape
        found = [torch.empty_like(one) for one in (query, key, value)]
        wide = rows + _ROWS * ctx.samples
        delta, accumulator = block(4 * heads * wide), block(4 * heads * wide * _flash_width(dim))
        whole = [one.new_empty((one.shape[0], heads, dim)) for one in (key, value) if one.shape[1] != heads]
        del whole, delta, accumulator
        return *found, None


def padded(run: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """Run a kernel on heads of whole eights, and cut its output."""
    dim = inputs[0].shape[-1]
    short = -dim % _EIGHT
    if not short:
        return run(*inputs)
    return run(*(torch.nn.functional.pad(one, [0, short]) for one in inputs))[..., :dim]


def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Attention of [B, S, H, D]."""
    return padded(FlashAttention2.apply, q, k, v)


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, *_: Any, **__: Any
) -> torch.Tensor:
    """Attention of packed rows [T, H, D]; `cu_seqlens_q` has where each sample begins, and the end."""
    samples = cu_seqlens_q.shape[0] - 1
    return padded(lambda *inputs: Packed.apply(*inputs, samples), q, k, v)


def flash_attn_qkvpacked_func(qkv: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """The same of one tensor [B, S, 3, H, D]."""
    return flash_attn_func(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2])


def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Attention with keys and values in one tensor [B, S, 2, H, D]."""
    return flash_attn_func(q, kv[:, :, 0], kv[:, :, 1])


def flash_attn_varlen_qkvpacked_func(qkv: torch.Tensor, cu_seqlens: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Attention within samples of packed rows, with queries, keys and values in one tensor [T, 3, H, D]."""
    return flash_attn_varlen_func(qkv[:, 0], qkv[:, 1], qkv[:, 2], cu_seqlens)


def index_first_axis(rows: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return rows [T, …] by their numbers [N]: [N, …]."""
    return rows[indices]


def unpad_input(hidden: torch.Tensor, mask: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    """The rows [T, …] of [B, S, …] that the mask has, their numbers, where each sample begins, the longest, each length."""
    lengths = mask.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(mask.flatten(), as_tuple=False).flatten()
    begins = torch.nn.functional.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    return hidden.reshape(-1, *hidden.shape[2:])[indices], indices, begins, int(lengths.max().item()), lengths


def pad_input(hidden: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """The inverse: rows [T, …] into [B, S, …]."""
    out = torch.zeros((batch * seqlen, *hidden.shape[1:]), device=hidden.device, dtype=hidden.dtype)
    out[indices] = hidden
    return out.view(batch, seqlen, *hidden.shape[1:])


RULES = {
    one.__name__: one
    for one in (flash_attn_func, flash_attn_varlen_func, flash_attn_qkvpacked_func, flash_attn_kvpacked_func,
                flash_attn_varlen_qkvpacked_func, index_first_axis, unpad_input, pad_input)
}  # fmt: skip
