"""Llama and what shares its block: Mistral and Gemma. Source: transformers 5.17 ``modeling_llama.py`` and siblings."""

from __future__ import annotations

from functools import partial

from zeroplan.models.families.config import Config
from zeroplan.models.families.layers import Tensors, blocks, flat, linear, lm_head, norm, table, unit, units
from zeroplan.models.spec import SpecUnit


def attention(
    hidden: int, heads: int, kv_heads: int, head: int, *, qkv_bias: bool = False, out_bias: bool = False, qk_norm: int = 0
) -> Tensors:
    """Grouped-query attention (Ainslie et al. 2023): q, k, v, o; `qk_norm` is the width of per-head query and key norms."""
    return flat(
        linear("self_attn.q_proj", hidden, heads * head, qkv_bias),
        linear("self_attn.k_proj", hidden, kv_heads * head, qkv_bias),
        linear("self_attn.v_proj", hidden, kv_heads * head, qkv_bias),
        linear("self_attn.o_proj", heads * head, hidden, out_bias),
        *((norm("self_attn.q_norm", qk_norm), norm("self_attn.k_norm", qk_norm)) if qk_norm else ()),
    )


def self_attention(
    c: Config,
    hidden: int,
    *,
    heads: int = 32,
    kv_heads: int | None = None,
    null_kv_heads: bool = True,
    head: int | None = None,
    qkv_bias: bool | None = None,
    out_bias: bool | None = None,
    qk_norm: bool = False,
    whole_heads: bool = False,
) -> Tensors:
    """:func:`attention` by the usual keys of a config.

    Args:
        hidden: its width.
        heads: default of ``num_attention_heads``.
        kv_heads: default of ``num_key_value_heads``; None means as many as heads.
        null_kv_heads: whether a null there means as many as heads, too, and not the default.
        head: default of ``head_dim``; None means the width over the heads.
        qkv_bias: None means ``attention_bias``.
        out_bias: None means ``attention_bias``.
        qk_norm: whether each head's query and key have norms.
        whole_heads: whether the heads must divide the width, even where ``head_dim`` says how wide they are.
    """
    count = partial(c.whole_heads, hidden) if whole_heads else c.count
    heads = count("num_attention_heads", default=heads)
    head = c.size("head_dim", default=hidden // heads if head is None else head)
    kv_default = heads if kv_heads is None else kv_heads
    shared = c.count("num_key_value_heads", default=kv_default, null=heads if null_kv_heads else None)
    c.divided(heads, shared, "'num_attention_heads' over 'num_key_value_heads'")
    return attention(
        hidden,
        heads,
        shared,
        head,
        qkv_bias=c.flag("attention_bias", default=False) if qkv_bias is None else qkv_bias,
        out_bias=c.flag("attention_bias", default=False) if out_bias is None else out_bias,
        qk_norm=head if qk_norm else 0,
    )


def gated_mlp(name: str, hidden: int, inner: int, bias: bool = False) -> Tensors:
    """SwiGLU or GeGLU (Shazeer 2020): gate, up, down."""
    return flat(
        linear(f"{name}.gate_proj", hidden, inner, bias),
        linear(f"{name}.up_proj", hidden, inner, bias),
        linear(f"{name}.down_proj", inner, hidden, bias),
    )


def block_norms(hidden: int, bias: bool = False) -> Tensors:
    """The norms before a block's attention and before its MLP."""
    return flat(norm("input_layernorm", hidden, bias), norm("post_attention_layernorm", hidden, bias))


def alike(c: Config, *parts: Tensors, depth: int = 32) -> tuple[SpecUnit, ...]:
    """Equal blocks, as many as ``num_hidden_layers`` says; `depth` is its default."""
    return blocks("model.layers.{}", c.depth("num_hidden_layers", default=depth), *parts)


def decoder(
    c: Config,
    layers: tuple[SpecUnit, ...],
    *,
    hidden: int,
    vocab: int,
    norms: bool = True,
    norm_bias: bool = False,
    head_bias: bool = False,
) -> tuple[SpecUnit, ...]:
    """Embedding, blocks, final norm, head: the order of every decoder that keeps its blocks under ``model.layers``.

    `vocab` is the default of ``vocab_size``.
    """
    vocab = c.size("vocab_size", default=vocab)
    tied_to = "model.embed_tokens.weight" if c.flag("tie_word_embeddings", default=False) else None
    return units(
        table("model.embed_tokens", vocab, hidden),
        layers,
        unit("model.norm", norm("", hidden, norm_bias)) if norms else (),
        lm_head("lm_head", hidden, vocab, tied_to=tied_to, bias=head_bias),
    )


def llama(c: Config) -> tuple[SpecUnit, ...]:
    """Llama 1 to 3.3, TinyLlama, Yi and the like."""
    hidden = c.size("hidden_size", default=4096)
    layers = alike(
        c,
        self_attention(c, hidden, whole_heads=True),
        gated_mlp("mlp", hidden, c.size("intermediate_size", default=11008), c.flag("mlp_bias", default=False)),
        block_norms(hidden),
    )
    return decoder(c, layers, hidden=hidden, vocab=32000)


def mistral(c: Config) -> tuple[SpecUnit, ...]:
    """Mistral 7B, Nemo, Small, Large: Llama's block without biases."""
    hidden = c.size("hidden_size", default=4096)
    layers = alike(
        c,
        self_attention(c, hidden, kv_heads=8, qkv_bias=False, out_bias=False),
        gated_mlp("mlp", hidden, c.size("intermediate_size", default=14336)),
        block_norms(hidden),
    )
    return decoder(c, layers, hidden=hidden, vocab=32000)


def qwen2(c: Config) -> tuple[SpecUnit, ...]:
    """Qwen 1.5, 2 and 2.5: Llama's block with biases on q, k and v."""
    hidden = c.size("hidden_size", default=4096)
    layers = alike(
        c,
        self_attention(c, hidden, kv_heads=32, qkv_bias=True, out_bias=False),
        gated_mlp("mlp", hidden, c.size("intermediate_size", default=22016)),
        block_norms(hidden),
    )
    return decoder(c, layers, hidden=hidden, vocab=151936)


def qwen3(c: Config) -> tuple[SpecUnit, ...]:
    """Qwen 3: norms of each head's query and key in place of the biases."""
    hidden = c.size("hidden_size", default=4096)
    layers = alike(
        c,
        self_attention(c, hidden, kv_heads=32, head=128, qk_norm=True),
        gated_mlp("mlp", hidden, c.size("intermediate_size", default=22016)),
        block_norms(hidden),
    )
    return decoder(c, layers, hidden=hidden, vocab=151936)


def olmo(c: Config) -> tuple[SpecUnit, ...]:
    """OLMo: Llama's block with LayerNorms that have no parameters."""
    hidden = c.size("hidden_size", default=4096)
    layers = alike(c, self_attention(c, hidden), gated_mlp("mlp", hidden, c.size("intermediate_size", default=11008)))
    return decoder(c, layers, hidden=hidden, vocab=50304, norms=False)


def olmo2(c: Config) -> tuple[SpecUnit, ...]:
    """OLMo 2 and 3: norms over the whole query and key, and after attention and MLP instead of before."""
    hidden = c.size("hidden_size", default=4096)
    heads = c.count("num_attention_heads", default=32)
    kv_heads = c.count("num_key_value_heads", default=heads)
    head = c.size("head_dim", default=hidden // heads)
    layers = alike(
        c,
        self_attention(c, hidden),
        norm("self_attn.q_norm", heads * head),
        norm("self_attn.k_norm", kv_heads * head),
        gated_mlp("mlp", hidden, c.size("intermediate_size", default=11008)),
        norm("post_attention_layernorm", hidden),
        norm("post_feedforward_layernorm", hidden),
    )
    return decoder(c, layers, hidden=hidden, vocab=50304)
