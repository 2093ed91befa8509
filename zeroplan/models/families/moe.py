"""Mixtures of experts on Llama's block: Mixtral, Qwen 2 and 3 MoE, OLMoE, Phi-3.5-MoE.

Source: transformers 5.17 ``modeling_mixtral.py``, ``modeling_qwen2_moe.py``, ``modeling_qwen3_moe.py``,
``modeling_olmoe.py``, ``modeling_phimoe.py``. Version 5 keeps a block's experts as two three-dimensional parameters.
"""

from __future__ import annotations

from zeroplan.models.families.config import Config
from zeroplan.models.families.layers import Tensors, flat, linear, norm, param, stack
from zeroplan.models.families.llama import alike, block_norms, decoder, gated_mlp, self_attention
from zeroplan.models.spec import SpecUnit


def experts(name: str, count: int, hidden: int, inner: int) -> Tensors:
    """Return all experts of a block: gate and up ``(count, 2 inner, hidden)``, down ``(count, hidden, inner)``."""
    return flat(
        param(f"{name}.gate_up_proj", count, 2 * inner, hidden),
        param(f"{name}.down_proj", count, hidden, inner),
    )


def router(name: str, count: int, hidden: int) -> Tensors:
    """The router's weight ``(count, hidden)``; a bare parameter, not ``nn.Linear``."""
    return param(f"{name}.weight", count, hidden)


def mixtral(c: Config) -> tuple[SpecUnit, ...]:
    """Mixtral: every block's MLP is a mixture."""
    hidden = c.size("hidden_size", default=4096)
    count = c.count("num_local_experts", "num_experts", default=8)
    layers = alike(
        c,
        self_attention(c, hidden, kv_heads=8, qkv_bias=False, out_bias=False),
        router("mlp.gate", count, hidden),
        experts("mlp.experts", count, hidden, c.size("intermediate_size", default=14336)),
        block_norms(hidden),
    )
    return decoder(c, layers, hidden=hidden, vocab=32000)


def _some_sparse(c: Config, count: int, hidden: int, attend: Tensors, mixture: Tensors, dense: Tensors) -> tuple[SpecUnit, ...]:
    """A decoder whose every `decoder_sparse_step`-th block holds the mixture, unless listed in `mlp_only_layers`."""
    step, only_dense = c.depth("decoder_sparse_step", default=1), c.indices("mlp_only_layers")
    sparse = [
        i not in only_dense and count > 0 and (i + 1) % step == 0 for i in range(c.depth("num_hidden_layers", default=24))
    ]
    norms = block_norms(hidden)
    layers = stack("model.layers.{}", [flat(attend, mixture if is_sparse else dense, norms) for is_sparse in sparse])
    return decoder(c, layers, hidden=hidden, vocab=151936)


def qwen2_moe(c: Config) -> tuple[SpecUnit, ...]:
    """Qwen 1.5 and 2 MoE: a mixture beside a shared expert with its own gate."""
    hidden = c.size("hidden_size", default=2048)
    count = c.count("num_experts", default=60, low=0)
    bias = c.flag("qkv_bias", default=True)
    attend = self_attention(c, hidden, heads=16, kv_heads=16, null_kv_heads=False, qkv_bias=bias, out_bias=False)
    mixture = flat(
        router("mlp.gate", count, hidden),
        experts("mlp.experts", count, hidden, c.size("moe_intermediate_size", default=1408)),
        gated_mlp("mlp.shared_expert", hidden, c.size("shared_expert_intermediate_size", default=5632)),
        linear("mlp.shared_expert_gate", hidden, 1),
    )
    dense = gated_mlp("mlp", hidden, c.size("intermediate_size", default=5632))
    return _some_sparse(c, count, hidden, attend, mixture, dense)


def qwen3_moe(c: Config) -> tuple[SpecUnit, ...]:
    """Qwen 3 MoE: Qwen 3's attention, a mixture without a shared expert."""
    hidden = c.size("hidden_size", default=2048)
    count = c.count("num_experts", "num_local_experts", default=128, low=0)
    attend = self_attention(c, hidden, kv_heads=4, null_kv_heads=False, qk_norm=True)
    mixture = flat(
        experts("mlp.experts", count, hidden, c.size("moe_intermediate_size", default=768)), router("mlp.gate", count, hidden)
    )
    dense = gated_mlp("mlp", hidden, c.size("intermediate_size", default=6144))
    return _some_sparse(c, count, hidden, attend, mixture, dense)


def olmoe(c: Config) -> tuple[SpecUnit, ...]:
    """OLMoE: norms over the whole query and key, a mixture in every block."""
    hidden = c.size("hidden_size", default=2048)
    heads = c.count("num_attention_heads", default=16)
    kv_heads = c.count("num_key_value_heads", default=heads)
    count = c.count("num_experts", "num_local_experts", default=64)
    layers = alike(
        c,
        self_attention(c, hidden, heads=16),
        norm("self_attn.q_norm", hidden),
        norm("self_attn.k_norm", (hidden // heads) * kv_heads),
        router("mlp.gate", count, hidden),
        experts("mlp.experts", count, hidden, c.size("intermediate_size", default=2048)),
        block_norms(hidden),
        depth=16,
    )
    return decoder(c, layers, hidden=hidden, vocab=50304)


def phimoe(c: Config) -> tuple[SpecUnit, ...]:
    """Phi-3.5-MoE: LayerNorms with bias; its router is a linear layer."""
    hidden = c.size("hidden_size", default=4096)
    count = c.count("num_local_experts", "num_experts", default=16)
    layers = alike(
        c,
        self_attention(c, hidden, kv_heads=8),
        linear("mlp.router", hidden, count),
        experts("mlp.experts", count, hidden, c.size("intermediate_size", default=6400)),
        block_norms(hidden, bias=True),
    )
    head_bias = c.flag("lm_head_bias", default=False)
    return decoder(c, layers, hidden=hidden, vocab=32064, norm_bias=True, head_bias=head_bias)
