"""Reads a ``ds_config`` into what the runtime needs. What it cannot do is refused by name, what has no effect is listed.

The defaults are DeepSpeed 0.19.8's. ``"auto"`` counts as not given. The keys are those of
:mod:`zeroplan.ds_config.runtime_keys`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.workload import DType
from zeroplan.ds_config.runtime_keys import Knobs, require_known_keys, section
from zeroplan.ds_config.runtime_offload import Offload, read_offload
from zeroplan_runtime.optim.scaler import LossScaler


@dataclass(frozen=True)
class RuntimeConfig:
    """What a ds_config asks of the runtime. `without_effect` names the keys that change nothing here."""

    stage: int = 0
    micro_batch: int = 1
    grad_accum: int = 1
    clip: float = 1.0
    dtype: DType = DType.FP32
    reduce_dtype: DType = DType.FP32
    accum_dtype: DType = DType.FP32
    check_overflow: bool = False
    fp16: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] | None = None
    scheduler: Mapping[str, Any] | None = None
    knobs: Knobs = field(default_factory=Knobs)
    offload: Offload = field(default_factory=Offload)
    without_effect: tuple[str, ...] = ()

    @property
    def auto_cast(self) -> bool:
        """Whether floating inputs are cast to the model's dtype."""
        return bool(self.fp16.get("auto_cast", False))

    def loss_scaler(self) -> LossScaler:
        """The loss scaler that the ``fp16`` section describes; the constant 1 without it."""
        if self.dtype is not DType.FP16:
            return LossScaler()
        static = float(self.fp16.get("loss_scale", 0))
        if static:
            return LossScaler(scale=static)
        return LossScaler(
            scale=2.0 ** self.fp16.get("initial_scale_power", 16),
            dynamic=True,
            window=self.fp16.get("loss_scale_window", 1000),
            hysteresis=self.fp16.get("hysteresis", 2),
            consecutive_hysteresis=self.fp16.get("consecutive_hysteresis", False),
            min_scale=self.fp16.get("min_loss_scale", 1.0),
        )


def read_config(source: Mapping[str, Any] | str | Path, ranks: int) -> RuntimeConfig:
    """A :class:`RuntimeConfig` from a dict or the path of a JSON file.

    Raises:
        BadInput: for a file that cannot be read, a key that is unknown or not supported, or batch sizes that do not agree.
    """
    raw = _load(source)
    without_effect = require_known_keys(raw)
    knobs = Knobs.of(raw)
    stage = _number(section(raw, "zero_optimization"), "stage", 0, "zero_optimization")
    offload, ignored = read_offload(raw, knobs, stage)
    fp16, bf16 = section(raw, "fp16"), section(raw, "bf16")
    if fp16.get("enabled") and bf16.get("enabled"):
        raise BadInput("fp16 and bf16 are both enabled", where="ds_config", remedy="enable one")
    dtype = DType.FP16 if fp16.get("enabled") else DType.BF16 if bf16.get("enabled") else DType.FP32
    reduce_dtype = _dtype(raw.get("communication_data_type"), dtype, "communication_data_type")
    types = section(raw, "data_types")
    accum_dtype = _dtype(types.get("grad_accum_dtype"), reduce_dtype, "data_types.grad_accum_dtype")
    micro_batch, grad_accum = _batches(raw, ranks)
    return RuntimeConfig(
        stage=stage,
        micro_batch=micro_batch,
        grad_accum=grad_accum,
        clip=_real(raw, "gradient_clipping", 1.0, ""),
        dtype=dtype,
        reduce_dtype=reduce_dtype,
        accum_dtype=accum_dtype,
        check_overflow=dtype is DType.FP16 or (dtype is DType.BF16 and bool(bf16.get("check_grad_overflow", True))),
        fp16={key: value for key, value in fp16.items() if value != "auto"},
        optimizer=_typed(raw, "optimizer"),
        scheduler=_typed(raw, "scheduler"),
        knobs=knobs,
        offload=offload,
        without_effect=(*without_effect, *ignored),
    )


def _load(source: Any) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, str | Path):
        raise BadInput(
            f"a {type(source).__name__} is no ds_config", where="config", remedy="give a dict or the path of its JSON"
        )
    try:
        raw = json.loads(Path(source).read_text())
    except OSError as fault:
        raise BadInput(f"cannot read the config: {fault.strerror}", where=str(source)) from None
    except ValueError as fault:
        raise BadInput(f"not JSON: {fault}", where=str(source)) from None
    if not isinstance(raw, dict):
        raise BadInput("not a JSON object", where=str(source))
    return raw


def _given(holder: Mapping[str, Any], key: str, default: Any) -> Any:
    value = holder.get(key)
    return default if value is None or value == "auto" else value


def _number(holder: Mapping[str, Any], key: str, default: int, where: str) -> int:
    value = _given(holder, key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise BadInput(f"{value!r} is not a whole number", where=f"{where}.{key}" if where else key)
    return value


def _real(holder: Mapping[str, Any], key: str, default: float, where: str) -> float:
    value = _given(holder, key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise BadInput(f"{value!r} is not a number of zero or more", where=f"{where}.{key}" if where else key)
    return float(value)


def _dtype(value: Any, default: DType, where: str) -> DType:
    if value is None or value == "auto":
        return default
    try:
        return DType(value)
    except ValueError:
        raise BadInput(f"{value!r} is not a dtype", where=where, remedy="use fp32, fp16 or bf16") from None


def _typed(raw: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
    given = section(raw, key)
    if not given:
        return None
    if not isinstance(given.get("type"), str):
        raise BadInput("'type' is missing", where=key)
    said = section(given, "params")
    if said.get("lr") == "auto":
        raise BadInput("'auto' is for the HF Trainer to fill", where=f"{key}.params.lr", remedy="write the learning rate")
    params = {k: v for k, v in said.items() if v != "auto"}
    return {"type": given["type"], "params": params}


def _batches(raw: Mapping[str, Any], ranks: int) -> tuple[int, int]:
    """Micro batch and accumulation from any two of the three sizes, whose product with the ranks must hold."""
    total = _number(raw, "train_batch_size", 0, "")
    micro = _number(raw, "train_micro_batch_size_per_gpu", 0, "")
    accum = _number(raw, "gradient_accumulation_steps", 0, "")
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        if _given(raw, key, None) == 0:
            raise BadInput("0 is too small", where=key, remedy="use 1 or more")
    if not total and not micro:
        micro = 1
    if not micro:
        micro = total // (ranks * (accum or 1))
    if not accum:
        accum = total // (ranks * micro) if total and micro else 1
    if (total and total != micro * accum * ranks) or not micro or not accum:
        raise BadInput(
            f"train_batch_size {total} is not micro batch {micro} × accumulation {accum} × ranks {ranks}",
            where="train_batch_size",
            remedy="leave one of them out",
        )
    return micro, accum
