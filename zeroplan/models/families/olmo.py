"""OLMo, OLMo 2 and OLMo 3. Source: transformers 5.17 ``modeling_olmo.py``, ``modeling_olmo2.py``, ``modeling_olmo3.py``."""

from __future__ import annotations

from zeroplan.models.families.config import Config
from zeroplan.models.families.layers import norm
from zeroplan.models.families.llama import alike, decoder, gated_mlp, self_attention
from zeroplan.models.spec import SpecUnit


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
