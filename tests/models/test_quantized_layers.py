"""Which layers of mixtures a quantised base has: those that transformers' bitsandbytes finds, by its own rule."""

from __future__ import annotations

from typing import Any

import pytest

from zeroplan.planner.resolve import resolve
from zeroplan.run.ask import Ask

pytest.importorskip("transformers")

_SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {**_SMALL, "num_key_value_heads": 2, "num_local_experts": 4},
    "qwen3_moe": {**_SMALL, "num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16},
    "qwen2_moe": {**_SMALL, "num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 32},
    "llama": {**_SMALL, "num_key_value_heads": 2, "tie_word_embeddings": False},
}


@pytest.mark.torch
@pytest.mark.parametrize("model_type", sorted(CONFIGS))
def test_linear_layers_alone_are_quantised(model_type: str) -> None:
    """transformers 5.17 fuses a layer's experts into parameters of three dimensions, and its router is no linear layer: both
    stay in 16 bits (``replace_with_bnb_linear`` takes ``nn.Linear`` alone).
    """
    import torch
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **CONFIGS[model_type])
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    head = built.get_output_embeddings()
    linear = {f"{name}.weight" for name, one in built.named_modules() if type(one) is nn.Linear and one is not head}
    asked = {"model_type": model_type, **CONFIGS[model_type]}
    case = resolve(Ask(model=asked, engine="ddp", gpu="H200", lora_rank=4, quantize="nf4")).cases[0]
    parameters = case.spec.parameters
    assert {parameters.names[p].replace(".base_layer", "") for p in parameters.packed} == linear
    experts = [p for p, name in enumerate(parameters.names) if ".experts." in name and ".lora_" not in name]
    assert all(len(parameters.shapes[p]) == 3 and p not in parameters.packed for p in experts)
    assert bool(experts) == model_type.endswith(("mixtral", "moe"))
