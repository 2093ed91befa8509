"""A causal language model's head and loss by cut cross-entropy, which never holds logits.

The forward keeps the hidden states and the head's weight as its products read them (autocast's 16-bit copies of both), a sum
and an index a token, and a mean a word, by which the backward orders the words. The backward makes both gradients at once,
those of a 32-bit weight by way of 16 bits. The head's module is never called.

Source: apple/ml-cross-entropy (cut_cross_entropy 25.1), cce.py, cce_lse_forward.py, cce_backward.py, utils.py
(_build_flat_valids) and transformers/llama.py
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from zeroplan.trace.kernels import block
from zeroplan.trace.replaced import fused_head, replaced

_NUMBER, _INDEX = 4, 8


class TracedCutCrossEntropy(torch.autograd.Function):
    """The mean loss of hidden states, [B, S, H], and labels, with the head's weight, [words, H]."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Keep both factors, a sum a token, and a mean a word."""
        batch, seq, _ = hidden.shape
        scored, words = batch * (seq - 1), weight.shape[0]
        found = block(2 * _INDEX * scored)
        narrow = block(2 * _NUMBER * scored)
        del found
        valid = block(_INDEX * scored)
        del narrow
        rows = hidden.contiguous().flatten(0, -2)
        ctx.dtypes = rows.dtype, weight.dtype
        ctx.trains = weight.requires_grad
        if torch.is_autocast_enabled("meta"):
            half = torch.get_autocast_dtype("meta")
            rows, weight = rows.to(half), weight.to(half)
        sums, means = block(_NUMBER * scored), torch.empty(words, dtype=torch.float32, device=rows.device)
        picked = block(_NUMBER * scored)
        ctx.save_for_backward(rows, weight, sums, valid, means)
        ctx.shape = hidden.shape
        del picked
        return torch.empty((), dtype=torch.float32, device=rows.device)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Make the gradients of both factors, then cast them."""
        rows, weight, _, _, means = ctx.saved_tensors
        order = torch.empty_like(means)
        grad_rows = torch.zeros_like(rows)
        grad_weight = torch.zeros_like(weight) if ctx.trains else None
        del order
        if grad_weight is not None:
            grad_weight = grad_weight.to(ctx.dtypes[1])
        return grad_rows.to(ctx.dtypes[0]).view(ctx.shape), grad_weight, None


@contextlib.contextmanager
def cut_cross_entropy(model: nn.Module) -> Iterator[None]:
    """Let a causal language model run with cut cross-entropy while the context lasts; another model runs as it is."""
    with replaced() as replace:
        fused_head(model, replace, _loss, evaluates=True)  # cce_patch's train_only is False
        yield


def _loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = TracedCutCrossEntropy.apply(hidden, weight, labels)
    return found
