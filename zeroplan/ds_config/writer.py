"""Writing a ds_config: explicit (no ``auto``), minimal (no key at its default), and without loss of what a source held."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from typing import Any

from zeroplan.core.workload import DType, Precision, Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.ds_config.batch import ACCUM, MICRO, TRAIN
from zeroplan.ds_config.schema import Section
from zeroplan.ds_config.sections import SECTIONS
from zeroplan.ds_config.versions import older_defaults

_ZERO = "zero_optimization"
#: Sections whose keys hold fields of ZeroConfig itself.
_OWN = ("", _ZERO, "fp16", "bf16", "data_types")
#: Sections that are fields of ZeroConfig.
_BLOCKS = {
    f"{_ZERO}.offload_optimizer": "offload_optimizer",
    f"{_ZERO}.offload_param": "offload_param",
    f"{_ZERO}.zenflow": "zenflow",
    f"{_ZERO}.leaf_module": "leaf_module",
    "activation_checkpointing": "activation_checkpointing",
    "aio": "aio",
}
#: Written even at their default, because readers look for them.
_ALWAYS = (f"{_ZERO}.stage", "gradient_clipping", f"{_ZERO}.reduce_bucket_size")


def write_ds_config(
    zero: ZeroConfig,
    workload: Workload | None = None,
    *,
    world_size: int | None = None,
    optimizer: Mapping[str, Any] | None = None,
    source: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a ds_config that reads back to `zero` (and to the batches and precision of `workload`), ready for ``json.dump``.

    The file is for the DeepSpeed that `zero` names: its defaults need not be written.

    Args:
        zero: sharding and offload.
        workload: micro batch, accumulation, precision; None keeps the source's.
        world_size: data-parallel ranks; given, ``train_batch_size`` is written too.
        optimizer: the ``optimizer`` block, ``{"type": "AdamW", "params": {"lr": 2e-5}}``; None keeps the source's.
        source: the object to start from. Its other keys stay as they are; its ``auto`` values and its deprecated
            spellings of keys that `zero` holds do not. A parameter of the optimizer or the scheduler at ``auto`` is dropped,
            so that DeepSpeed's own default holds.
    """
    config = _without_auto(source or {})
    if isinstance(config.get(_ZERO), bool):
        del config[_ZERO]
    _rename(config)
    older = older_defaults(zero.deepspeed)
    for path in _OWN:
        _write_section(config, SECTIONS[path], zero.leaves(), path, older)
    for path, name in _BLOCKS.items():
        block = zero.leaf(name)
        held = None if block is None else {f.name: getattr(block, f.name) for f in fields(block)}
        _write_section(config, SECTIONS[path], held, path, older)
    if zero.step.fp32_optimizer_states is False and not zero.step.bf16_optimizer_states:
        _put(config, "optimizer.params.fp32_optimizer_states", False)
    if workload is not None:
        _write_workload(config, workload, world_size)
    if optimizer is not None:
        config["optimizer"] = _plain(optimizer)
    _drop_empty(config, source or {})
    return config


def dump_ds_config(config: Mapping[str, Any]) -> str:
    """Return the text of a ds_config.json, with a newline at its end."""
    return json.dumps(config, indent=2, allow_nan=False) + "\n"


def _write_workload(config: dict[str, Any], workload: Workload, world_size: int | None) -> None:
    config[MICRO], config[ACCUM] = workload.batch.micro_batch, workload.batch.grad_accum
    config.pop(TRAIN, None)
    if world_size is not None:
        config[TRAIN] = workload.batch.micro_batch * workload.batch.grad_accum * world_size
    autocast = workload.numerics.precision is Precision.AUTOCAST
    mode = DType.FP32 if autocast or workload.numerics.precision is Precision.FP32 else workload.numerics.dtype
    for dtype in (DType.BF16, DType.FP16):
        if mode is dtype:
            _put(config, f"{dtype}.enabled", True)
        elif dtype in config:
            _put(config, f"{dtype}.enabled", False)
    if autocast:
        _put(config, "torch_autocast.enabled", True)
        _put(config, "torch_autocast.dtype", "bfloat16" if workload.numerics.dtype is DType.BF16 else "float16")
    elif "torch_autocast" in config:
        _put(config, "torch_autocast.enabled", False)


def _write_section(
    config: dict[str, Any], section: Section, held: Mapping[str, Any] | None, path: str, older: Mapping[str, Any]
) -> None:
    if held is None:
        _pop(config, path)
        return
    for key in section.keys.values():
        if not key.attr or key.deprecated or key.attr in _BLOCKS.values() or key.attr not in held:
            continue
        full = f"{path}.{key.name}" if path else key.name
        value = held[key.attr]
        spelling = f"{path}.{key.alias}" if key.alias else full
        if value == older.get(full, key.default) and full not in _ALWAYS and not _holds(config, full, spelling):
            continue
        _pop(config, full)
        if value is not None or key.optional:
            _put(config, spelling, _plain(value))
    if path.endswith("zenflow") and not _holds(config, path, path):
        _put(config, path, {"topk_ratio": held["topk_ratio"]})


def _rename(config: dict[str, Any]) -> None:
    """Deprecated keys go: what they said is in the ZeroConfig."""
    block = config.get(_ZERO)
    if isinstance(block, dict):
        for key in SECTIONS[_ZERO].keys.values():
            if key.deprecated and key.name != "cpu_offload_use_pin_memory":
                block.pop(key.name, None)
    old = config.pop("bfloat16", None)
    if old is not None and config.get("bf16") is None:
        config["bf16"] = old


def _without_auto(data: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            kept[key] = _without_auto(value)
        elif value != "auto" or key in ("keep_in_fp32_modules", "select_strategy", "select_interval", "update_interval"):
            kept[key] = _plain(value)
    return kept


def _drop_empty(config: dict[str, Any], source: Mapping[str, Any]) -> None:
    """Blocks that lost all their keys go, unless the source had them empty."""
    for name, value in list(config.items()):
        if isinstance(value, dict):
            original = source.get(name)
            _drop_empty(value, original if isinstance(original, Mapping) else {})
            if not value and original != {}:
                del config[name]


def _holds(config: Mapping[str, Any], *paths: str) -> bool:
    for path in paths:
        node: Any = config
        for part in path.split("."):
            node = node.get(part, _MISSING) if isinstance(node, Mapping) else _MISSING
        if node is not _MISSING:
            return True
    return False


_MISSING = object()


def _put(config: dict[str, Any], path: str, value: Any) -> None:
    *parents, name = path.split(".")
    node = config
    for parent in parents:
        child = node.get(parent)
        if not isinstance(child, dict):
            child = node[parent] = {}
        node = child
    node[name] = value


def _pop(config: dict[str, Any], path: str) -> None:
    *parents, name = path.split(".")
    node: Any = config
    for parent in parents:
        node = node.get(parent) if isinstance(node, dict) else None
    if isinstance(node, dict):
        node.pop(name, None)


def _plain(value: Any) -> Any:
    """Turn a value into one that JSON has."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
