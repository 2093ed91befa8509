"""Llama and what shares its block: Mistral and Gemma. Source: transformers 5.17 ``modeling_llama.py`` and siblings."""

from __future__ import annotations

from zeroplan.models.families.config import Config
from zeroplan.models.families.layers import Tensors, blocks, flat, linear, lm_head, norm, table, unit, units
from zeroplan.models.spec import Unit


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


def gated_mlp(name: str, hidden: int, inner: int, bias: bool = False) -> Tensors:
    """SwiGLU or GeGLU (Shazeer 2020): gate, up, down."""
    return flat(
        linear(f"{name}.gate_proj", hidden, inner, bias),
        linear(f"{name}.up_proj", hidden, inner, bias),
        linear(f"{name}.down_proj", inner, hidden, bias),
    )


def decoder(
    layers: tuple[Unit, ...],
    *,
    hidden: int,
    vocab: int,
    tied: bool,
    norms: bool = True,
    norm_bias: bool = False,
    head_bias: bool = False,
) -> tuple[Unit, ...]:
    """Embedding, blocks, final norm, head: the order of every decoder that keeps its blocks under ``model.layers``."""
    return units(
        table("model.embed_tokens", vocab, hidden),
        layers,
        unit("model.norm", norm("", hidden, norm_bias)) if norms else (),
        lm_head("lm_head", hidden, vocab, tied_to="model.embed_tokens.weight" if tied else None, bias=head_bias),
    )


def llama(c: Config) -> tuple[Unit, ...]:
    """Llama 1 to 3.3, TinyLlama, Yi and the like."""
    hidden = c.size("hidden_size", default=4096)
    heads = c.count("num_attention_heads", default=32)
    bias = c.flag("attention_bias", default=False)
    block = flat(
        attention(
            hidden,
            heads,
            c.count("num_key_value_heads", default=heads),
            c.size("head_dim", default=hidden // heads),
            qkv_bias=bias,
            out_bias=bias,
        ),
        gated_mlp("mlp", hidden, c.size("intermediate_size", default=11008), c.flag("mlp_bias", default=False)),
        norm("input_layernorm", hidden),
        norm("post_attention_layernorm", hidden),
    )
    return decoder(
        blocks("model.layers.{}", c.depth("num_hidden_layers", default=32), block),
        hidden=hidden,
        vocab=c.size("vocab_size", default=32000),
        tied=c.flag("tie_word_embeddings", default=False),
    )


def mistral(c: Config) -> tuple[Unit, ...]:
    """Mistral 7B, Nemo, Small, Large: Llama's block without biases."""
    hidden = c.size("hidden_size", default=4096)
    heads = c.count("num_attention_heads", default=32)
    block = flat(
        attention(
            hidden,
            heads,
            c.count("num_key_value_heads", default=8, null=heads),
            c.size("head_dim", default=hidden // heads),
        ),
        gated_mlp("mlp", hidden, c.size("intermediate_size", default=14336)),
        norm("input_layernorm", hidden),
        norm("post_attention_layernorm", hidden),
    )
    return decoder(
        blocks("model.layers.{}", c.depth("num_hidden_layers", default=32), block),
        hidden=hidden,
        vocab=c.size("vocab_size", default=32000),
        tied=c.flag("tie_word_embeddings", default=False),
    )
