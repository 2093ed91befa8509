"""DeepSeek V2 and V3: latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), mixtures with shared experts.

Source: transformers 5.17 ``modeling_deepseek_v2.py``, ``modeling_deepseek_v3.py``. Multi-token-prediction weights, which
the published V3 checkpoint holds beside the model, are not part of these classes.
"""

from __future__ import annotations

from zeroplan.models.families.config import Config
from zeroplan.models.families.layers import Tensors, flat, linear, norm, stack
from zeroplan.models.families.llama import block_norms, decoder, gated_mlp
from zeroplan.models.families.moe import experts, router
from zeroplan.models.spec import SpecUnit


def _latent_attention(c: Config, hidden: int, heads: int) -> Tensors:
    """Queries through a bottleneck (or not, when `q_lora_rank` is null), keys and values through another."""
    bias = c.flag("attention_bias", default=False)
    rope, nope = c.size("qk_rope_head_dim", default=64), c.size("qk_nope_head_dim", default=128)
    value, kv_rank = c.size("v_head_dim", default=128), c.size("kv_lora_rank", default=512)
    q_rank = c.optional_size("q_lora_rank", default=1536)
    if q_rank is None:
        query = linear("self_attn.q_proj", hidden, heads * (nope + rope))
    else:
        query = flat(
            linear("self_attn.q_a_proj", hidden, q_rank, bias),
            norm("self_attn.q_a_layernorm", q_rank),
            linear("self_attn.q_b_proj", q_rank, heads * (nope + rope)),
        )
    return flat(
        query,
        linear("self_attn.kv_a_proj_with_mqa", hidden, kv_rank + rope, bias),
        norm("self_attn.kv_a_layernorm", kv_rank),
        linear("self_attn.kv_b_proj", kv_rank, heads * (nope + value)),
        linear("self_attn.o_proj", heads * value, hidden, bias),
    )


def _layers(
    c: Config, attend: Tensors, dense: Tensors, mixture: Tensors, hidden: int, depth: int, first: int
) -> tuple[SpecUnit, ...]:
    """The first blocks dense, the others mixtures."""
    norms = block_norms(hidden)
    return stack("model.layers.{}", [flat(attend, dense if i < first else mixture, norms) for i in range(depth)])


def deepseek_v2(c: Config) -> tuple[SpecUnit, ...]:
    """DeepSeek V2 and V2-Lite."""
    hidden = c.size("hidden_size", default=4096)
    heads = c.whole_heads(hidden, "num_attention_heads", default=32)
    count, inner = c.count("n_routed_experts", default=64), c.size("moe_intermediate_size", default=1407)
    bias = c.flag("mlp_bias", default=False)
    mixture = flat(
        experts("mlp.experts", count, hidden, inner),
        router("mlp.gate", count, hidden),
        gated_mlp("mlp.shared_experts", hidden, inner * c.count("n_shared_experts", default=2), bias),
    )
    dense = gated_mlp("mlp", hidden, c.size("intermediate_size", default=11008), bias)
    depth, first = c.depth("num_hidden_layers", default=32), c.depth("first_k_dense_replace", default=0, low=0)
    layers = _layers(c, _latent_attention(c, hidden, heads), dense, mixture, hidden, depth, first)
    return decoder(c, layers, hidden=hidden, vocab=102400)


def deepseek_v3(c: Config) -> tuple[SpecUnit, ...]:
    """DeepSeek V3 and R1."""
    hidden = c.size("hidden_size", default=7168)
    heads = c.count("num_attention_heads", default=128)
    count, inner = c.count("n_routed_experts", "num_local_experts", default=256), c.size("moe_intermediate_size", default=2048)
    mixture = flat(
        experts("mlp.experts", count, hidden, inner),
        router("mlp.gate", count, hidden),
        gated_mlp("mlp.shared_experts", hidden, inner * c.count("n_shared_experts", default=1)),
    )
    dense = gated_mlp("mlp", hidden, c.size("intermediate_size", default=18432))
    depth, first = c.depth("num_hidden_layers", default=61), c.depth("first_k_dense_replace", default=3, low=0)
    layers = _layers(c, _latent_attention(c, hidden, heads), dense, mixture, hidden, depth, first)
    return decoder(c, layers, hidden=hidden, vocab=129280)
