"""Gemma 1, 2 and 3. Source: transformers 5.17 ``modeling_gemma.py``, ``modeling_gemma2.py``, ``modeling_gemma3.py``."""

from __future__ import annotations

from zeroplan.models.families.config import Config
from zeroplan.models.families.layers import (
    Tensors,
    blocks,
    embedding,
    flat,
    linear,
    lm_head,
    norm,
    param,
    table,
    unit,
    units,
)
from zeroplan.models.families.llama import block_norms, gated_mlp, self_attention
from zeroplan.models.spec import SpecUnit, Tensor


def gemma(c: Config) -> tuple[SpecUnit, ...]:
    """Gemma 1: Llama's block."""
    return _decoder(c, "model", _block(c, hidden=3072, inner=24576, heads=16, kv_heads=16), hidden=3072, depth=28, vocab=256000)


def gemma2(c: Config) -> tuple[SpecUnit, ...]:
    """Gemma 2: norms before and after both halves of the block."""
    return _decoder(c, "model", _block(c, sandwich=True), vocab=256000)


def gemma3_text(c: Config) -> tuple[SpecUnit, ...]:
    """Gemma 3's text model: Gemma 2's block with norms of each head's query and key."""
    return _decoder(c, "model", _block(c, sandwich=True, qk_norm=True), vocab=262208)


def gemma3(c: Config) -> tuple[SpecUnit, ...]:
    """Gemma 3 with its SigLIP vision tower; the language model lies under ``model.language_model``."""
    text, vision = c.section("text_config"), c.section("vision_config")
    hidden, width = text.size("hidden_size", default=2304), vision.size("hidden_size", default=768)
    language = _decoder(
        text,
        "model.language_model",
        _block(text, sandwich=True, qk_norm=True),
        vocab=262208,
        tied=c.flag("tie_word_embeddings", default=True),
    )
    return units(
        _siglip(vision, width),
        unit(
            "model.multi_modal_projector", param("mm_input_projection_weight", width, hidden), norm("mm_soft_emb_norm", width)
        ),
        language,
    )


def _block(
    c: Config,
    *,
    hidden: int = 2304,
    inner: int = 9216,
    heads: int = 8,
    kv_heads: int = 4,
    sandwich: bool = False,
    qk_norm: bool = False,
) -> Tensors:
    hidden = c.size("hidden_size", default=hidden)
    return flat(
        self_attention(
            c, hidden, heads=heads, kv_heads=kv_heads, null_kv_heads=False, head=256, qk_norm=qk_norm, whole_heads=sandwich
        ),
        gated_mlp("mlp", hidden, c.size("intermediate_size", default=inner)),
        block_norms(hidden),
        *((norm("pre_feedforward_layernorm", hidden), norm("post_feedforward_layernorm", hidden)) if sandwich else ()),
    )


def _decoder(
    c: Config, prefix: str, block: Tensors, *, vocab: int, hidden: int = 2304, depth: int = 26, tied: bool | None = None
) -> tuple[SpecUnit, ...]:
    hidden = c.size("hidden_size", default=hidden)
    vocab = c.size("vocab_size", default=vocab)
    tied = c.flag("tie_word_embeddings", default=True) if tied is None else tied
    return units(
        table(f"{prefix}.embed_tokens", vocab, hidden),
        blocks(f"{prefix}.layers.{{}}", c.depth("num_hidden_layers", default=depth), block),
        unit(f"{prefix}.norm", norm("", hidden)),
        lm_head("lm_head", hidden, vocab, tied_to=f"{prefix}.embed_tokens.weight" if tied else None),
    )


def _siglip(c: Config, width: int) -> tuple[SpecUnit, ...]:
    """SigLIP's vision transformer (Zhai et al. 2023), with its pooling head unless `vision_use_head` is false."""
    inner = c.size("intermediate_size", default=3072)
    patch = c.side("patch_size", default=16)
    places = (c.side("image_size", default=224) // patch) ** 2
    mlp = flat(linear("mlp.fc1", width, inner, True), linear("mlp.fc2", inner, width, True))
    block = flat(
        norm("layer_norm1", width, bias=True),
        *(linear(f"self_attn.{name}", width, width, True) for name in ("k_proj", "v_proj", "q_proj", "out_proj")),
        norm("layer_norm2", width, bias=True),
        mlp,
    )
    head = flat(
        param("probe", 1, 1, width),
        param("attention.in_proj_weight", 3 * width, width),
        param("attention.in_proj_bias", 3 * width),
        linear("attention.out_proj", width, width, True),
        norm("layernorm", width, bias=True),
        mlp,
    )
    projection = (
        Tensor("patch_embedding.weight", (width, c.count("num_channels", default=3), patch, patch)),
        Tensor("patch_embedding.bias", (width,)),
    )
    tower = "model.vision_tower"
    return units(
        unit(f"{tower}.embeddings", projection, embedding("position_embedding", places, width)),
        blocks(f"{tower}.encoder.layers.{{}}", c.depth("num_hidden_layers", default=12), block),
        unit(f"{tower}.post_layernorm", norm("", width, bias=True)),
        unit(f"{tower}.head", head) if c.flag("vision_use_head", default=True) else (),
    )
