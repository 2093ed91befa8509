"""LitGPT's own model and loss as one module, where LitGPT is installed.

Source: LitGPT 0.5.13, ``finetune/lora.py``, ``finetune/full.py`` and ``pretrain.py`` (``fit``, ``main``).
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from zeroplan.core.lit_model import LitModel

#: ``finetune/lora.py``, fit: tokens of one chunk of the head.
HEAD_CHUNK = 128


class WithLoss(nn.Module):
    """A model of LitGPT with the loss that its programs compute.

    Args:
        model: LitGPT's ``GPT``.
        loss: its ``chunked_cross_entropy``.
        lit: how its logits are made.
    """

    def __init__(self, model: nn.Module, loss: Any, lit: LitModel) -> None:
        super().__init__()
        self.model, self.loss, self.lit = model, loss, lit
        self.config = {"_name_or_path": f"{lit.name} (LitGPT's own)"}

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of tokens and labels of shape (batch, length)."""
        if self.lit.chunked_head:
            chunks = self.model(input_ids, lm_head_chunk_size=HEAD_CHUNK)
            chunks[-1] = chunks[-1][..., :-1, :]
            loss: torch.Tensor = self.loss(chunks, labels[..., 1:])
            return loss
        logits = self.model(input_ids)
        if self.lit.shifted:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        whole: torch.Tensor = self.loss(logits, labels)
        return whole


def litgpt_module(lit: LitModel, *, seq_len: int) -> nn.Module | None:
    """Return the model without weights and with its loss; None where LitGPT is not installed or does not know the name."""
    try:
        code = importlib.import_module("litgpt.lora" if lit.adapters else "litgpt.model")
        utils = importlib.import_module("litgpt.utils")
        config = code.Config.from_name(lit.name, **dict(lit.adapters))
    except (ImportError, ValueError, TypeError):
        return None
    if seq_len > config.block_size:
        return None
    with torch.device("meta"):
        model = code.GPT(config)
        model.max_seq_length = seq_len
    if lit.adapters:
        code.mark_only_lora_as_trainable(model)
    return WithLoss(model, utils.chunked_cross_entropy, lit)


def batch_of(micro_batch: int, seq_len: int) -> dict[str, torch.Tensor]:
    """Return tokens and labels of one micro batch."""
    tokens = torch.zeros(micro_batch, seq_len, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}
