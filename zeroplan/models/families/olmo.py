"""OLMo, OLMo 2 and OLMo 3. Source: transformers 5.17 ``modeling_olmo.py``, ``modeling_olmo2.py``, ``modeling_olmo3.py``."""

from __future__ import annotations

from zeroplan.models.families.config import Config
from zeroplan.models.families.layers import Tensors, blocks, flat, norm
from zeroplan.models.families.llama import attention, decoder, gated_mlp
from zeroplan.models.spec import Unit


def _attention(c: Config, hidden: int, heads: int, kv_heads: int) -> Tensors:
    bias = c.flag("attention_bias", default=False)
    return attention(hidden, heads, kv_heads, c.size("head_dim", default=hidden // heads), qkv_bias=bias, out_bias=bias)


def olmo(c: Config) -> tuple[Unit, ...]:
    """OLMo: Llama's block with LayerNorms that have no parameters."""
    hidden = c.size("hidden_size", default=4096)
    heads = c.count("num_attention_heads", default=32)
    block = flat(
        _attention(c, hidden, heads, c.count("num_key_value_heads", default=heads)),
        gated_mlp("mlp", hidden, c.size("intermediate_size", default=11008)),
    )
    return decoder(
        blocks("model.layers.{}", c.depth("num_hidden_layers", default=32), block),
        hidden=hidden,
        vocab=c.size("vocab_size", default=50304),
        tied=c.flag("tie_word_embeddings", default=False),
        norms=False,
    )


def olmo2(c: Config) -> tuple[Unit, ...]:
    """OLMo 2 and 3: norms over the whole query and key, and after attention and MLP instead of before."""
    hidden = c.size("hidden_size", default=4096)
    heads = c.count("num_attention_heads", default=32)
    kv_heads = c.count("num_key_value_heads", default=heads)
    head = c.size("head_dim", default=hidden // heads)
    block = flat(
        _attention(c, hidden, heads, kv_heads),
        norm("self_attn.q_norm", heads * head),
        norm("self_attn.k_norm", kv_heads * head),
        gated_mlp("mlp", hidden, c.size("intermediate_size", default=11008)),
        norm("post_attention_layernorm", hidden),
        norm("post_feedforward_layernorm", hidden),
    )
    return decoder(
        blocks("model.layers.{}", c.depth("num_hidden_layers", default=32), block),
        hidden=hidden,
        vocab=c.size("vocab_size", default=50304),
        tied=c.flag("tie_word_embeddings", default=False),
    )
