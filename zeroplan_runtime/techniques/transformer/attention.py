"""Attention of a transformer layer: torch's fused kernels on a GPU; elsewhere, or if asked for, with all scores in memory.

Fused attention keeps query, key, value, output and one fp32 number a query and head. :class:`WholeScores` keeps query, key and
value, the probabilities [samples, heads, tokens, tokens], and their dropped copy unless `attn_dropout_checkpoint`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from zeroplan.core.errors import BadInput
from zeroplan_runtime.kernels import layer as kernels
from zeroplan_runtime.kernels.philox import Dropout

_WHERE = "DeepSpeedTransformerLayer"


def usable_mask(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Returns a mask of scores as attention takes it: bool, True where a score counts, or numbers to add in `dtype`.

    Raises:
        BadInput: for one that is not [samples, heads or 1, queries or 1, keys].
    """
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor) or mask.dim() != 4:
        said = f"{mask.dim()} dimensions" if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise BadInput(f"an attention_mask of {said}", where=_WHERE, remedy="give it as [samples, 1, 1, tokens]")
    return mask if mask.dtype in (torch.bool, dtype) else mask.to(dtype)


class WholeScores(Function):
    """Scaled dot-product attention with all scores in memory."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        dropout: Dropout | None,
        recompute: bool,
    ) -> torch.Tensor:
        """Returns the output [samples, heads, tokens, width], whose memory is laid out [samples, tokens, heads, width].

        Args:
            ctx: autograd's context.
            query: [samples, heads, tokens, width].
            key: as `query`.
            value: as `query`.
            mask: see :func:`usable_mask`.
            dropout: of the probabilities.
            recompute: drop the probabilities again in the backward, and keep no dropped copy.
        """
        ctx.scale = query.shape[-1] ** -0.5
        scores = torch.matmul(query, key.transpose(2, 3)).mul_(ctx.scale)
        if mask is not None and mask.dtype is torch.bool:
            scores.masked_fill_(~mask, torch.finfo(scores.dtype).min)
        elif mask is not None:
            scores.add_(mask)
        probabilities = torch.softmax(scores, -1)
        del scores
        dropped = probabilities if dropout is None else kernels.drop(probabilities, dropout)
        samples, heads, tokens, width = query.shape
        out = query.new_empty(samples, tokens, heads, width).transpose(1, 2)
        out.copy_(torch.matmul(dropped, value))
        again = recompute and dropout is not None
        kept = (None if again else dropped) if dropout is not None else None
        ctx.save_for_backward(query, key, value, probabilities, kept, None if dropout is None else dropout.seed)
        ctx.numbers = None if dropout is None else (dropout.ratio, dropout.salt, dropout.stream)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Returns the gradients of query, key and value."""
        query, key, value, probabilities, dropped, seed = ctx.saved_tensors
        dropout = None
        if ctx.numbers is not None:
            ratio, salt, stream = ctx.numbers
            dropout = Dropout(ratio, seed, salt, stream)
        if dropped is None:
            dropped = probabilities if dropout is None else kernels.drop(probabilities, dropout)
        grad_value = torch.matmul(dropped.transpose(2, 3), grad)
        del dropped
        grad_probabilities = torch.matmul(grad, value.transpose(2, 3))
        if dropout is not None:
            kernels.drop(grad_probabilities, dropout, out=grad_probabilities)
        grad_scores = torch._softmax_backward_data(grad_probabilities, probabilities, -1, probabilities.dtype)
        del grad_probabilities
        grad_scores = grad_scores.mul_(ctx.scale)
        return torch.matmul(grad_scores, key), torch.matmul(grad_scores.transpose(2, 3), query), grad_value, None, None, None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    ratio: float,
    dropout: Dropout | None,
    *,
    fused: bool,
    recompute: bool,
) -> torch.Tensor:
    """Returns attention's output [samples, tokens, heads · width].

    Args:
        query: [samples, heads, tokens, width].
        key: as `query`.
        value: as `query`.
        mask: see :func:`usable_mask`.
        ratio: dropout of the probabilities by torch's own generator, where attention is fused.
        dropout: the same, where it is not.
        fused: use torch's fused attention.
        recompute: see :class:`WholeScores`.
    """
    samples, _, tokens, _ = query.shape
    if fused:
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=ratio)
    else:
        out = WholeScores.apply(query, key, value, mask, dropout, recompute)
    return out.transpose(1, 2).reshape(samples, tokens, -1)
