"""Mixtures of experts on Llama's block: Mixtral, Qwen 2 and 3 MoE, OLMoE, Phi-3.5-MoE.

Source: transformers 5.17 ``modeling_mixtral.py``, ``modeling_qwen2_moe.py``, ``modeling_qwen3_moe.py``,
``modeling_olmoe.py``, ``modeling_phimoe.py``. Version 5 keeps a block's experts as two three-dimensional parameters.
"""

from __future__ import annotations

from zeroplan.models.families.config import Config
from zeroplan.models.families.layers import Tensors, blocks, flat, linear, norm, param, stack
from zeroplan.models.families.llama import attention, decoder, gated_mlp
from zeroplan.models.spec import Unit


def experts(name: str, count: int, hidden: int, inner: int) -> Tensors:
    """All experts of a block: gate and up ``(count, 2 inner, hidden)``, down ``(count, hidden, inner)``."""
    return flat(
        param(f"{name}.gate_up_proj", count, 2 * inner, hidden),
        param(f"{name}.down_proj", count, hidden, inner),
    )


def router(name: str, count: int, hidden: int) -> Tensors:
    """The router's weight ``(count, hidden)``; a bare parameter, not ``nn.Linear``."""
    return param(f"{name}.weight", count, hidden)


def mixtral(c: Config) -> tuple[Unit, ...]:
    """Mixtral: every block's MLP is a mixture."""
    hidden = c.size("hidden_size", default=4096)
    heads = c.count("num_attention_heads", default=32)
    count = c.count("num_local_experts", "num_experts", default=8)
    block = flat(
        attention(
            hidden,
            heads,
            c.count("num_key_value_heads", default=8, null=heads),
            c.size("head_dim", default=hidden // heads),
        ),
        router("mlp.gate", count, hidden),
        experts("mlp.experts", count, hidden, c.size("intermediate_size", default=14336)),
        norm("input_layernorm", hidden),
        norm("post_attention_layernorm", hidden),
    )
    return decoder(
        blocks("model.layers.{}", c.depth("num_hidden_layers", default=32), block),
        hidden=hidden,
        vocab=c.size("vocab_size", default=32000),
        tied=c.flag("tie_word_embeddings", default=False),
    )


def _sparse_layers(c: Config, depth: int, count: int) -> list[bool]:
    """Which of the blocks hold a mixture: every `decoder_sparse_step`-th, unless listed in `mlp_only_layers`."""
    step, dense = c.depth("decoder_sparse_step", default=1), c.indices("mlp_only_layers")
    return [i not in dense and count > 0 and (i + 1) % step == 0 for i in range(depth)]


def qwen2_moe(c: Config) -> tuple[Unit, ...]:
    """Qwen 1.5 and 2 MoE: a mixture beside a shared expert with its own gate."""
    hidden = c.size("hidden_size", default=2048)
    heads = c.count("num_attention_heads", default=16)
    count = c.count("num_experts", default=60, low=0)
    attend = attention(
        hidden,
        heads,
        c.count("num_key_value_heads", default=16),
        c.size("head_dim", default=hidden // heads),
        qkv_bias=c.flag("qkv_bias", default=True),
    )
    mixture = flat(
        router("mlp.gate", count, hidden),
        experts("mlp.experts", count, hidden, c.size("moe_intermediate_size", default=1408)),
        gated_mlp("mlp.shared_expert", hidden, c.size("shared_expert_intermediate_size", default=5632)),
        linear("mlp.shared_expert_gate", hidden, 1),
    )
    dense = gated_mlp("mlp", hidden, c.size("intermediate_size", default=5632))
    norms = flat(norm("input_layernorm", hidden), norm("post_attention_layernorm", hidden))
    sparse = _sparse_layers(c, c.depth("num_hidden_layers", default=24), count)
    return decoder(
        stack("model.layers.{}", [flat(attend, mixture if is_sparse else dense, norms) for is_sparse in sparse]),
        hidden=hidden,
        vocab=c.size("vocab_size", default=151936),
        tied=c.flag("tie_word_embeddings", default=False),
    )


def qwen3_moe(c: Config) -> tuple[Unit, ...]:
    """Qwen 3 MoE: Qwen 3's attention, a mixture without a shared expert."""
    hidden = c.size("hidden_size", default=2048)
    heads = c.count("num_attention_heads", default=32)
    head = c.size("head_dim", default=hidden // heads)
    bias = c.flag("attention_bias", default=False)
    count = c.count("num_experts", "num_local_experts", default=128, low=0)
    attend = attention(
        hidden, heads, c.count("num_key_value_heads", default=4), head, qkv_bias=bias, out_bias=bias, qk_norm=head
    )
    mixture = flat(
        experts("mlp.experts", count, hidden, c.size("moe_intermediate_size", default=768)), router("mlp.gate", count, hidden)
    )
    dense = gated_mlp("mlp", hidden, c.size("intermediate_size", default=6144))
    norms = flat(norm("input_layernorm", hidden), norm("post_attention_layernorm", hidden))
    sparse = _sparse_layers(c, c.depth("num_hidden_layers", default=24), count)
    return decoder(
        stack("model.layers.{}", [flat(attend, mixture if is_sparse else dense, norms) for is_sparse in sparse]),
        hidden=hidden,
        vocab=c.size("vocab_size", default=151936),
        tied=c.flag("tie_word_embeddings", default=False),
    )


def olmoe(c: Config) -> tuple[Unit, ...]:
    """OLMoE: norms over the whole query and key, a mixture in every block."""
    hidden = c.size("hidden_size", default=2048)
    heads = c.count("num_attention_heads", default=16)
    kv_heads = c.count("num_key_value_heads", default=heads)
    head = c.size("head_dim", default=hidden // heads)
    bias = c.flag("attention_bias", default=False)
    count = c.count("num_experts", "num_local_experts", default=64)
    block = flat(
        attention(hidden, heads, kv_heads, head, qkv_bias=bias, out_bias=bias),
        norm("self_attn.q_norm", hidden),
        norm("self_attn.k_norm", (hidden // heads) * kv_heads),
        router("mlp.gate", count, hidden),
        experts("mlp.experts", count, hidden, c.size("intermediate_size", default=2048)),
        norm("input_layernorm", hidden),
        norm("post_attention_layernorm", hidden),
    )
    return decoder(
        blocks("model.layers.{}", c.depth("num_hidden_layers", default=16), block),
        hidden=hidden,
        vocab=c.size("vocab_size", default=50304),
        tied=c.flag("tie_word_embeddings", default=False),
    )


def phimoe(c: Config) -> tuple[Unit, ...]:
    """Phi-3.5-MoE: LayerNorms with bias; its router is a linear layer."""
    hidden = c.size("hidden_size", default=4096)
    heads = c.count("num_attention_heads", default=32)
    bias = c.flag("attention_bias", default=False)
    count = c.count("num_local_experts", "num_experts", default=16)
    block = flat(
        attention(
            hidden,
            heads,
            c.count("num_key_value_heads", default=8, null=heads),
            c.size("head_dim", default=hidden // heads),
            qkv_bias=bias,
            out_bias=bias,
        ),
        linear("mlp.router", hidden, count),
        experts("mlp.experts", count, hidden, c.size("intermediate_size", default=6400)),
        norm("input_layernorm", hidden, bias=True),
        norm("post_attention_layernorm", hidden, bias=True),
    )
    return decoder(
        blocks("model.layers.{}", c.depth("num_hidden_layers", default=32), block),
        hidden=hidden,
        vocab=c.size("vocab_size", default=32064),
        tied=c.flag("tie_word_embeddings", default=False),
        norm_bias=True,
        head_bias=c.flag("lm_head_bias", default=False),
    )
