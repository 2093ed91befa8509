"""Block-sparse attention in models of transformers, by its registry of attention implementations."""

from __future__ import annotations

import copy
import itertools
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeroplan.core.errors import BadInput
from zeroplan.core.sparse_attention import TILE, require_model_type, require_tiles
from zeroplan_runtime.techniques.sparse_attention.attention import dense_attention, tiled_attention
from zeroplan_runtime.techniques.sparse_attention.block_attention import BlockLists, block_attention, lists_for_kernels
from zeroplan_runtime.techniques.sparse_attention.sparsity_config import SparsityConfig
from zeroplan_runtime.techniques.sparse_attention.tiles import SparseScores

logger = logging.getLogger("zeroplan_runtime")

_WHERE = "sparse attention"
#: Lengths whose tables are kept.
_MOST_LENGTHS = 16
#: A compiled model breaks its graph here: inductor would compile these kernels anew, which no GPU has run.
_as_written = torch.compiler.disable(block_attention)
_numbers = itertools.count()


def use_sparse_attention(
    model: nn.Module, sparsity_config: SparsityConfig, *, tile: int = TILE, autotune: bool = False
) -> Callable[[], None]:
    """Gives BERT, RoBERTa, GPT-2 and Llama of transformers block-sparse self-attention.

    Their weights and their code stay as they are. A model that is causal stays so token by token, whatever the layout says;
    padding is masked; sequences need not be a multiple of the block. Random blocks are drawn with the config's seed, 0 where it
    has none, so that all ranks and a resumed run have the same; each length has a layout of its own, and all layers share it.
    Dropout of attention probabilities is not applied, as in DeepSpeed.

    Args:
        model: holds one or more models of transformers.
        sparsity_config: the kind of sparsity.
        tile: tokens of a kernel's tile; below 128 it needs `autotune`.
        autotune: try several kernels at a shape's first call and keep the fastest.

    Returns:
        A function that gives the models their own attention again.

    Raises:
        BadInput: for a model of another type or with other heads, with cross-attention, or a block that does not fit tiles.
    """
    configs = _configs_of(model)
    for config in configs:
        _require_known(config, sparsity_config)
    shares_keys = any(getattr(each, "num_key_value_heads", None) not in (None, each.num_attention_heads) for each in configs)
    attention = SparseInterface(sparsity_config, shares_keys=shares_keys, tile=tile, autotune=autotune)
    return attention.attach(model, configs)


def heads_of(model: nn.Module) -> int:
    """Returns the attention heads of the first model of transformers in `model`.

    Raises:
        BadInput: when there is none, or one of an unknown type.
    """
    config = _configs_of(model)[0]
    require_model_type(config.model_type)
    return int(config.num_attention_heads)


def _configs_of(model: nn.Module) -> list[Any]:
    """Returns the configs of transformers' models in `model`, each once.

    Raises:
        BadInput: when there is none.
    """
    found = [module.config for module in model.modules() if _is_of_transformers(module)]
    if not found:
        raise BadInput(
            f"{type(model).__name__} holds no model of transformers",
            where=_WHERE,
            remedy="call zeroplan_runtime.sparse_attention.SparseSelfAttention in a model of your own",
        )
    return list({id(config): config for config in found}.values())


def _is_of_transformers(module: nn.Module) -> bool:
    loaded = sys.modules.get("transformers.modeling_utils")  # without which no module can be of its class
    return loaded is not None and isinstance(module, loaded.PreTrainedModel)


def _require_known(config: Any, sparsity_config: SparsityConfig) -> None:
    require_model_type(config.model_type)
    if getattr(config, "add_cross_attention", False):
        raise BadInput("cross-attention is not supported", where=_WHERE, remedy="use a model without it")
    if config.num_attention_heads != sparsity_config.num_heads:
        raise BadInput(
            f"the model has {config.num_attention_heads} heads, the sparsity_config {sparsity_config.num_heads}",
            where=f"{_WHERE}: num_heads",
            remedy="make them equal",
        )
    names = ("attention_probs_dropout_prob", "attn_pdrop", "attention_dropout")
    dropout = next((name for name in names if getattr(config, name, 0.0)), None)
    if dropout is not None:
        logger.warning("%s %s is not applied: sparse attention has no dropout", dropout, getattr(config, dropout))


@dataclass(frozen=True)
class ForwardMask:
    """What all layers of one forward share; transformers hands it to them in the place of a mask.

    Attributes:
        scores: which scores exist, where tiles of them or all are computed.
        kernel: FlexAttention's mask on CUDA; elsewhere whether each score counts, bool [samples or 1, heads or 1, tokens,
            tokens].
        lists: what the kernels of lists compute instead, on CUDA.
        padding: for them: which keys are tokens, bool [samples, tokens].
    """

    scores: SparseScores | None = None
    kernel: Any = None
    lists: BlockLists | None = None
    padding: torch.Tensor | None = None


