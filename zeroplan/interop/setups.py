"""A Setup is what another program's file says of a training run, in zeroplan's words; None is what it leaves open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.optimizers import known_optimizer
from zeroplan.ds_config.source import load_source


@dataclass(frozen=True, slots=True)
class Setup:
    """One run as a file describes it.

    `kind` names the file's program. `engine` is what trains (deepspeed, fsdp2, ddp); `ds_config` what DeepSpeed is given.
    `notes` say what of the file is not modelled.
    """

    kind: str
    engine: str = "deepspeed"
    model: str | None = None
    micro_batch: int | None = None
    grad_accum: int | None = None
    seq_len: int | None = None
    dtype: str | None = None
    optimizer: str | None = None
    attn: str | None = None
    gradient_checkpointing: bool | None = None
    lora_rank: int | None = None
    lora_targets: tuple[str, ...] = ()
    gpus: int | None = None
    nodes: int | None = None
    ds_config: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = field(default=())


class Keys:
    """A mapping read with types: a value of another type is bad input that names the key."""

    def __init__(self, data: Mapping[str, Any], name: str) -> None:
        self.data, self.name = data, name

    def number(self, key: str, default: int | None = None, *, least: int = 1) -> int | None:
        """A whole number; ``auto`` and null are the default."""
        value = self.data.get(key)
        if value is None or value == "auto":
            return default
        if isinstance(value, str) and value.strip().isdigit():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 1 << 31:
            raise BadInput(
                f"{str(value)[:40]!r} is no whole number from {least} on",
                where=f"{self.name}: {key}",
                remedy=f"write {least} or more",
            )
        return value

    def flag(self, key: str, default: bool | None = None) -> bool | None:
        """True or false; ``auto`` and null are the default."""
        value = self.data.get(key)
        if value is None or value == "auto":
            return default
        if isinstance(value, str) and value.lower() in ("true", "false", "yes", "no"):
            return value.lower() in ("true", "yes")
        if not isinstance(value, bool):
            raise BadInput(
                f"{str(value)[:40]!r} is neither true nor false", where=f"{self.name}: {key}", remedy="write true or false"
            )
        return value

    def text(self, key: str) -> str | None:
        """A string; null and the empty one are None."""
        value = self.data.get(key)
        if value is None or value == "":
            return None
        if not isinstance(value, str):
            raise BadInput(f"{str(value)[:40]!r} is no string", where=f"{self.name}: {key}", remedy="write one name or path")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings, or one with commas."""
        value = self.data.get(key)
        if value is None:
            return ()
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
            raise BadInput(
                f"{str(value)[:40]!r} is no list of names", where=f"{self.name}: {key}", remedy="write [q_proj, v_proj]"
            )
        return tuple(part.strip() for part in parts if part.strip())

    def mapping(self, key: str) -> Keys:
        """A nested mapping, empty where missing."""
        value = self.data.get(key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise BadInput("is no mapping", where=f"{self.name}: {key}", remedy="write keys and values below it")
        return Keys(value, f"{self.name}: {key}")

    def ds_config(self, key: str) -> Mapping[str, Any] | None:
        """A ds_config: the object itself, or the path of one, relative to this file or to the working folder."""
        value = self.data.get(key)
        if value is None or value == "" or value is False:
            return None
        if isinstance(value, Mapping):
            return load_source(value)[0]
        if not isinstance(value, str):
            raise BadInput("is neither a path nor an object", where=f"{self.name}: {key}", remedy="write a ds_config's path")
        for place in (Path(self.name.partition(": ")[0]).parent / value, Path(value)):
            if place.is_file():
                return load_source(place)[0]
        raise BadInput(f"there is no {value[:200]!r}", where=f"{self.name}: {key}", remedy="put the file where it says")


def optimizer_of(name: str | None) -> str | None:
    """The table's name of an optimizer as the HF Trainer, axolotl and LLaMA-Factory write it."""
    return None if name is None else known_optimizer(name)


def attention_of(name: str | None) -> str | None:
    """sdpa, flash or eager from transformers' and others' names."""
    if name is None:
        return None
    key = name.lower()
    return "flash" if key.startswith(("fa2", "fa3", "flash")) else key if key in ("sdpa", "eager") else None


def precision_of(keys: Keys) -> str:
    """``bf16`` and ``fp16`` switches as transformers has them: neither means fp32, and it refuses both."""
    if keys.flag("bf16") and keys.flag("fp16"):
        raise BadInput("bf16 and fp16 are both true", where=keys.name, remedy="switch one of them off")
    if keys.flag("bf16"):
        return "bf16"
    return "fp16" if keys.flag("fp16") else "fp32"
