"""LLaMA-Factory's YAML: what a run with it does. Source: LLaMA-Factory 0.9, ``src/llamafactory/hparams/``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroplan.interop.setups import Keys, Setup, attention_of, optimizer_of, precision_of


def read_llama_factory(data: Mapping[str, Any], name: str) -> Setup:
    """The run that a LLaMA-Factory file describes: LoRA unless `finetuning_type` says otherwise, checkpointing unless disabled.

    Raises:
        BadInput: values of wrong types, or a ds_config that is not there.
    """
    keys = Keys(data, name)
    method = keys.text("finetuning_type") or "lora"
    notes = []
    if data.get("quantization_bit") or data.get("quantization_method"):
        notes.append("quantised base weights are not modelled: they are counted in 16 bits")
    if method not in ("lora", "full"):
        notes.append(f"{method} is not modelled: all parameters are counted as trained")
    if keys.flag("pure_bf16"):
        notes.append("pure_bf16 keeps no fp32 masters; they are counted")
    targets = keys.texts("lora_target")
    ds_config = keys.ds_config("deepspeed")
    return Setup(
        kind="LLaMA-Factory",
        engine="deepspeed" if ds_config is not None else "fsdp2" if data.get("fsdp") else "ddp",
        model=keys.text("model_name_or_path"),
        micro_batch=keys.number("per_device_train_batch_size", 8),
        grad_accum=keys.number("gradient_accumulation_steps", 1),
        seq_len=keys.number("cutoff_len", 2048),
        dtype="bf16" if keys.flag("pure_bf16") else precision_of(keys),
        optimizer=optimizer_of(keys.text("optim")),
        attn=attention_of(keys.text("flash_attn")),
        gradient_checkpointing=not keys.flag("disable_gradient_checkpointing", False),
        lora_rank=keys.number("lora_rank", 8) if method == "lora" else None,
        lora_targets=() if targets in ((), ("all",)) or method != "lora" else targets,
        ds_config=ds_config,
        notes=tuple(notes),
    )
