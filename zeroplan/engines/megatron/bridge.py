"""A model of transformers as Megatron-LM would train it: its config in Megatron's arguments.

Source: NVIDIA's Megatron Bridge, ``models/*/*_bridge.py`` (``provider_bridge``), which maps the same keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.parallel import ParallelLayout
from zeroplan.models.megatron import MODEL_TYPE, MegatronModel

#: The architectures that Megatron-Core has layers for and that are described here.
_DENSE = ("llama", "mistral", "qwen2", "qwen3")
_MIXTURES = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3")
KNOWN = (*_DENSE, *_MIXTURES, "gpt2")


def model_of(model_type: str, config: Mapping[str, Any]) -> MegatronModel | None:
    """Return Megatron's arguments for a model; None where its architecture is not described, or its config tells no shapes.

    Raises:
        BadInput: arguments that Megatron does not take.
    """
    if model_type == MODEL_TYPE:
        return MegatronModel.of(config)
    if model_type not in KNOWN or not config:
        return None
    found = _gpt2(config) if model_type == "gpt2" else _decoder(model_type, config)
    return MegatronModel.of({key: value for key, value in found.items() if value is not None})


def require_known(model_type: str) -> None:
    """Refuse an architecture that is not described."""
    if model_type not in (*KNOWN, MODEL_TYPE):
        raise BadInput(
            f"Megatron-LM's form of {model_type or 'this model'} is not modelled",
            where="MODEL",
            remedy=f"of {', '.join(KNOWN)} it is, and what Megatron-LM's own arguments describe",
        )


def staged(model: MegatronModel, layout: ParallelLayout) -> tuple[MegatronModel, str]:
    """Divide layers that do not divide evenly over a layout's stages, and return the arguments that say so.

    Embedding and head count as a layer each where that makes them even, as NVIDIA's recipe of Llama 3.1 405B has it; else the
    first and the last stage have fewer layers than the others, as that of DeepSeek-V3 has it.

    Source: Megatron Bridge, ``recipes/llama/llama3.py`` and ``recipes/deepseek/deepseek_v3.py``
    """
    layers, pp, chunks = model.num_layers, layout.pp, layout.pp * layout.vpp
    if pp == 1 or layers % chunks == 0:
        return model, ""
    if (layers + 2) % chunks == 0 and chunks <= layers:
        counted = replace(model, account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True)
        return counted, "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    each = -(-(layers + 1) // pp)
    ends = layers - each * (pp - 2)
    if layout.vpp > 1 or pp == 2 or not 2 <= ends <= 2 * each:
        return model, ""
    first, last = -(-ends // 2), ends // 2
    uneven = replace(model, decoder_first_pipeline_num_layers=first, decoder_last_pipeline_num_layers=last)
    return uneven, f"--decoder-first-pipeline-num-layers {first} --decoder-last-pipeline-num-layers {last}"


def _decoder(model_type: str, c: Mapping[str, Any]) -> dict[str, Any]:
    """Llama's form: RMSNorm, rotary positions, a gated MLP, no dropout; biases in Qwen2's queries, keys and values alone."""
    heads = c.get("num_attention_heads") or 32
    hidden = c.get("hidden_size") or 4096
    return {
        "num_layers": c.get("num_hidden_layers") or 32,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": None if model_type.startswith("deepseek") else c.get("num_key_value_heads") or heads,
        "kv_channels": c.get("head_dim") or hidden // heads,
        "ffn_hidden_size": c.get("intermediate_size"),
        "vocab_size": c.get("vocab_size") or 32000,
        "max_position_embeddings": c.get("max_position_embeddings"),
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": model_type == "qwen2" or bool(c.get("attention_bias")),
        "qk_layernorm": model_type.startswith(("qwen3", "deepseek")),
        "untie_embeddings_and_output_weights": not c.get("tie_word_embeddings", False),
        "hidden_dropout": 0.0,
        "attention_dropout": float(c.get("attention_dropout") or 0.0),
        **(_experts(model_type, c) if model_type in _MIXTURES else {}),
    }


def _experts(model_type: str, c: Mapping[str, Any]) -> dict[str, Any]:
    """The experts of a mixture, and DeepSeek's attention. Grouped products and all-to-all are what Bridge sets."""
    layers = c.get("num_hidden_layers") or 0
    width = c.get("moe_intermediate_size") or c.get("intermediate_size")
    found: dict[str, Any] = {
        "num_experts": c.get("num_local_experts") or c.get("n_routed_experts") or c.get("num_experts"),
        "moe_router_topk": c.get("num_experts_per_tok"),
        "moe_ffn_hidden_size": width,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
        "moe_permute_fusion": True,
    }
    if model_type != "deepseek_v3":
        loss = c.get("router_aux_loss_coef") or c.get("aux_loss_alpha") or 0.0
        found |= {"moe_aux_loss_coeff": float(loss), "moe_router_pre_softmax": model_type == "deepseek_v2"}
    else:
        found |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_dtype": "fp32"}
    if model_type.startswith("deepseek"):
        dense = c.get("first_k_dense_replace") or 0
        found |= {
            "multi_latent_attention": True,
            "q_lora_rank": c.get("q_lora_rank"),
            "kv_lora_rank": c.get("kv_lora_rank"),
            "qk_head_dim": c.get("qk_nope_head_dim"),
            "qk_pos_emb_head_dim": c.get("qk_rope_head_dim"),
            "v_head_dim": c.get("v_head_dim"),
            "moe_layer_freq": tuple(int(layer >= dense) for layer in range(layers)),
            "moe_shared_expert_intermediate_size": (c.get("n_shared_experts") or 0) * (width or 0),
        }
    elif model_type == "qwen3_moe":
        step, whole = c.get("decoder_sparse_step") or 1, c.get("mlp_only_layers") or []
        found["moe_layer_freq"] = tuple(int(at not in whole and (at + 1) % step == 0) for at in range(layers))
    return found


def _gpt2(c: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_layers": c.get("n_layer") or 12,
        "hidden_size": c.get("n_embd") or 768,
        "num_attention_heads": c.get("n_head") or 12,
        "ffn_hidden_size": c.get("n_inner"),
        "vocab_size": c.get("vocab_size") or 50257,
        "max_position_embeddings": c.get("n_positions") or 1024,
        "hidden_dropout": float(c.get("resid_pdrop", 0.1)),
        "attention_dropout": float(c.get("attn_pdrop", 0.1)),
    }
