"""A Llama as the list of layers of DeepSpeed's ``PipelineModule``: hidden states pass from layer to layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

#: The rotary positions of a stage's last micro batch, which its first block makes and all of its blocks use.
_positions: list[Any] = []
_owner: list[int] = []


class EmbeddingPipe(nn.Module):
    """The embedding."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of token ids."""
        found: torch.Tensor = self.embed_tokens(ids)
        return found


class DecoderPipe(nn.Module):
    """One block."""

    def __init__(self, config: Any, number: int) -> None:
        super().__init__()
        self.number = number
        self.layer = LlamaDecoderLayer(config, number)
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the next hidden states; the stage's first block makes the positions."""
        if not _owner or _owner[0] == self.number:
            _owner[:] = [self.number]
            _positions[:] = [self.rotary(hidden, torch.arange(hidden.shape[1], device=hidden.device)[None])]
        found: torch.Tensor = self.layer(hidden, attention_mask=None, position_embeddings=_positions[0])
        return found


class NormPipe(nn.Module):
    """The final norm."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the normed hidden states."""
        found: torch.Tensor = self.norm(hidden)
        return found


class HeadPipe(nn.Module):
    """The head."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        found: torch.Tensor = self.lm_head(hidden)
        return found


def pipeline_module(model: dict[str, Any], stages: int, partition: str, *, together: int) -> PipelineModule:
    """Return this rank's stage, of layers in the default dtype and on the default device.

    Args:
        model: the Llama's config.
        stages: how many.
        partition: DeepSpeed's ``partition_method``.
        together: layers that are recomputed together, 0 for no recomputation.
    """
    config = transformers.AutoConfig.for_model(**model, attn_implementation="sdpa")
    blocks = [LayerSpec(DecoderPipe, config, number) for number in range(config.num_hidden_layers)]
    layers = [LayerSpec(EmbeddingPipe, config), *blocks, LayerSpec(NormPipe, config), LayerSpec(HeadPipe, config)]
    if config.tie_word_embeddings:
        weight = "embed_tokens.weight"
        layers[0] = TiedLayerSpec("words", EmbeddingPipe, config, tied_weight_attr=weight)
        layers[-1] = TiedLayerSpec("words", EmbeddingPipe, config, forward_fn=_tied_head, tied_weight_attr=weight)
    return PipelineModule(
        layers,
        num_stages=stages,
        loss_fn=_loss(config.vocab_size),
        partition_method=partition,
        activation_checkpoint_interval=together,
        checkpointable_layers=["DecoderPipe"],
    )


def _tied_head(table: EmbeddingPipe, hidden: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(hidden, table.embed_tokens.weight)


def _loss(words: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = ForCausalLMLoss(logits, labels, words)
        return found

    return loss
