"""The keys of a ds_config that the included runtime takes: read by the runtime and by the plan of it.

Keys of the runtime's own stand under ``"zeroplan"`` and are the fields of :class:`Knobs`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from zeroplan.core.errors import BadInput, did_you_mean
from zeroplan.core.layout import WIDE_NUMEL

#: Top-level keys with an effect, and those without.
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
_TOP_NO_EFFECT = {
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
#: Keys of sections in which all have an effect.
_SECTIONS: dict[str, set[str]] = {
    "fp16": {
        "enabled",
        "loss_scale",
        "initial_scale_power",
        "loss_scale_window",
        "hysteresis",
        "consecutive_hysteresis",
        "min_loss_scale",
        "auto_cast",
    },
    "bf16": {"enabled", "check_grad_overflow"},
    "data_types": {"grad_accum_dtype"},
}
#: The least value of each of :class:`Knobs` that is a number.
_LEAST = {"ring": 2, "wide_numel": 1, "audit_steps": 0, "timeout": 1, "delayed_update": 0}


@dataclass(frozen=True, slots=True)
class Knobs:
    """The ``zeroplan`` section of a ds_config.

    Attributes:
        ring: slots that blocks take turns in at stage 3 (parameters) and from stage 2 on (gradients).
        wide_numel: the least elements of an embedding or head that becomes a unit of its own.
        direct_linear: let linear layers write weight gradients straight into the flat buffers.
        fused_loss: compute causal language models' loss without fp32 copies of the logits.
        audit_steps: micro batches at stage 3 in which every use of a parameter is checked to be within its unit's forward.
        timeout: seconds without progress after which a rank names the one that it waits for, and ends.
        delayed_update: the first step from which updates on the host run beside the next forward and backward; 0 for never.
        nvme_in_memory: accept an ``nvme_path`` on a file system in host memory.
    """

    ring: int = 2
    wide_numel: int = WIDE_NUMEL
    direct_linear: bool = True
    fused_loss: bool = True
    audit_steps: int = 1
    timeout: float = 600.0
    delayed_update: int = 0
    nvme_in_memory: bool = False

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Knobs:
        """The knobs of a ds_config, defaults for those that it leaves out.

        Raises:
            BadInput: an unknown key, a value of another type, or a number that is too small.
        """
        given = section(raw, "zeroplan")
        kinds = {field.name: type(field.default) for field in fields(cls)}
        _refuse_unknown(given, kinds, "zeroplan")
        said = {key: value for key, value in given.items() if value is not None and value != "auto"}
        return cls(**{key: _knob(key, value, kinds[key]) for key, value in said.items()})


def require_known_keys(raw: Mapping[str, Any]) -> list[str]:
    """The keys of a ds_config that change nothing here, offload's and activation checkpointing's apart.

    Raises:
        BadInput: a key that the runtime does not know, or a section that is no object.
    """
    _refuse_unknown(raw, _TOP | _TOP_NO_EFFECT, "")
    zero = section(raw, "zero_optimization")
    _refuse_unknown(zero, _ZERO | _ZERO_NO_EFFECT, "zero_optimization")
    for name, known in _SECTIONS.items():
        _refuse_unknown(section(raw, name), known, name)
    return [key for key in raw if key in _TOP_NO_EFFECT] + [
        f"zero_optimization.{key}" for key in zero if key in _ZERO_NO_EFFECT
    ]


def section(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A section of a ds_config, empty where it is left out.

    Raises:
        BadInput: when it is no object.
    """
    value = raw.get(key) or {}
    if not isinstance(value, Mapping):
        raise BadInput(f"{value!r} is not an object", where=key, remedy="write {…}, or leave it out")
    return value


def _refuse_unknown(given: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    for key in given:
        if key not in known:
            remedy = did_you_mean(key, known) or "remove it"
            raise BadInput(f"key {key!r} is not supported", where=where or "ds_config", remedy=remedy)


def _knob(key: str, value: Any, kind: type[Any]) -> Any:
    where = f"zeroplan.{key}"
    if kind is bool:
        if not isinstance(value, bool):
            raise BadInput(f"{value!r} is not true or false", where=where, remedy="write true or false")
        return value
    least = _LEAST[key]
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or (kind is int and not isinstance(value, int)):
        what = "a whole number" if kind is int else "a number"
        raise BadInput(f"{value!r} is not {what}", where=where, remedy=f"use {least} or more")
    if value < least:
        raise BadInput(f"{value!r} is too small", where=where, remedy=f"use {least} or more")
    return kind(value)
