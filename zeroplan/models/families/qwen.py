"""Qwen 1.5, 2, 2.5 and 3, dense. Source: transformers 5.17 ``modeling_qwen2.py``, ``modeling_qwen3.py``."""

from __future__ import annotations

from zeroplan.models.families.config import Config
from zeroplan.models.families.llama import alike, block_norms, decoder, gated_mlp, self_attention
from zeroplan.models.spec import SpecUnit


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