class SparseInterface:
    """An attention implementation for transformers, and its masks. `shares_keys`: groups of heads have keys in common."""

    def __init__(self, sparsity_config: SparsityConfig, *, shares_keys: bool, tile: int = TILE, autotune: bool = False) -> None:
        self.sparsity_config = copy.copy(sparsity_config)
        if sparsity_config.seed is None:
            self.sparsity_config.seed = 0
        require_tiles(sparsity_config.block, tile)
        self.shares_keys, self.tile, self.autotune = shares_keys, tile, autotune
        self.name = f"zeroplan_sparse_{next(_numbers)}"
        self._scores: dict[tuple[int, torch.device, bool], SparseScores] = {}
        self._lists: dict[tuple[int, torch.device, bool], BlockLists | None] = {}

    def attach(self, model: nn.Module, configs: list[Any]) -> Callable[[], None]:
        """Makes the models of these configs use it; returns what undoes that."""
        from transformers import AttentionInterface, AttentionMaskInterface

        AttentionInterface.register(self.name, self.attend)
        AttentionMaskInterface.register(self.name, self.mask)
        own = [config._attn_implementation for config in configs]
        for config in configs:
            config._attn_implementation = self.name

        def detach() -> None:
            for config, name in zip(configs, own, strict=True):
                config._attn_implementation = name
            for interface in (AttentionInterface, AttentionMaskInterface):
                interface._global_mapping.pop(self.name, None)

        return detach

    def lists_of(self, tokens: int, device: torch.device, *, causal: bool) -> BlockLists | None:
        """Returns the lists of a sequence of `tokens` tokens, if kernels are to take them; made once."""
        key = (tokens, device, causal)
        if key not in self._lists:
            if len(self._lists) == _MOST_LENGTHS:
                del self._lists[next(iter(self._lists))]
            scores = SparseScores.make(self.sparsity_config, tokens, causal=causal, tile=self.tile)
            self._lists[key] = lists_for_kernels(self.sparsity_config, scores, device, shares_keys=self.shares_keys)
        return self._lists[key]

    def scores_of(self, tokens: int, device: torch.device, *, causal: bool) -> SparseScores:
        """Returns the scores of a sequence of `tokens` tokens; made once."""
        key = (tokens, device, causal)
        if key not in self._scores:
            if len(self._scores) == _MOST_LENGTHS:
                del self._scores[next(iter(self._scores))]
            config = self.sparsity_config
            made = SparseScores.make(config, tokens, causal=causal, tile=self.tile)
            if device.type == "cuda":
                moved = made.for_kernels(queries=config.moves_queries, keys=config.moves_keys)
                if self.shares_keys and moved.keys is not None and len(moved.keys.tokens) > 1:
                    moved = made.for_kernels(queries=config.moves_queries, keys=False)  # heads of a group want other orders
                made = moved.to(device)
            self._scores[key] = made
        return self._scores[key]

    def mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        mask_function: Callable[..., Any],
        attention_mask: torch.Tensor | None = None,
        device: torch.device | str | None = None,
        **others: Any,
    ) -> ForwardMask:
        """Returns the mask of a forward; the arguments are those of transformers' ``AttentionMaskInterface``.

        Raises:
            BadInput: for packed sequences, windows and other masks, and for queries that are not all of the keys.
        """
        from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

        if mask_function not in (causal_mask_function, bidirectional_mask_function):
            raise BadInput(
                "packed sequences, windows and masks of scores are not supported",
                where=_WHERE,
                remedy="give whole sequences, and attention_mask [samples, tokens]",
            )
        if q_length != kv_length:
            raise BadInput(
                f"{q_length} queries for {kv_length} keys", where=_WHERE, remedy="generate without a cache (use_cache=False)"
            )
        where = torch.device("cpu" if device is None else device)
        causal = mask_function is causal_mask_function
        padding = None if attention_mask is None else attention_mask.bool()
        if where.type == "cuda" and not torch.compiler.is_compiling():
            lists = self.lists_of(kv_length, where, causal=causal)
            if lists is not None and padding is not None and not lists.hides(padding) and bool(padding.all()):
                padding = None
            if lists is not None and lists.hides(padding):
                return ForwardMask(lists=lists, padding=padding)
        scores = self.scores_of(kv_length, where, causal=causal)
        if where.type == "cuda":
            return ForwardMask(scores, scores.block_mask(padding))
        dense = scores.dense_mask().unsqueeze(0)
        return ForwardMask(scores, dense if padding is None else dense & padding[:, None, None])

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        dropout: float = 0.0,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """Returns the output [samples, tokens, heads, width], as transformers' ``AttentionInterface`` asks for it."""
        if not isinstance(attention_mask, ForwardMask):
            raise BadInput(
                "a mask of scores is not supported", where=_WHERE, remedy="give attention_mask [samples, tokens], or none"
            )
        scores, kernel, lists = attention_mask.scores, attention_mask.kernel, attention_mask.lists
        if lists is not None and not lists.takes(query):
            scores = self.scores_of(query.shape[2], query.device, causal=lists.causal)
            kernel, lists = scores.block_mask(attention_mask.padding), None
        if lists is not None:
            attend = _as_written if torch.compiler.is_compiling() else block_attention
            out = attend(query, key, value, lists, padding=attention_mask.padding, scale=scaling)
        elif query.is_cuda and scores is not None:
            out = tiled_attention(query, key, value, scores, kernel, scale=scaling, autotune=self.autotune)
        else:
            out = dense_attention(query, key, value, kernel, scale=scaling)
        return out.transpose(1, 2).contiguous(), None
