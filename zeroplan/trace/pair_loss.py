"""The loss of ORPO, CPO and SimPO over a model's logits, operator by operator as TRL computes it.

A micro batch holds pairs: so many chosen samples, then as many rejected ones. Log-probabilities of labels come from TRL's
Triton kernel, which keeps the logits and four fp32 numbers a token, and hands back a gradient of the logits' size.
LLaMA-Factory takes them from a log-softmax of the logits, which it makes fp32 itself.
Source: TRL 1.16, ``experimental/orpo/orpo_trainer.py`` (concatenated_forward, get_batch_logps, odds_ratio_loss),
``kernels/logprob_entropy.py`` (_LogProbEntropyFunction); accelerate 1.15, ``utils/operations.py`` (ConvertOutputsToFp32);
LLaMA-Factory 0.9.6, ``train/dpo/trainer.py`` (concatenated_forward), ``train/trainer_utils.py`` (get_batch_logps).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zeroplan.core.preferences import PairLoss

_IGNORED = -100
#: What the collator hands over of each kind of sample.
_PARTS = ("input_ids", "attention_mask", "labels")


class _PickedLogProbabilities(torch.autograd.Function):
    """Log-probabilities of one word a row, of logits that may be a slice."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        found, entropy, normaliser, expected = (logits.new_empty(index.shape, dtype=torch.float32) for _ in range(4))
        ctx.save_for_backward(logits, index, normaliser, expected)
        del entropy  # returned as well, and dropped by the caller
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        logits = ctx.saved_tensors[0]
        return torch.empty_like(logits, memory_format=torch.contiguous_format), None


def pairs_of(batch: int, seq: int) -> dict[str, torch.Tensor]:
    """Return the tensors of `batch` pairs of `seq` tokens, on the meta device, as the collator makes them."""

    def tokens() -> torch.Tensor:
        return torch.empty((batch, seq), dtype=torch.int64, device="meta")

    return {f"{kind}_{part}": tokens() for kind in ("chosen", "rejected") for part in _PARTS}


def loss_of_pairs(model: nn.Module, batch: Mapping[str, torch.Tensor], loss: PairLoss, *, wide: bool) -> torch.Tensor:
    """Run the model on both samples of each pair, and return the loss.

    Args:
        model: a causal language model.
        batch: see :func:`pairs_of`.
        loss: what is added up.
        wide: whether the wrapper around the model makes its logits fp32.
    """
    both = {part: torch.cat((batch[f"chosen_{part}"], batch[f"rejected_{part}"])) for part in _PARTS}
    count = batch["chosen_labels"].shape[0]
    logits = _logits(model, both["input_ids"], wide=wide or loss is PairLoss.SOFTMAX)
    added = _cross_entropy(logits[:count], both["labels"][:count]) if loss is PairLoss.RANKING_AND_NLL else None
    mean = _mean_log_probabilities(logits, both["labels"], whole=loss is PairLoss.SOFTMAX)
    chosen, rejected = mean[:count], mean[count:]
    ranking = -nn.functional.logsigmoid(chosen - rejected).mean()
    return ranking if added is None else ranking + added


def _logits(model: nn.Module, ids: torch.Tensor, *, wide: bool) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=ids).logits
    return logits.float() if wide else logits


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
    return nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def _mean_log_probabilities(logits: torch.Tensor, labels: torch.Tensor, *, whole: bool) -> torch.Tensor:
    labels, logits = labels[:, 1:].clone(), logits[:, :-1, :]
    mask = labels != _IGNORED
    index = torch.where(labels == _IGNORED, 0, labels)
    if whole:
        scores = logits.log_softmax(-1)
        found = torch.gather(scores, dim=2, index=index.unsqueeze(2)).squeeze(2)
    else:
        found = _PickedLogProbabilities.apply(logits, index)
    mean: torch.Tensor = (found * mask).sum(-1) / mask.sum(-1)
    return mean
