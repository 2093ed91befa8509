"""Phi 1, 1.5 and 2, and Phi 3 and 4. Source: transformers 5.17 ``modeling_phi.py``, ``modeling_phi3.py``."""

from __future__ import annotations

from zeroplan.models.families.config import Config
from zeroplan.models.families.layers import blocks, flat, linear, lm_head, norm, table, unit, units
from zeroplan.models.families.llama import alike, block_norms, decoder
from zeroplan.models.spec import SpecUnit


def phi(c: Config) -> tuple[SpecUnit, ...]:
    """Phi 1, 1.5 and 2: attention and MLP side by side after one norm, biases everywhere, the head's too."""
    hidden = c.size("hidden_size", default=2048)
    heads = c.count("num_attention_heads", default=32)
    kv_heads = c.count("num_key_value_heads", default=heads)
    head = c.size("head_dim", default=hidden // heads)
    inner, vocab = c.size("intermediate_size", default=8192), c.size("vocab_size", default=51200)
    block = flat(
        linear("self_attn.q_proj", hidden, heads * head, True),
        linear("self_attn.k_proj", hidden, kv_heads * head, True),
        linear("self_attn.v_proj", hidden, kv_heads * head, True),
        linear("self_attn.dense", heads * head, hidden, True),
        *(
            (norm(f"self_attn.{name}", hidden // heads, bias=True) for name in ("q_layernorm", "k_layernorm"))
            if c.flag("qk_layernorm", default=False)
            else ()
        ),
        linear("mlp.fc1", hidden, inner, True),
        linear("mlp.fc2", inner, hidden, True),
        norm("input_layernorm", hidden, bias=True),
    )
    tied = c.flag("tie_word_embeddings", default=False)
    return units(
        table("model.embed_tokens", vocab, hidden),
        blocks("model.layers.{}", c.depth("num_hidden_layers", default=24), block),
        unit("model.final_layernorm", norm("", hidden, bias=True)),
        lm_head("lm_head", hidden, vocab, tied_to="model.embed_tokens.weight" if tied else None, bias=True),
    )


def phi3(c: Config) -> tuple[SpecUnit, ...]:
    """Phi 3, 3.5 and 4: Llama's block with q, k, v in one matrix and gate, up in another."""
    hidden = c.size("hidden_size", default=3072)
    heads = c.count("num_attention_heads", default=32)
    kv_heads = c.count("num_key_value_heads", default=heads)
    head = c.size("head_dim", default=hidden // heads)
    inner = c.size("intermediate_size", default=8192)
    block = flat(
        linear("self_attn.o_proj", heads * head, hidden),
        linear("self_attn.qkv_proj", hidden, (heads + 2 * kv_heads) * head),
        linear("mlp.gate_up_proj", hidden, 2 * inner),
        linear("mlp.down_proj", inner, hidden),
        block_norms(hidden),
    )
    return decoder(c, alike(c, block), hidden=hidden, vocab=32064)
