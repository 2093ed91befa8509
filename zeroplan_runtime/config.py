"""Reads a ``ds_config`` into what the runtime needs. What it cannot do is refused by name, what has no effect is listed.

The defaults are DeepSpeed 0.19.8's. ``"auto"`` counts as not given. Keys of the runtime's own stand under ``"zeroplan"``:

- ``ring``: slots that blocks take turns in at stage 3 (parameters) and from stage 2 on (gradients), 2 or more;
- ``wide_numel``: the least elements of an embedding or head that becomes a unit of its own;
- ``direct_linear``: let linear layers write weight gradients straight into the flat buffers;
- ``fused_loss``: compute causal language models' loss without fp32 copies of the logits;
- ``audit_steps``: micro batches at stage 3 in which every use of a parameter is checked to be within its unit's forward;
- ``timeout``: seconds without progress after which a rank names the one that it waits for, and ends;
- ``delayed_update``: the first step from which updates on the host run beside the next forward and backward; 0 for never;
- ``nvme_in_memory``: accept an ``nvme_path`` on a file system in host memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeroplan.core.errors import BadInput, did_you_mean
from zeroplan.core.layout import WIDE_NUMEL
from zeroplan.core.workload import DType
from zeroplan_runtime.offload.probe import ALLOW_MEMORY_KEY
from zeroplan_runtime.offload.settings import Offload, read_offload
from zeroplan_runtime.optim.scaler import LossScaler

_TOP = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer",
    "scheduler",
    "fp16",
    "bf16",
    "zero_optimization",
    "communication_data_type",
    "data_types",
    "activation_checkpointing",
    "aio",
    "zeroplan",
}
_NO_EFFECT = {
    "steps_per_print",
    "wall_clock_breakdown",
    "dump_state",
    "memory_breakdown",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "gradient_predivide_factor",
    "prescale_gradients",
    "sparse_gradients",
    "checkpoint",
    "timers",
    "tensorboard",
    "wandb",
    "csv_monitor",
    "comms_logger",
    "flops_profiler",
    "seq_parallel_communication_data_type",
}
_ZERO_NO_EFFECT = {
    "allgather_partitions",
    "allgather_bucket_size",
    "allgather_sequential",
    "overlap_comm",
    "reduce_scatter",
    "reduce_bucket_size",
    "contiguous_gradients",
    "round_robin_gradients",
    "parameter_alignment",
    "use_multi_rank_bucket_allreduce",
    "sub_group_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_module_granularity_threshold",
    "stage3_use_all_reduce_for_fetch_params",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "memory_efficient_linear",
    "ignore_unused_parameters",
    "load_from_fp32_weights",
    "elastic_checkpoint",
    "legacy_stage1",
    "leaf_module",
    "log_trace_cache_warnings",
}
_ZERO = {"stage", "offload_optimizer", "offload_param"}
_FP16 = {
    "enabled",
    "loss_scale",
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "consecutive_hysteresis",
    "min_loss_scale",
    "auto_cast",
}
_BF16 = {"enabled", "check_grad_overflow"}
#: Keys of the runtime's own, with the least value of those that are numbers.
_OWN: dict[str, float | None] = {
    "ring": 2,
    "wide_numel": 1,
    "direct_linear": None,
    "fused_loss": None,
    "audit_steps": 0,
    "timeout": 1,
}
_OWN_KEYS = set(_OWN) | {"delayed_update", ALLOW_MEMORY_KEY}


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
    ring: int = 2
    wide_numel: int = WIDE_NUMEL
    direct_linear: bool = True
    fused_loss: bool = True
    audit_steps: int = 1
    timeout: float = 600.0
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
    without_effect = [key for key in raw if key in _NO_EFFECT]
    _refuse_unknown(raw, _TOP | _NO_EFFECT, "")
    zero = _section(raw, "zero_optimization")
    without_effect += [f"zero_optimization.{key}" for key in zero if key in _ZERO_NO_EFFECT]
    _refuse_unknown(zero, _ZERO | _ZERO_NO_EFFECT, "zero_optimization")
    stage = _number(zero, "stage", 0, "zero_optimization")
    offload, ignored = read_offload(raw, stage)
    without_effect += ignored
    fp16, bf16, own = _section(raw, "fp16"), _section(raw, "bf16"), _section(raw, "zeroplan")
    _refuse_unknown(fp16, _FP16, "fp16")
    _refuse_unknown(bf16, _BF16, "bf16")
    _refuse_unknown(own, _OWN_KEYS, "zeroplan")
    if fp16.get("enabled") and bf16.get("enabled"):
        raise BadInput("fp16 and bf16 are both enabled", where="ds_config", remedy="enable one")
    dtype = DType.FP16 if fp16.get("enabled") else DType.BF16 if bf16.get("enabled") else DType.FP32
    reduce_dtype = _dtype(raw.get("communication_data_type"), dtype, "communication_data_type")
    types = _section(raw, "data_types")
    _refuse_unknown(types, {"grad_accum_dtype"}, "data_types")
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
        offload=offload,
        without_effect=tuple(without_effect),
        **{key: _own(own, key) for key in _OWN if key in own},
    )


def _own(section: Mapping[str, Any], key: str) -> Any:
    least = _OWN[key]
    value = section[key]
    if least is None:
        if not isinstance(value, bool):
            raise BadInput(f"{value!r} is not true or false", where=f"zeroplan.{key}")
        return value
    number = _real(section, key, least, "zeroplan") if key == "timeout" else _number(section, key, 0, "zeroplan")
    if number < least:
        raise BadInput(f"{value!r} is too small", where=f"zeroplan.{key}", remedy=f"use {least:g} or more")
    return number


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


def _refuse_unknown(section: Mapping[str, Any], known: set[str], where: str) -> None:
    for key in section:
        if key not in known:
            remedy = did_you_mean(key, known) or "remove it"
            raise BadInput(f"key {key!r} is not supported", where=where or "ds_config", remedy=remedy)


def _section(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = raw.get(key) or {}
    if not isinstance(value, Mapping):
        raise BadInput(f"{value!r} is not an object", where=key)
    return value


def _given(section: Mapping[str, Any], key: str, default: Any) -> Any:
    value = section.get(key)
    return default if value is None or value == "auto" else value


def _number(section: Mapping[str, Any], key: str, default: int, where: str) -> int:
    value = _given(section, key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise BadInput(f"{value!r} is not a whole number", where=f"{where}.{key}" if where else key)
    return value


def _real(section: Mapping[str, Any], key: str, default: float, where: str) -> float:
    value = _given(section, key, default)
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
    section = _section(raw, key)
    if not section:
        return None
    if not isinstance(section.get("type"), str):
        raise BadInput("'type' is missing", where=key)
    said = _section(section, "params")
    if said.get("lr") == "auto":
        raise BadInput("'auto' is for the HF Trainer to fill", where=f"{key}.params.lr", remedy="write the learning rate")
    params = {k: v for k, v in said.items() if v != "auto"}
    return {"type": section["type"], "params": params}


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
