"""Qwen 1.5, 2, 2.5 and 3, dense. Source: transformers 5.17 ``modeling_qwen2.py``, ``modeling_qwen3.py``."""

from __future__ import annotations

from zeroplan.models.families.config import Config
from zeroplan.models.families.layers import blocks, flat, norm
from zeroplan.models.families.llama import attention, decoder, gated_mlp
from zeroplan.models.spec import Unit


def qwen2(c: Config) -> tuple[Unit, ...]:
    """Qwen 1.5, 2 and 2.5: Llama's block with biases on q, k and v."""
    hidden = c.size("hidden_size", default=4096)
    heads = c.count("num_attention_heads", default=32)
    block = flat(
        attention(
            hidden,
            heads,
            c.count("num_key_value_heads", default=32, null=heads),
            c.size("head_dim", default=hidden // heads),
            qkv_bias=True,
        ),
        gated_mlp("mlp", hidden, c.size("intermediate_size", default=22016)),
        norm("input_layernorm", hidden),
        norm("post_attention_layernorm", hidden),
    )
    return decoder(
        blocks("model.layers.{}", c.depth("num_hidden_layers", default=32), block),
        hidden=hidden,
        vocab=c.size("vocab_size", default=151936),
        tied=c.flag("tie_word_embeddings", default=False),
    )


def qwen3(c: Config) -> tuple[Unit, ...]:
    """Qwen 3: norms of each head's query and key in place of the biases."""
    hidden = c.size("hidden_size", default=4096)
    heads = c.count("num_attention_heads", default=32)
    head = c.size("head_dim", default=128)
    bias = c.flag("attention_bias", default=False)
    block = flat(
        attention(
            hidden,
            heads,
            c.count("num_key_value_heads", default=32, null=heads),
            head,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=head,
        ),
        gated_mlp("mlp", hidden, c.size("intermediate_size", default=22016)),
        norm("input_layernorm", hidden),
        norm("post_attention_layernorm", hidden),
    )
    return decoder(
        blocks("model.layers.{}", c.depth("num_hidden_layers", default=32), block),
        hidden=hidden,
        vocab=c.size("vocab_size", default=151936),
        tied=c.flag("tie_word_embeddings", default=False),
    )
