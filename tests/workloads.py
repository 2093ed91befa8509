"""Workloads from flat keywords, for tests: each goes to its part or its technique."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from zeroplan.core.workload import (
    CheckpointPolicy,
    ChunkedHead,
    GradientCheckpointing,
    Lora,
    QuantizedBase,
    TiledLoss,
    TiledMlp,
    Workload,
)

_CHECKPOINTING = {"checkpoint_policy": "policy", "reentrant": "reentrant", "checkpoint_interval": "interval"}
_CHECKPOINTING |= {"offload_checkpoints": "on_host"}
_LORA = {"lora_targets": "targets", "lora_dropout": "dropout"}
_BASE = {"quantized_by": "named_by", "adapter_dtype": "adapter_dtype", "whole_base": "whole"}
_BASE |= {"linear_experts": "linear_experts", "base_on_host": "on_host"}
_VALUES = ("evaluation", "saving", "fp8", "sparse_attention", "curriculum", "layer_drop", "quantize_training")
_VALUES += ("compile", "generation", "colocated")


def flat_workload(**flat: Any) -> Workload:
    """Return a workload of these keywords: ``flat_workload(seq_len=64, lora_rank=8, gradient_checkpointing=True)``."""
    return with_flat(Workload(), **flat)


def with_flat(base: Workload, **flat: Any) -> Workload:
    """Return `base` with these changes; a technique is switched by its first keyword, and changed by its others."""
    techniques: list[object] = []
    if "gradient_checkpointing" in flat:
        base = base.checkpointed(flat.pop("gradient_checkpointing"))
    again = {new: flat.pop(old) for old, new in _CHECKPOINTING.items() if old in flat}
    if "policy" in again:
        again["policy"] = CheckpointPolicy.parse(again["policy"])
    if found := base.technique(GradientCheckpointing):
        techniques.append(replace(found, **again))
    lora = {new: flat.pop(old) for old, new in _LORA.items() if old in flat}
    rank = flat.pop("lora_rank", base.lora_rank)
    if rank is not None:
        techniques.append(replace(base.technique(Lora) or Lora(rank), rank=rank, **lora))
    else:
        base = base.without(Lora)
    kept = {new: flat.pop(old) for old, new in _BASE.items() if old in flat}
    if (quantize := flat.pop("quantize", None)) is not None:
        techniques.append(QuantizedBase(quantize, **kept))
    elif quantized := base.technique(QuantizedBase):
        techniques.append(replace(quantized, **kept))
    for name, kind in (("tiled_mlp", TiledMlp), ("tiled_loss", TiledLoss)):
        if tiles := flat.pop(name, 0):
            techniques.append(kind(tiles))
    if flat.pop("chunked_head", False):
        techniques.append(ChunkedHead())
    techniques += [value for name in _VALUES if (value := flat.pop(name, None)) is not None]
    return base.but(**flat).with_techniques(*techniques)
