"""The model of a timed case, as transformers has it."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.step.case import MODEL_TYPES, SHAPES


def model_of(shape: str, dtype: torch.dtype, device: torch.device, *, checkpointing: bool = False) -> Any:
    """Build the model of `shape` with random weights, the same on every rank and for every engine."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {**SHAPES[shape], "use_cache": False}
    config = AutoConfig.for_model(MODEL_TYPES.get(shape, "llama"), **values)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model
