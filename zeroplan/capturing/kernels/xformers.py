"""xformers' memory-efficient attention ``[B, S, H, D]``, which runs FlashAttention-2 where that takes the inputs; unmeasured.

That is in 16 bits, without a bias that is a tensor, and for heads of at most 256; else CUTLASS's kernel runs, as torch's own.
Masks of packed samples, and keys that heads share by a fifth dimension, have no rule.

Source: xformers 0.0.32, ``ops/fmha/__init__.py``, ``ops/fmha/dispatch.py`` (``_dispatch_fw_priority_list``), ``flash.py``,
``cutlass.py``.
"""

from __future__ import annotations

from typing import Any

import torch

from zeroplan.capturing.kernels.flash_attn import flash_attn_func
from zeroplan.capturing.recorder import StoppedError
from zeroplan.capturing.source import user_line

_MOST_FLASH = 256


class LowerTriangularMask:
    """The causal mask, which has no bytes."""


def memory_efficient_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_bias: Any = None, *_: Any, **__: Any
) -> torch.Tensor:
    """Attention of [B, S, H, D]."""
    if query.dim() != 4 or not (attn_bias is None or isinstance(attn_bias, (torch.Tensor, LowerTriangularMask))):
        kind = type(attn_bias).__name__ if query.dim() == 4 else f"inputs of {query.dim()} dimensions"
        raise StoppedError(f"no rule knows what xformers' attention allocates with {kind}", user_line())
    half = query.dtype in (torch.float16, torch.bfloat16)
    if half and not isinstance(attn_bias, torch.Tensor) and query.shape[-1] <= _MOST_FLASH:
        return flash_attn_func(query, key, value)
    from zeroplan.trace.attention import EfficientAttention

    bias = attn_bias if isinstance(attn_bias, torch.Tensor) else None
    turned = (one.transpose(1, 2) for one in (query, key, value))
    out: torch.Tensor = EfficientAttention.apply(*turned, bias)
    return out.transpose(1, 2)


RULES: dict[str, Any] = {"memory_efficient_attention": memory_efficient_attention, "LowerTriangularMask": LowerTriangularMask}
