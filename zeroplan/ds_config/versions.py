"""What a ds_config means to another DeepSpeed than 0.19.8: defaults that moved, keys that came and keys that went.

Checked in DeepSpeed's repository from 0.10.0 on, tag by tag, and in the archives of 0.19.6 to 0.19.8. `source` names the file
within deepspeed/ that states the key.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from zeroplan.core.versions import Version, parse_version
from zeroplan.core.zero_config import NEWEST_DEEPSPEED, ZeroConfig
from zeroplan.ds_config.sections import find_key

_ZERO = "zero_optimization"
_CONSTANTS = "runtime/constants.py"
_OFFLOAD, _PRECISION = "runtime/zero/offload_config.py", "runtime/precision_config.py"


@dataclass(frozen=True, slots=True)
class DefaultChange:
    """The key at `path` had the default `before` in the versions before `since`, as far back as another change of the key."""

    path: str
    since: Version
    before: Any
    source: str


@dataclass(frozen=True, slots=True)
class KeyHistory:
    """Versions that know a key: `since` is the first one, None for all; from `until` on it is refused."""

    path: str
    since: Version | None = None
    until: Version | None = None


DEFAULT_CHANGES: tuple[DefaultChange, ...] = (
    DefaultChange("bf16.immediate_grad_update", (0, 16, 5), False, _CONSTANTS),
    DefaultChange("bf16.immediate_grad_update", (0, 17, 1), True, _PRECISION),
    DefaultChange(f"{_ZERO}.leaf_module.classes", (0, 18, 0), (), "runtime/zero/leaf_module_config.py"),
    DefaultChange("gradient_clipping", (0, 19, 3), 0.0, _CONSTANTS),
    DefaultChange("bf16.check_grad_overflow", (0, 19, 3), False, _PRECISION),
    DefaultChange(f"{_ZERO}.offload_optimizer.pin_memory", (0, 19, 5), False, _OFFLOAD),
    DefaultChange(f"{_ZERO}.offload_param.pin_memory", (0, 19, 5), False, _OFFLOAD),
)


def _came(since: Version, *paths: str) -> tuple[KeyHistory, ...]:
    return tuple(KeyHistory(path, since=since) for path in paths)


def _went(until: Version, *paths: str) -> tuple[KeyHistory, ...]:
    return tuple(KeyHistory(path, until=until) for path in paths)


#: Keys and sections that not every version from 0.10.0 to 0.19.8 knows.
KEY_HISTORIES: tuple[KeyHistory, ...] = (
    *_came((0, 10, 1), f"{_ZERO}.pipeline_loading_checkpoint", f"{_ZERO}.override_module_apply"),
    *_came((0, 10, 2), f"{_ZERO}.zero_quantized_nontrainable_weights"),
    *_came((0, 12, 3), f"{_ZERO}.offload_optimizer.ratio"),
    *_came((0, 12, 4), f"{_ZERO}.use_multi_rank_bucket_allreduce", "use_data_before_expert_parallelism"),
    *_came((0, 13, 2), "compile"),
    *_came((0, 13, 3), "bf16.immediate_grad_update"),
    *_came((0, 14, 3), f"{_ZERO}.use_all_reduce_for_fetch_params", "comet"),
    *_came((0, 16, 0), f"{_ZERO}.module_granularity_threshold"),
    *_came((0, 16, 4), f"{_ZERO}.log_trace_cache_warnings", "tensor_parallel"),
    *_came((0, 16, 5), "seq_parallel_communication_data_type"),
    *_came((0, 17, 1), "bf16.check_grad_overflow"),
    *_came((0, 17, 2), "torch_autocast"),
    *_came((0, 17, 5), f"{_ZERO}.zenflow"),
    *_came((0, 17, 6), f"{_ZERO}.zenflow.pt_reserved_cores_perc", f"{_ZERO}.enable_sanity_checks"),
    *_came((0, 18, 0), f"{_ZERO}.leaf_module"),
    *_came((0, 18, 0), *(f"{_ZERO}.offload_optimizer.{key}" for key in ("super_offload", "cpuadam_cores_perc"))),
    *_came((0, 18, 3), "bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"),
    *_came((0, 18, 5), f"{_ZERO}.allgather_sequential"),
    *_came((0, 18, 9), f"{_ZERO}.save_muon_momentum_buffer_in_memory"),
    *_came((0, 19, 2), "data_types.param_dtype", "data_types.buffer_dtype"),
    *_came((0, 19, 3), "log_level"),
    *_came((0, 19, 4), "managed_gradient_accumulation"),
    *_came((0, 19, 6), "gradient_allreduce_op"),
    *_came((0, 19, 7), f"{_ZERO}.parameter_alignment", f"{_ZERO}.compute_grad_norm"),
    *_came((0, 19, 8), "data_types.keep_in_fp32_modules", "disable_python_gc"),
    *_went((0, 19, 7), "nebula", "compression_training", "quantize_training", "sparse_attention"),
    *_went((0, 19, 7), *(f"{_ZERO}.mics_{key}" for key in ("shard_size", "hierarchical_params_gather"))),
    *_went((0, 19, 8), "amp", "sparse_gradients", "eigenvalue", "elasticity", "graph_harvesting"),
    *_went((0, 19, 8), "curriculum_learning", "progressive_layer_drop", f"{_ZERO}.zeropp_loco_param"),
)
_BY_PATH = {history.path: history for history in KEY_HISTORIES}

#: From here on the fp16 and bf16 sections refuse unknown keys, which they ignored before.
STRICT_PRECISION: Version = (0, 17, 1)


def came_later(path: str, version: Version) -> Version | None:
    """Return the first version that knows the key, where `version` is older; None where it knows the key."""
    history = _BY_PATH.get(path)
    return history.since if history and history.since and version < history.since else None


def still_known(path: str, version: Version) -> bool:
    """Return whether `version` knows a key that 0.19.8 has taken out."""
    history = _BY_PATH.get(path)
    return history is not None and history.until is not None and version < history.until


def older_defaults(version: str | Version) -> dict[str, Any]:
    """Return the defaults of `version` that differ from those of 0.19.8, by dotted path.

    Raises:
        BadInput: when `version` is no version.
    """
    asked = parse_version(version) if isinstance(version, str) else version
    newest_first = sorted(DEFAULT_CHANGES, key=lambda change: change.since, reverse=True)
    found = {change.path: change.before for change in newest_first if asked < change.since}
    return {path: value for path, value in found.items() if value != _newest(path)}


def _newest(path: str) -> Any:
    key = find_key(path)
    assert key is not None, path
    return key.default


def as_read_by(zero: ZeroConfig, version: Version) -> ZeroConfig:
    """Return a config that was made with today's defaults as `version` has them: every default that moved, moved back."""
    if version == NEWEST_DEEPSPEED == zero.deepspeed:
        return zero
    changes: dict[str, Any] = {"deepspeed": version}
    blocks: dict[str, dict[str, Any]] = {}
    for path, value in older_defaults(version).items():
        parent, _, name = path.rpartition(".")
        block = parent.removeprefix(f"{_ZERO}.")
        if block in ("offload_optimizer", "offload_param", "leaf_module"):
            blocks.setdefault(block, {})[name] = value
        else:
            changes[name] = value
    changes |= {block: replace(zero.leaf(block), **values) for block, values in blocks.items()}
    return zero.but(**changes)
