"""Architecture values (published ``config.json`` facts) of the models that were measured first; others are the catalog's.

Weights are random: memory does not depend on them. A spec's ``model_overrides`` changes single
values, so that a model of real widths and few layers can be recorded event by event.
"""

from __future__ import annotations

from typing import Any

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
_QWEN2: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}

MODELS: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.2-1B": _LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "meta-llama/Llama-3.2-3B": _LLAMA
    | {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "meta-llama/Llama-3.1-8B": _LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "Qwen/Qwen2.5-0.5B": _QWEN2
    | {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "Qwen/Qwen2.5-1.5B": _QWEN2
    | {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "openai-community/gpt2-medium": {
        "model_type": "gpt2",
        "n_embd": 1024,
        "n_layer": 24,
        "n_head": 16,
        "vocab_size": 50257,
        "n_positions": 1024,
    },
    "openai-community/gpt2-xl": {
        "model_type": "gpt2",
        "n_embd": 1600,
        "n_layer": 48,
        "n_head": 25,
        "vocab_size": 50257,
        "n_positions": 1024,
    },
    "facebook/opt-1.3b": {
        "model_type": "opt",
        "hidden_size": 2048,
        "ffn_dim": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "word_embed_proj_dim": 2048,
        "do_layer_norm_before": True,
    },
    "EleutherAI/pythia-1.4b": {
        "model_type": "gpt_neox",
        "hidden_act": "gelu",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "rotary_pct": 0.25,
        "vocab_size": 50304,
        "max_position_embeddings": 2048,
        "use_parallel_residual": True,
        "tie_word_embeddings": False,
    },
    "google/gemma-2-2b": {
        "model_type": "gemma2",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    "google-t5/t5-large": {
        "model_type": "t5",
        "d_model": 1024,
        "d_kv": 64,
        "d_ff": 4096,
        "num_layers": 24,
        "num_heads": 16,
        "vocab_size": 32128,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": 1,
    },
    "FacebookAI/roberta-large": {
        "model_type": "roberta",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "vocab_size": 50265,
        "max_position_embeddings": 514,
        "type_vocab_size": 1,
    },
    "google-bert/bert-large-uncased": {
        "model_type": "bert",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "vocab_size": 30522,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
    },
    "tiny/llama": _LLAMA
    | {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 32768,
        "tie_word_embeddings": True,
    },
}

AUTO_CLASS: dict[str, str] = {
    "roberta": "AutoModelForMaskedLM",
    "bert": "AutoModelForMaskedLM",
    "t5": "AutoModelForSeq2SeqLM",
    "modernbert": "AutoModelForMaskedLM",
    "deberta-v2": "AutoModelForMaskedLM",
}
"""``model_type`` to the transformers auto class that gives a loss; all others are causal."""


def build_config(name: str, overrides: dict[str, Any]) -> Any:
    """The transformers config of ``name`` with single values replaced."""
    from transformers import AutoConfig

    from zeroplan.models.catalog import find

    entry = find(name)
    known = MODELS[name] if name in MODELS else dict(entry.config) if entry else {}
    if not known:
        raise ValueError(f"no config values are known for {name}")
    values = known | overrides
    return AutoConfig.for_model(values["model_type"], **{k: v for k, v in values.items() if k != "model_type"})


def auto_class(model_type: str) -> Any:
    """The transformers auto class whose ``from_config`` builds this type with a loss."""
    import transformers

    return getattr(transformers, AUTO_CLASS.get(model_type, "AutoModelForCausalLM"))
