"""Figures of a model's config: widths, depth, positions; and its largest module."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zeroplan.core.model_config import text_config
from zeroplan.models.spec import ModelSpec

_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "num_query_groups")
_EXPERTS_A_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_router_topk")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions", "seq_length", "max_seq_len", "block_size")

#: Names of tables of positions, and model types whose table is made, not learned.
_TABLE = re.compile(r"(^|\.)(wpe|position_embeddings?|embed_positions|pos_emb\w*|position_emb\w*)\.")
_MADE_TABLES = frozenset(("gptj", "codegen", "ctrl"))
#: RoBERTa counts its positions from padding_idx + 1 = 2 on, so two rows of the table are never used.
_POSITION_OFFSET = {"roberta": 2, "xlm-roberta": 2, "camembert": 2}


@dataclass(frozen=True, slots=True)
class SpecFacts:
    """Figures of a model's config, each None where it is not known. `layers` counts the blocks of the whole model."""

    hidden_size: int | None = None
    layers: int | None = None
    vocab_size: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def spec_facts(spec: ModelSpec) -> SpecFacts:
    """Return the figures that formulas and tables need, from the text model's config."""
    config = text_config(spec.config)
    hidden, heads = _first(config, _HIDDEN), _first(config, _HEADS)
    kv_heads = (
        1 if config.get("multi_query") is True and not config.get("new_decoder_architecture") else _first(config, _KV_HEADS)
    )
    blocks = sum(unit.count for unit in spec.units if unit.block)
    return SpecFacts(
        hidden_size=hidden,
        layers=blocks or _first(config, _LAYERS),
        vocab_size=_first(config, ("vocab_size",)),
        heads=heads,
        kv_heads=kv_heads or heads,
        head_dim=_first(config, ("head_dim", "d_kv", "kv_channels")) or (hidden // heads if hidden and heads else None),
    )


def experts_a_token(config: Mapping[str, Any]) -> int | None:
    """Return how many experts of a block a token takes; None where the config does not say."""
    return _first(text_config(config), _EXPERTS_A_TOKEN)


def max_seq_len(spec: ModelSpec) -> int | None:
    """Return the longest sequence, in tokens, that the model's config allows; None where it sets no limit.

    An image model's is the number of its patches and class token.
    """
    config = text_config(spec.config)
    positions = _first(config, _POSITIONS)
    if positions is None:
        image, patch = _first(config, ("image_size",)), _first(config, ("patch_size",))
        return (image // patch) ** 2 + 1 if image and patch else None
    return max(1, positions - _POSITION_OFFSET.get(spec.model_type, 0))


def last_position(spec: ModelSpec) -> int | None:
    """Return the longest sequence that the model can compute, in tokens; None where no position is the last.

    A table of positions ends. Rotary ones and distances go on beyond what the config names, which is what the model was trained
    on.
    """
    most = max_seq_len(spec)
    if most is None or _first(text_config(spec.config), _POSITIONS) is None:
        return most
    learned = any(_TABLE.search(f"{unit.name}.{tensor.name}") for unit in spec.units for tensor in unit.tensors)
    return most if learned or not spec.has_shapes or spec.model_type in _MADE_TABLES else None


def scaled_positions(spec: ModelSpec) -> str:
    """Return the kind of scaling of rotary positions that a config asks for, such as ``yarn``; empty for none."""
    config = text_config(spec.config)
    for key in ("rope_scaling", "rope_parameters"):
        value = config.get(key)
        kind = value.get("rope_type", value.get("type")) if isinstance(value, Mapping) else None
        if isinstance(kind, str) and kind != "default":
            return kind
    return ""


def largest_module_params(spec: ModelSpec) -> int | None:
    """Return the elements of the largest single module's own parameters (children left out), as DeepSpeed's estimator counts
    it.

    Returns None for a bare count whose largest layer was not given. Source: DeepSpeed 0.19.8,
    ``runtime/zero/stage3.py``, ``model_to_params`` (a tied weight counts for each module that holds it).
    """
    if spec.largest_module is not None or not spec.has_shapes:
        return spec.largest_module
    largest = 0
    for unit in spec.units:
        own: dict[str, int] = {}
        for tensor in unit.tensors:
            parent = f"{unit.name}.{tensor.name}".rpartition(".")[0]
            own[parent] = own.get(parent, 0) + tensor.numel
        largest = max(largest, *own.values(), 0)
    return largest
