"""Vision transformers with a classifier. Source: transformers 5.17 ``modeling_vit.py``."""

from __future__ import annotations

from collections.abc import Sized

from zeroplan.models.families.config import Config
from zeroplan.models.families.layers import blocks, flat, linear, norm, param, unit, units
from zeroplan.models.spec import SpecUnit, Tensor


def _labels(c: Config) -> int:
    """Classes of the classifier: `num_labels`, else the entries of `id2label`, else two."""
    named = c.data.get("id2label")
    return c.size("num_labels", default=len(named) if isinstance(named, Sized) and len(named) else 2)


def vit(c: Config) -> tuple[SpecUnit, ...]:
    """ViT (Dosovitskiy et al. 2021): patches by a convolution, a class token, learned positions."""
    hidden, inner = c.size("hidden_size", default=768), c.size("intermediate_size", default=3072)
    patch, channels = c.side("patch_size", default=16), c.count("num_channels", default=3)
    places = (c.side("image_size", default=224) // patch) ** 2 + 1
    bias = c.flag("qkv_bias", default=True)
    block = flat(
        *(linear(f"attention.{name}", hidden, hidden, bias) for name in ("q_proj", "k_proj", "v_proj")),
        linear("attention.o_proj", hidden, hidden, True),
        norm("layernorm_before", hidden, bias=True),
        norm("layernorm_after", hidden, bias=True),
        linear("mlp.fc1", hidden, inner, True),
        linear("mlp.fc2", inner, hidden, True),
    )
    projection = (
        Tensor("patch_embeddings.projection.weight", (hidden, channels, patch, patch)),
        Tensor("patch_embeddings.projection.bias", (hidden,)),
    )
    return units(
        unit("vit.embeddings", param("cls_token", 1, 1, hidden), param("position_embeddings", 1, places, hidden), projection),
        blocks("vit.layers.{}", c.depth("num_hidden_layers", default=12), block),
        unit("vit.layernorm", norm("", hidden, bias=True)),
        unit("classifier", linear("", hidden, _labels(c), True)),
    )
