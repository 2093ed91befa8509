"""Megatron-LM's own model, by its own arguments. Source: Megatron-Core 0.16.1, ``megatron/core/models/gpt/gpt_model.py``."""

from __future__ import annotations

from collections.abc import Iterable

from zeroplan.models.families.config import Config
from zeroplan.models.megatron import MegatronModel, Weight, embedding_weights, final_weights, layer_weights
from zeroplan.models.spec import SpecUnit, Tensor


def megatron_gpt(c: Config) -> tuple[SpecUnit, ...]:
    """Return the units of a model on one tensor-parallel rank: layers that are alike stand together."""
    model = MegatronModel.of(c.data)
    units = [_unit("embedding", embedding_weights(model, 1))]
    first = 0
    while first < model.num_layers:
        end = first + 1
        while end < model.num_layers and model.has_experts(end) == model.has_experts(first):
            end += 1
        tensors = _unit("", layer_weights(model, first, model.num_experts), f"decoder.layers.{first}.").tensors
        units.append(SpecUnit("decoder.layers.{}", tensors, end - first, first, block=True))
        first = end
    own_head = model.untie_embeddings_and_output_weights
    units.append(_unit("decoder.final_layernorm", final_weights(model, 1, own_head=False)))
    if own_head:
        units.append(_unit("output_layer", [*final_weights(model, 1, own_head=True)][-1:]))
    return tuple(units)


def _unit(name: str, weights: Iterable[Weight], prefix: str = "") -> SpecUnit:
    cut = prefix or f"{name}."
    tensors = [_tensor(one, one.name.removeprefix(cut)) for one in weights]
    return SpecUnit(name, tuple(tensors))


def _tensor(weight: Weight, name: str) -> Tensor:
    kind = "embedding" if "embeddings" in weight.name else "head" if weight.name.startswith("output_layer") else "linear"
    return Tensor(name, weight.shape, kind=kind if len(weight.shape) > 1 else "")
