"""BLOOM and Falcon, which grew out of its code. Source: transformers 5.17 ``modeling_bloom.py``, ``modeling_falcon.py``."""

from __future__ import annotations

from zeroplan.models.families.config import Config
from zeroplan.models.families.layers import Tensors, blocks, flat, linear, lm_head, norm, table, unit, units
from zeroplan.models.spec import SpecUnit


def bloom(c: Config) -> tuple[SpecUnit, ...]:
    """BLOOM: ALiBi instead of positions, a norm after the embedding, the head tied."""
    hidden = c.size("n_embed", "hidden_size", default=64)
    c.whole_heads(hidden, "n_head", "num_attention_heads", default=8)
    block = flat(
        norm("input_layernorm", hidden, bias=True),
        linear("self_attention.query_key_value", hidden, 3 * hidden, True),
        linear("self_attention.dense", hidden, hidden, True),
        norm("post_attention_layernorm", hidden, bias=True),
        linear("mlp.dense_h_to_4h", hidden, 4 * hidden, True),
        linear("mlp.dense_4h_to_h", 4 * hidden, hidden, True),
    )
    normed = unit("transformer.word_embeddings_layernorm", norm("", hidden, bias=True))
    return _decoder(c, block, hidden, vocab=250880, depth=2, after_embedding=normed)


def falcon(c: Config) -> tuple[SpecUnit, ...]:
    """Falcon: one key and value for all heads (7B), or grouped ones (40B on); attention and MLP side by side."""
    hidden = c.size("n_embed", "hidden_size", default=4544)
    heads = c.count("num_attention_heads", "n_head", default=71)
    head = c.divided(hidden, heads, "hidden_size and num_attention_heads")
    bias, grouped = c.flag("bias", default=False), c.flag("new_decoder_architecture", default=False)
    inner = c.size("ffn_hidden_size", default=4 * hidden)
    if grouped:
        qkv = (2 * c.count("num_kv_heads", default=heads) + heads) * head
    else:
        qkv = hidden + 2 * head if c.flag("multi_query", default=True, null=False) else 3 * hidden
    norms: tuple[str, ...] = ("input_layernorm",)
    if not c.flag("parallel_attn", default=True, null=False):
        norms = ("post_attention_layernorm", "input_layernorm")
    elif c.count("num_ln_in_parallel_attn", default=2 if grouped else 1) == 2:
        norms = ("ln_attn", "ln_mlp")
    block = flat(
        linear("self_attention.query_key_value", hidden, qkv, bias),
        linear("self_attention.dense", hidden, hidden, bias),
        linear("mlp.dense_h_to_4h", hidden, inner, bias),
        linear("mlp.dense_4h_to_h", inner, hidden, bias),
        *(norm(name, hidden, bias=True) for name in norms),
    )
    return _decoder(c, block, hidden, vocab=65024, depth=32)


def _decoder(
    c: Config, block: Tensors, hidden: int, *, vocab: int, depth: int, after_embedding: tuple[SpecUnit, ...] = ()
) -> tuple[SpecUnit, ...]:
    vocab = c.size("vocab_size", default=vocab)
    tied = c.flag("tie_word_embeddings", default=True)
    layers = ("num_hidden_layers", "n_layer") if not after_embedding else ("n_layer", "num_hidden_layers")
    return units(
        table("transformer.word_embeddings", vocab, hidden),
        after_embedding,
        blocks("transformer.h.{}", c.depth(*layers, default=depth), block),
        unit("transformer.ln_f", norm("", hidden, bias=True)),
        lm_head("lm_head", hidden, vocab, tied_to="transformer.word_embeddings.weight" if tied else None),
    )
