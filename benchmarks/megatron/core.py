"""Megatron-Core's GPT model of a described one: its TransformerConfig, its own layers (the local specification), its class."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models import backends
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import transformer_block
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from zeroplan.models.megatron import MegatronModel


def transformer_config(model: MegatronModel, **parallel: Any) -> TransformerConfig:
    """Return the config of a model in bf16. `parallel` are further arguments of TransformerConfig, its degrees among them."""
    same = [
        *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "kv_channels"),
        *("add_bias_linear", "add_qkv_bias", "normalization", "hidden_dropout", "attention_dropout", "qk_layernorm"),
        *("bias_dropout_fusion", "masked_softmax_fusion", "gradient_accumulation_fusion"),
        "cross_entropy_loss_fusion",
    ]
    if model.num_experts:
        same += [
            "moe_router_topk",
            "moe_ffn_hidden_size",
            "moe_token_dispatcher_type",
            "moe_grouped_gemm",
            "moe_permute_fusion",
        ]
    given: dict[str, Any] = {name: getattr(model, name) for name in same}
    given |= {
        "bf16": True,
        "bias_activation_fusion": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "gated_linear_unit": model.swiglu,
        "activation_func": F.silu if model.swiglu else F.gelu,
        "apply_rope_fusion": False,
        "recompute_granularity": model.recompute_granularity or None,
        "recompute_method": model.recompute_method or None,
        "recompute_num_layers": model.recompute_num_layers or None,
        "recompute_modules": list(model.recompute_modules),
    }
    if model.num_experts:
        given |= {
            "num_moe_experts": model.num_experts,
            "moe_router_dtype": model.moe_router_dtype or None,
            "moe_router_score_function": model.moe_router_score_function,
            "moe_router_pre_softmax": model.moe_router_pre_softmax,
            "moe_router_enable_expert_bias": model.moe_router_enable_expert_bias,
            "moe_aux_loss_coeff": model.moe_aux_loss_coeff,
            "moe_z_loss_coeff": model.moe_z_loss_coeff or None,
            "moe_expert_capacity_factor": model.moe_expert_capacity_factor or None,
            "moe_token_drop_policy": model.moe_token_drop_policy,
            "moe_router_load_balancing_type": "aux_loss" if model.moe_aux_loss_coeff else "none",
            "moe_layer_freq": list(model.moe_layer_freq) or 1,
            "moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size or None,
        }
    if model.multi_latent_attention:
        latent = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        given |= {name: getattr(model, name) or None for name in latent} | {"rope_type": model.rope_type or "yarn"}
        return MLATransformerConfig(**(given | parallel))
    return TransformerConfig(**(given | parallel))


def use_norm(norm: Any) -> None:
    """Have Megatron-Core's own layers use this class as their norm, where it looks for Apex's."""
    for module in (gpt_layer_specs, backends):
        module.WrappedTorchNorm = module.LNImpl = norm
    transformer_block.LayerNormImpl = norm


def gpt_model(
    model: MegatronModel, config: TransformerConfig, seq_len: int, *, embeds: bool, ends: bool, vp_stage: int | None = None
) -> Any:
    """Return a stage's or a chunk's part of the model."""
    if model.num_experts:
        layers = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)
    else:
        layers = gpt_layer_specs.get_gpt_layer_local_spec(
            normalization=model.normalization,
            qk_layernorm=model.qk_layernorm,
            multi_latent_attention=model.multi_latent_attention,
        )
    return GPTModel(
        config,
        layers,
        vocab_size=model.padded(config.tensor_model_parallel_size),
        max_sequence_length=seq_len,
        pre_process=embeds,
        post_process=ends,
        parallel_output=True,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        vp_stage=vp_stage,
    )
