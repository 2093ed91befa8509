"""A Llama of some blocks, as a transformers config; small enough to be traced in no time."""

from __future__ import annotations

from typing import Any


def small_llama(*, layers: int = 6, width: int = 256, vocab: int = 1000) -> dict[str, Any]:
    """Two heads of queries share one of keys and values; the MLP has 512 channels."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 512,
        "vocab_size": vocab,
    }
