"""torchtitan's models by name and flavor: the model of the hub that has the same shape, or its config.

Source: torchtitan of 23 February 2026, ``torchtitan/models/*/__init__.py``, by their dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: By model, then flavor in lower case.
_HUB = {
    "llama3": {
        "8b": "meta-llama/Llama-3.1-8B",
        "70b": "meta-llama/Llama-3.1-70B",
        "405b": "meta-llama/Llama-3.1-405B",
    },
    "deepseek_v3": {
        "16b": "deepseek-ai/DeepSeek-V2-Lite",
        "236b": "deepseek-ai/DeepSeek-V2",
        "671b": "deepseek-ai/DeepSeek-V3",
    },
    "qwen3": {
        **{size: f"Qwen/Qwen3-{size.upper()}" for size in ("0.6b", "1.7b", "4b", "8b", "14b", "32b")},
        "30b-a3b": "Qwen/Qwen3-30B-A3B",
        "235b-a22b": "Qwen/Qwen3-235B-A22B",
    },
}
#: Ends of flavors that choose an attention; the shape is the same.
_ATTENTIONS = ("_flex_attn", "_flex", "_varlen_attn", "_varlen")
#: 256 channels, 6 blocks, 16 heads; an MLP of 768, which is 8/3 × 256 rounded up to 256.
_DEBUG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "_name_or_path": "torchtitan llama3 debugmodel",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 2048,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


def model_of(name: str, flavor: str) -> str | Mapping[str, Any] | None:
    """Return the id or the config of a flavor; None for one that is not known.

    Args:
        name: ``model.name``, such as ``llama3``; a suffix such as ``_ft`` names another program over the same model.
        flavor: ``model.flavor`` in lower case, such as ``8b``.
    """
    family = next((known for known in _HUB if name == known or name.startswith(f"{known}_")), None)
    for end in _ATTENTIONS:
        flavor = flavor.removesuffix(end)
    if family is None:
        return None
    if family == "llama3" and flavor == "debugmodel":
        return _DEBUG
    return _HUB[family].get(flavor)
