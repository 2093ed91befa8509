"""torch's FlexAttention, compiled: its Triton kernels keep inputs, output and a fp32 number a query and head.

The output lies in memory as the query does. Measured on an H200 with torch 2.11 (benchmarks/capture/kernel_loops.py).

Called without ``torch.compile`` it is the plain products, with whole scores, which torch runs by itself.

Source: torch 2.13, ``_inductor/kernel/flex/flex_attention.py`` (``flex_attention``, ``flex_attention_backward``),
``_higher_order_ops/flex_attention.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zeroplan.capturing.hooks.imports import changes
from zeroplan.trace.attention import laid_out_as
from zeroplan.trace.kernels import block


def install(module: Any) -> None:
    """Let block masks be made without ``vmap``, under which tensors have no storage; the blocks are the same."""
    changes(module)

    def over_all(mask_mod: Callable[..., torch.Tensor], prefix: tuple[Any, ...], **_: Any) -> Callable[..., torch.Tensor]:
        def called(*args: torch.Tensor) -> torch.Tensor:
            scores, indices = args[: len(prefix)], args[len(prefix) :]
            at = [one.view(*(-1 if axis == n else 1 for axis in range(4))) for n, one in enumerate(indices)]
            return mask_mod(*scores, *at).expand([len(one) for one in indices])

        return called

    ordered = module._ordered_to_dense

    def to_dense(counts: torch.Tensor, columns: torch.Tensor, *size: int) -> torch.Tensor:
        if counts.dim() == 1:
            return ordered(counts, columns, *size)  # type: ignore[no-any-return]
        return torch.stack([to_dense(*each, *size) for each in zip(counts, columns, strict=True)])

    module._vmap_for_bhqkv, module._ordered_to_dense = over_all, to_dense


class FlexAttention(torch.autograd.Function):
    """Attention of [B, H, S, D]."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and the sums."""
        out = laid_out_as(query, value.shape[-1])
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
