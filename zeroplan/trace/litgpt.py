"""LitGPT's own model and loss as one module, where LitGPT is installed.

Note [LitGPT's loop]
    Fabric casts what the model returns to fp32 (``convert_output`` of each of its precisions), so logits are fp32 in the loss,
    whatever the model is in. The loop keeps them by name until the model has returned the next ones.
    Fabric's bitsandbytes plugin quantises every linear layer, the head and what adapters stand beside among them, from fp16:
    weights are dequantised into fp16, and converted from that where the run is in bf16. Embedding, norms, biases and adapters
    are in the run's dtype, and nothing is made fp32.
Source: LitGPT 0.5.13, ``finetune/lora.py``, ``finetune/full.py`` and ``pretrain.py`` (``fit``, ``main``); Lightning 2.6,
``fabric/wrappers.py`` (``_FabricModule.forward``), ``fabric/plugins/precision/bitsandbytes.py``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zeroplan.core.lit_model import LitModel
from zeroplan.core.quantization import Products, Quantization
from zeroplan.trace.quantized import Linear4bit, Linear4bitSingle

#: ``finetune/lora.py``, fit: tokens of one chunk of the head.
HEAD_CHUNK = 128


class WithLoss(nn.Module):
    """A model of LitGPT with the loss that its programs compute. See Note [LitGPT's loop].

    Args:
        model: LitGPT's ``GPT``.
        loss: its ``chunked_cross_entropy``.
        lit: how its logits are made.
    """

    #: Called when the loop's variable has the model's output.
    on_output: Callable[[], object] | None = None

    def __init__(self, model: nn.Module, loss: Any, lit: LitModel) -> None:
        super().__init__()
        self.model, self.loss, self.lit = model, loss, lit
        self.config = {"_name_or_path": f"{lit.name} (LitGPT's own)"}

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of tokens and labels of shape (batch, length)."""
        if self.lit.chunked_head:
            chunks = [chunk.float() for chunk in self.model(input_ids, lm_head_chunk_size=HEAD_CHUNK)]
            self._returned()
            chunks[-1] = chunks[-1][..., :-1, :]
            return _kept_by(self.loss(chunks, labels[..., 1:]), chunks)
        logits = self.model(input_ids).float()
        self._returned()
        if self.lit.shifted:
            return _kept_by(self.loss(logits[..., :-1, :], labels[..., 1:]), logits)
        return _kept_by(self.loss(logits, labels), logits)

    def _returned(self) -> None:
        if self.on_output is not None:
            self.on_output()

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Mapping[str, Any]) -> None:
        """Checkpoint every block, as Fabric does by ``activation_checkpointing_policy``."""
        for block in self.model.transformer.h:  # type: ignore[union-attr]
            block.forward = _checkpointed(block.forward, gradient_checkpointing_kwargs)


def _kept_by(loss: torch.Tensor, logits: Any) -> torch.Tensor:
    """Return the loss with the logits, which go as it does."""
    loss.logits = logits  # type: ignore[attr-defined]
    return loss


def _checkpointed(forward: Callable[..., Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    return lambda *args, **named: checkpoint(forward, *args, **kwargs, **named)


def litgpt_module(lit: LitModel, *, seq_len: int, converts: bool = True) -> nn.Module | None:
    """Return the model without weights and with its loss; None where LitGPT is not installed or does not know the name.

    Args:
        seq_len: tokens of a sample.
        converts: whether the run's dtype is another one than fp16.
    """
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
    if lit.quantize is not None:
        _quantize(model, lit, converts)
    return WithLoss(model, utils.chunked_cross_entropy, lit)


def _quantize(model: nn.Module, lit: LitModel, converts: bool) -> None:
    nested = Quantization(str(lit.quantize)).products is Products.NESTED
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear4bit if nested else Linear4bitSingle
            module.from_half, module.keeps_input = converts, lit.keeps_inputs  # type: ignore[assignment]


def batch_of(micro_batch: int, seq_len: int) -> dict[str, torch.Tensor]:
    """Return tokens and labels of one micro batch."""
    tokens = torch.zeros(micro_batch, seq_len, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}
