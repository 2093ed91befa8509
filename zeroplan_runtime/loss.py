"""The causal language models' loss without fp32 copies of the logits.

transformers' ``ForCausalLMLoss`` casts the logits [tokens, vocabulary] to fp32 and leaves two more such tensors to the
backward: for a vocabulary of 128 k and 16-bit logits the largest allocations of a whole step, three times the logits' own
size each. :func:`causal_lm_loss` takes its arguments and computes the same loss, in fp32 inside the kernels
(:mod:`zeroplan_runtime.kernels.loss`), so that only the logits and their gradient exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from zeroplan.core.losses import leaves_loss_to_function
from zeroplan_runtime.kernels import cross_entropy, cross_entropy_grad


def attach_fused_loss(model: nn.Module) -> Callable[[], None]:
    """Gives the causal language models within `model` this loss, where they have transformers' own.

    Returns:
        A function that undoes it.
    """
    changed = [module for module in model.modules() if _has_own_loss(module)]
    for module in changed:
        setattr(module, "loss_function", causal_lm_loss)  # noqa: B010 - a property of transformers' models

    def detach() -> None:
        for module in changed:
            del module._loss_function

    return detach


def _has_own_loss(module: nn.Module) -> bool:
    kind = type(module)
    is_causal = kind.__module__.startswith("transformers.models.") and leaves_loss_to_function(kind.__name__)
    return is_causal and isinstance(getattr(kind, "loss_function", None), property) and "_loss_function" not in vars(module)


def causal_lm_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """The mean cross entropy of each token's successor; the sum over `num_items_in_batch`, if that is given.

    Args:
        logits: [batch, tokens, vocabulary].
        labels: [batch, tokens], not shifted; `ignore_index` where there is nothing to predict.
        shift_labels: the labels already shifted, instead of `labels`.

    Source: transformers/loss/loss_utils.py, ForCausalLMLoss and fixed_cross_entropy.
    """
    if shift_labels is None:
        shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
    flat = logits.view(-1, vocab_size)
    return _CrossEntropy.apply(flat, shift_labels.view(-1).to(logits.device), num_items_in_batch, ignore_index)  # type: ignore[no-any-return, no-untyped-call]


class _CrossEntropy(torch.autograd.Function):
    """Mean of the rows' losses: over rows that count, or by a given number."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, items: torch.Tensor | int | None, ignore: int
    ) -> torch.Tensor:
        """`logits` [rows, vocabulary] and `labels` [rows] to one fp32 number."""
        lse, losses = cross_entropy(logits, labels, ignore)
        count = labels.ne(ignore).sum() if items is None else torch.as_tensor(items, device=logits.device)
        ctx.save_for_backward(logits, labels, lse, count)
        ctx.ignore = ignore
        return losses.sum() / count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """The logits' gradient, in their dtype."""
        logits, labels, lse, count = ctx.saved_tensors
        return cross_entropy_grad(logits, labels, lse, (grad / count).float(), ctx.ignore), None, None, None
