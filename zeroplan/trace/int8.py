"""Linear layers over an int8 base (LLM.int8()), as bitsandbytes runs them on a GPU.

The forward rounds its input to int8 row by row and looks for outliers on the way; the product comes in int32, then in fp16,
then in the input's dtype. The input itself is kept for the backward, though nothing there reads it. The backward makes the
whole weight in the input's dtype, which after ``prepare_model_for_kbit_training`` is fp32 wherever a norm made it.

Columns with outliers, whose number the data decide, are not traced: each takes two copies (input and weight, 16 or 32 bits).

Source: bitsandbytes 0.50 ``autograd/_functions.py`` (``MatMul8bitLt``), ``backends/cuda/ops.py`` (``int8_vectorwise_quant``,
``int8_mm_dequant``), ``backends/default/ops.py`` (``int8_mixed_scaled_mm``), ``nn/modules.py`` (``Linear8bitLt``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

#: What transformers' ``llm_int8_threshold`` is by default; its value changes no size.
_THRESHOLD = 6.0


def _round_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """rows: [tokens, in] in fp16; returns int8 [tokens, in] and the rows' scales, fp32 [tokens]."""
    scales = rows.new_empty(rows.shape[0], dtype=torch.float32)
    codes = rows.new_empty(rows.shape, dtype=torch.int8)
    outliers = rows.abs() >= _THRESHOLD
    del outliers
    return codes, scales


class _Int8Product(torch.autograd.Function):
    """y = x·Wᵀ + b in int8, and the gradient of x through the weight in x's dtype."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        rounded = _round_rows(rows.to(torch.float16))
        codes = rounded[0]
        sums = codes.new_empty((codes.shape[0], weight.shape[0]), dtype=torch.int32)
        narrow = torch.empty_like(sums, dtype=torch.float16)
        if bias is not None:
            narrow.add_(bias)
        out = narrow.to(x.dtype)
        del narrow, sums
        ctx.weight, ctx.rows, ctx.shape = weight, rows, x.shape
        return out.reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        weight: torch.Tensor = ctx.weight
        grad = grad.reshape(-1, grad.shape[-1]).contiguous()
        whole = weight.new_empty(weight.shape, dtype=ctx.rows.dtype)
        whole.mul_(weight.new_empty((weight.shape[0], 1), dtype=torch.float32))
        return torch.matmul(grad.to(ctx.rows.dtype), whole).view(ctx.shape), None, None


class Linear8bitLt(nn.Linear):
    """A linear layer whose frozen weight is kept in int8; it answers in its input's dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in]; returns [..., out]."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        out: torch.Tensor = _Int8Product.apply(x, self.weight, bias)
        return out
