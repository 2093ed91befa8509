"""axolotl's YAML: what a run with it does. Source: axolotl 0.9, ``utils/schemas/``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroplan.interop.setups import Keys, Setup, attention_of, optimizer_of, precision_of


def read_axolotl(data: Mapping[str, Any], name: str) -> Setup:
    """The run that an axolotl file describes.

    Raises:
        BadInput: values of wrong types, or a ds_config that is not there.
    """
    keys = Keys(data, name)
    adapter = keys.text("adapter")
    notes = []
    if adapter == "qlora" or keys.flag("load_in_4bit") or keys.flag("load_in_8bit"):
        notes.append("quantised base weights are not modelled: they are counted in 16 bits")
    if keys.data.get("bf16") == "full":
        notes.append("bf16: full keeps no fp32 masters; they are counted")
    if keys.flag("sample_packing"):
        notes.append("packed samples are counted as full sequences")
    ds_config = keys.ds_config("deepspeed")
    sharded = bool(data.get("fsdp") or data.get("fsdp_config"))
    again = data.get("gradient_checkpointing")
    flash = keys.flag("flash_attention")
    return Setup(
        kind="axolotl",
        engine="deepspeed" if ds_config is not None else "fsdp2" if sharded else "ddp",
        model=keys.text("base_model"),
        micro_batch=keys.number("micro_batch_size", 1),
        grad_accum=keys.number("gradient_accumulation_steps", 1),
        seq_len=keys.number("sequence_len", 512),
        dtype=_dtype(keys),
        optimizer=optimizer_of(keys.text("optimizer")),
        attn="flash" if flash else attention_of(keys.text("attn_implementation")),
        gradient_checkpointing=bool(again) if isinstance(again, str) else keys.flag("gradient_checkpointing", False),
        lora_rank=keys.number("lora_r", 8) if adapter in ("lora", "qlora") else None,
        lora_targets=() if keys.flag("lora_target_linear") else keys.texts("lora_target_modules") if adapter else (),
        ds_config=ds_config,
        notes=tuple(notes),
    )


def _dtype(keys: Keys) -> str:
    """``bf16: auto`` takes bf16 where the card has it; ``full`` trains without fp32 masters."""
    return "bf16" if keys.data.get("bf16") in ("auto", "full") else precision_of(keys)
