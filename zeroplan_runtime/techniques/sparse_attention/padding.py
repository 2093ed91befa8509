"""Sequences padded to whole blocks, and position embeddings for longer ones, by DeepSpeed's names.

:func:`.models.use_sparse_attention` needs no padding: it leaves out what the last block lacks. These are for models of your own
around :class:`.self_attention.SparseSelfAttention`, whose sequences are whole blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from zeroplan.core.errors import BadInput
from zeroplan_runtime.techniques.sparse_attention.models import use_sparse_attention
from zeroplan_runtime.techniques.sparse_attention.sparsity_config import SparsityConfig

#: The first rows of RoBERTa's position embeddings, which stand for padding.
_PADDING_ROWS = 2


class PaddedInputs(NamedTuple):
    """Inputs of a model, each [samples, tokens] or None, and how many tokens were added; in DeepSpeed's order."""

    pad_len: int
    input_ids: torch.Tensor | None
    attention_mask: torch.Tensor | None
    token_type_ids: torch.Tensor | None
    position_ids: torch.Tensor | None
    inputs_embeds: torch.Tensor | None


class SparseAttentionUtils:
    """Functions around sparse attention (``deepspeed/ops/sparse_attention/sparse_attention_utils.py``)."""

    @staticmethod
    def pad_to_block_size(
        block_size: int,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        token_type_ids: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        pad_token_id: int,
        model_embeddings: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> PaddedInputs:
        """Pads a model's inputs to a multiple of the block; added tokens are masked. What is None stays None.

        Args:
            block_size: tokens of a block.
            input_ids: [samples, tokens]; padded by `pad_token_id`, as position_ids are.
            attention_mask: [samples, tokens]; padded by 0.
            token_type_ids: [samples, tokens]; padded by 0.
            position_ids: [samples, tokens].
            inputs_embeds: [samples, tokens, width]; padded by the embedding of `pad_token_id`.
            pad_token_id: the token to add.
            model_embeddings: embeds tokens; needed with `inputs_embeds`.

        Raises:
            BadInput: for neither tokens nor embeddings, or embeddings without what embeds.
        """
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None:
            raise BadInput("neither input_ids nor inputs_embeds", where="pad_to_block_size", remedy="give one")
        samples, tokens = given.shape[:2]
        short = -tokens % block_size
        if not short:
            return PaddedInputs(0, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        if inputs_embeds is not None:
            if model_embeddings is None:
                raise BadInput("inputs_embeds need it", where="model_embeddings", remedy="give the model's embeddings")
            added = torch.full((samples, short), pad_token_id, dtype=torch.long, device=given.device)
            inputs_embeds = torch.cat((inputs_embeds, model_embeddings(added)), dim=1)

        def longer(each: torch.Tensor | None, value: int) -> torch.Tensor | None:
            return None if each is None else functional.pad(each, (0, short), value=value)

        return PaddedInputs(
            short,
            longer(input_ids, pad_token_id),
            longer(attention_mask, 0),
            longer(token_type_ids, 0),
            longer(position_ids, pad_token_id),
            inputs_embeds,
        )

    @staticmethod
    def unpad_sequence_output(pad_len: int, sequence_output: torch.Tensor) -> torch.Tensor:
        """Returns an output [samples, tokens, width] without the `pad_len` last tokens."""
        return sequence_output[:, :-pad_len] if pad_len > 0 else sequence_output

    @staticmethod
    def extend_position_embedding(model: Any, max_position: int) -> Any:
        """Repeats the position embeddings of BERT or RoBERTa, and cuts them at `max_position` positions; returns the model.

        RoBERTa's first two rows stand for padding and are kept once.

        Raises:
            BadInput: for another model, or fewer positions than it has.
        """
        base = getattr(model, "base_model", model)
        kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        if kind not in ("bert", "roberta"):
            raise BadInput(f"{kind} is not supported", where="extend_position_embedding", remedy="it knows bert, roberta")
        table: nn.Embedding = base.embeddings.position_embeddings
        kept = _PADDING_ROWS if kind == "roberta" else 0
        old = table.weight.data[kept:]
        if max_position <= len(old):
            raise BadInput(
                f"{max_position} positions, where the model has {len(old)}", where="max_position", remedy="ask for more"
            )
        repeated = old.repeat(-(-max_position // len(old)), 1)[:max_position]
        table.weight.data = torch.cat((table.weight.data[:kept], repeated))
        table.num_embeddings = len(table.weight)
        base.embeddings.position_ids = torch.arange(len(table.weight), device=old.device).unsqueeze(0)
        base.embeddings.token_type_ids = torch.zeros_like(base.embeddings.position_ids)
        model.config.max_position_embeddings = len(table.weight)
        return model

    @staticmethod
    def replace_model_self_attention_with_sparse_self_attention(
        model: Any, max_position: int, sparsity_config: SparsityConfig
    ) -> Any:
        """Gives a model block-sparse attention, as :func:`.models.use_sparse_attention` does, and notes its positions in its
        config; returns the model.

        Raises:
            BadInput: as that function.
        """
        use_sparse_attention(model, sparsity_config)
        model.config.max_position_embeddings = max_position + (_PADDING_ROWS if model.config.model_type == "roberta" else 0)
        return model

    @staticmethod
    def update_tokenizer_model_max_length(tokenizer: Any, max_position: int) -> Any:
        """Sets the longest sequence of a tokenizer; returns it."""
        tokenizer.model_max_length = max_position
        tokenizer.init_kwargs["model_max_length"] = max_position
        return tokenizer
