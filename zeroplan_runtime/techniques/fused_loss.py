"""The causal language models' loss without fp32 copies of the logits.

transformers' ``ForCausalLMLoss`` casts the logits [tokens, vocabulary] to fp32 and its backward allocates two more such
tensors. With a vocabulary of 128 k these are the largest allocations of a step, each twice the size of 16-bit logits.
:func:`causal_lm_loss` takes the same arguments and computes the same loss, in fp32 inside the kernels
(:mod:`zeroplan_runtime.kernels.loss`), so that only the logits and their gradient exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from zeroplan.core.losses import IGNORED_LABEL, leaves_loss_to_function
from zeroplan_runtime.compiled import outside_graphs
from zeroplan_runtime.kernels import cross_entropy, cross_entropy_grad
from zeroplan_runtime.local_tensors import is_distributed


def attach_fused_loss(model: nn.Module) -> Callable[[], None]:
    """Replaces the loss of the causal language models in `model`, where it is transformers' own, by :func:`causal_lm_loss`.

    Returns:
        A function that restores the loss.
    """
    changed: list[Any] = [module for module in model.modules() if _has_own_loss(module)]
    for module in changed:
        module.loss_function = causal_lm_loss

    def detach() -> None:
        for module in changed:
            del module._loss_function

    return detach


def _has_own_loss(module: nn.Module) -> bool:
    kind = type(module)
    is_causal = kind.__module__.startswith("transformers.models.") and leaves_loss_to_function(kind.__name__)
    return is_causal and isinstance(getattr(kind, "loss_function", None), property) and "_loss_function" not in vars(module)


@outside_graphs
def causal_lm_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = IGNORED_LABEL,
    shift_labels: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Computes the cross entropy of predicting each next token, averaged over the tokens.

    Args:
        logits: [batch, tokens, vocabulary].
        labels: [batch, tokens], not shifted; `ignore_index` where there is nothing to predict.
        vocab_size: the last dimension of `logits`.
        num_items_in_batch: divides the sum of the losses instead of the number of labels that count.
        ignore_index: the label of tokens without loss.
        shift_labels: [batch, tokens], labels that are shifted already, instead of `labels`.

    Returns:
        One fp32 element. Logits that are a DTensor go through torch's own loss, within the caller's ``loss_parallel()``.

    Source: transformers/loss/loss_utils.py, ForCausalLMLoss and fixed_cross_entropy.
    """
    if shift_labels is None:
        shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
    flat = logits.view(-1, vocab_size)
    if is_distributed(logits):  # of a head that tensor-parallel ranks share: torch's loss_parallel() adds over its parts
        labels, how = shift_labels.view(-1).to(logits.device), "mean" if num_items_in_batch is None else "sum"
        loss = functional.cross_entropy(flat.float(), labels, ignore_index=ignore_index, reduction=how)
        return loss if num_items_in_batch is None else loss / num_items_in_batch
    found: torch.Tensor = _CrossEntropy.apply(flat, shift_labels.view(-1).to(logits.device), num_items_in_batch, ignore_index)
    return found


class _CrossEntropy(torch.autograd.Function):
    """The mean of the rows' cross entropies: over the rows whose label counts, or over a given number."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, items: torch.Tensor | int | None, ignore: int
    ) -> torch.Tensor:
        """Returns one fp32 element for `logits` [rows, vocabulary] and `labels` [rows]."""
        lse, losses = cross_entropy(logits, labels, ignore)
        count = labels.ne(ignore).sum() if items is None else torch.as_tensor(items, device=logits.device)
        ctx.save_for_backward(logits, labels, lse, count)
        ctx.ignore = ignore
        return losses.sum() / count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Returns the gradient of the logits, [rows, vocabulary] in their dtype."""
        logits, labels, lse, count = ctx.saved_tensors
        return cross_entropy_grad(logits, labels, lse, (grad / count).float(), ctx.ignore), None, None, None
