"""Every key of a ds_config, once: its type, default, bounds, and whether it moves memory.

Keys that :class:`~zeroplan.core.zero_config.ZeroConfig` holds take their default from there (`attr` names the field).
The other sections, which no line of the ledger reads, are in :mod:`.sections`. A test compares both with the models of
the installed DeepSpeed, so a new version shows what it changed. Sources: runtime/config.py, runtime/constants.py,
runtime/zero/config.py, runtime/zero/offload_config.py, runtime/precision_config.py of DeepSpeed 0.19.8.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from typing import Any

from zeroplan.core.zero_config import (
    ActivationCheckpointing,
    Aio,
    LeafModule,
    OffloadOptimizer,
    OffloadParam,
    ZenFlow,
    ZeroConfig,
)
from zeroplan.ds_config.values import Kind


class Effect(StrEnum):
    """What a key does to memory, as far as zeroplan knows."""

    MEMORY = "understood"
    NONE = "no effect on memory"
    UNMODELLED = "known, its effect on memory is not modelled"
    REMOVED = "removed from DeepSpeed"
    UNKNOWN = "unknown"


class Mode(StrEnum):
    """How DeepSpeed reads a section."""

    MODEL = "model"  # a pydantic model: unknown keys are errors, values are coerced, "auto" is dropped
    PLAIN = "plain"  # a plain dict: unknown keys are ignored, values are taken as they are, "auto" stays a string
    OPEN = "open"  # handed on as it is (optimizer.params, scheduler.params): any key


@dataclass(frozen=True, slots=True)
class Key:
    """One key. `lo`, `hi` are inclusive bounds, `above`, `below` exclusive ones.

    `alias` is the other accepted spelling. `replaced_by` is what a deprecated key became. `optional` admits null.
    """

    name: str
    kind: Kind
    effect: Effect
    default: Any = None
    attr: str = ""
    alias: str = ""
    optional: bool = False
    lo: float | None = None
    hi: float | None = None
    above: float | None = None
    below: float | None = None
    replaced_by: str = ""
    note: str = ""

    @property
    def deprecated(self) -> bool:
        """Whether another key replaces this one."""
        return bool(self.replaced_by)


@dataclass(frozen=True, slots=True)
class Section:
    """One object of the file, by its dotted path, and the keys that DeepSpeed knows in it."""

    path: str
    mode: Mode
    keys: dict[str, Key]
    source: str

    def find(self, name: str) -> Key | None:
        """The key of that name or alias."""
        return self.keys.get(name) or next((key for key in self.keys.values() if key.alias and key.alias == name), None)

    @property
    def names(self) -> list[str]:
        """Every accepted spelling."""
        return [spelling for key in self.keys.values() for spelling in (key.name, key.alias) if spelling]


def _defaults(cls: type) -> dict[str, Any]:
    values = {}
    for f in fields(cls):
        values[f.name] = f.default_factory() if f.default_factory is not MISSING else f.default
    return values


def held(cls: type, *keys: Key) -> dict[str, Key]:
    """The keys by name, with the defaults of the fields of `cls` that hold them."""
    defaults = _defaults(cls)
    filled = {}
    for key in keys:
        changes: dict[str, Any] = {"default": defaults[key.attr]} if key.attr else {}
        values = {f.name: getattr(key, f.name) for f in fields(Key)} | changes
        filled[key.name] = Key(**values)
    return filled


def mem(name: str, kind: Kind, attr: str | None = None, **more: Any) -> Key:
    """A key that a line of the ledger or a schedule reads; `attr` is the field that holds it, by default the same name."""
    return Key(name, kind, Effect.MEMORY, attr=name if attr is None else attr, **more)


def free(name: str, kind: Kind, default: Any = None, **more: Any) -> Key:
    """A key without effect on memory."""
    return Key(name, kind, Effect.NONE, default, **more)


def other(name: str, kind: Kind, default: Any = None, **more: Any) -> Key:
    """A key that moves memory in a way that zeroplan does not model."""
    return Key(name, kind, Effect.UNMODELLED, default, **more)


I, F, B, S = Kind.INT, Kind.FLOAT, Kind.BOOL, Kind.STR  # noqa: E741

ZERO = Section(
    "zero_optimization",
    Mode.MODEL,
    held(
        ZeroConfig,
        mem("stage", Kind.STAGE),
        mem("contiguous_gradients", B),
        mem("reduce_scatter", B),
        mem("reduce_bucket_size", I, above=0),
        mem("use_multi_rank_bucket_allreduce", B),
        mem("allgather_partitions", B),
        mem("allgather_bucket_size", I, lo=0),
        mem("overlap_comm", B, optional=True),
        mem("compute_grad_norm", B),
        free("load_from_fp32_weights", B, True),
        free("elastic_checkpoint", B, False),
        mem("offload_param", Kind.SECTION, optional=True),
        mem("offload_optimizer", Kind.SECTION, optional=True),
        mem("zenflow", Kind.SECTION, optional=True),
        mem("sub_group_size", I, lo=0),
        mem("cpu_offload_param", B, "", optional=True, replaced_by="offload_param"),
        free("cpu_offload_use_pin_memory", B, optional=True, replaced_by="offload_param or offload_optimizer"),
        mem("cpu_offload", B, "", optional=True, replaced_by="offload_optimizer"),
        mem("prefetch_bucket_size", I, alias="stage3_prefetch_bucket_size", lo=0),
        mem("param_persistence_threshold", I, alias="stage3_param_persistence_threshold", lo=0),
        mem("model_persistence_threshold", I, alias="stage3_model_persistence_threshold", lo=0),
        mem("max_live_parameters", I, alias="stage3_max_live_parameters", lo=0),
        mem("max_reuse_distance", I, alias="stage3_max_reuse_distance", lo=0),
        mem("gather_16bit_weights_on_model_save", B, alias="stage3_gather_16bit_weights_on_model_save"),
        mem("module_granularity_threshold", I, alias="stage3_module_granularity_threshold"),
        mem("use_all_reduce_for_fetch_params", B, alias="stage3_use_all_reduce_for_fetch_params"),
        mem("allgather_sequential", B, alias="stage3_allgather_sequential"),
        mem(
            "stage3_gather_fp16_weights_on_model_save",
            B,
            "",
            default=False,
            replaced_by="gather_16bit_weights_on_model_save",
        ),
        free("ignore_unused_parameters", B, True),
        free("legacy_stage1", B, False),
        mem("round_robin_gradients", B),
        mem("parameter_alignment", B),
        mem("zero_hpz_partition_size", I, lo=0),
        other("zero_quantized_weights", B, attr="zero_quantized_weights"),
        other("zero_quantized_nontrainable_weights", B, attr="zero_quantized_nontrainable_weights"),
        other("zero_quantized_gradients", B, attr="zero_quantized_gradients"),
        mem("memory_efficient_linear", B),
        free("pipeline_loading_checkpoint", B, False),
        free("override_module_apply", B, True),
        free("log_trace_cache_warnings", B, False),
        free("enable_sanity_checks", B, False),
        mem("save_muon_momentum_buffer_in_memory", B),
        mem("leaf_module", Kind.SECTION),
    ),
    "runtime/zero/config.py",
)

OFFLOAD_PARAM = Section(
    "zero_optimization.offload_param",
    Mode.MODEL,
    held(
        OffloadParam,
        mem("device", Kind.DEVICE),
        mem("nvme_path", S, optional=True),
        mem("buffer_count", I, lo=0),
        mem("buffer_size", I, lo=0),
        mem("max_in_cpu", I, lo=0),
        mem("pin_memory", B),
    ),
    "runtime/zero/offload_config.py",
)

OFFLOAD_OPTIMIZER = Section(
    "zero_optimization.offload_optimizer",
    Mode.MODEL,
    held(
        OffloadOptimizer,
        mem("device", Kind.DEVICE),
        mem("nvme_path", S, optional=True),
        mem("buffer_count", I, lo=0),
        mem("pin_memory", B),
        mem("pipeline_read", B),
        mem("pipeline_write", B),
        mem("fast_init", B),
        mem("ratio", F, lo=0.0, hi=1.0),
        mem("super_offload", B),
        mem("cpuadam_cores_perc", F, lo=0.0, hi=1.0),
    ),
    "runtime/zero/offload_config.py",
)

ZENFLOW = Section(
    "zero_optimization.zenflow",
    Mode.MODEL,
    held(
        ZenFlow,
        mem("topk_ratio", F, above=0.0, below=1.0),
        mem("select_strategy", S),
        mem("select_interval", Kind.INT_OR_STR),
        mem("update_interval", Kind.INT_OR_STR),
        mem("overlap_step", B),
        mem("offload", B),
        mem("auto_ratio", F, lo=0.0, hi=1.0),
        mem("full_warm_up_rounds", I),
        mem("pt_reserved_cores_perc", F, lo=0.0, hi=1.0),
        free("steps_per_epoch", I, optional=True, note="set by DeepSpeed itself"),
    ),
    "runtime/zenflow/zenflow_config.py",
)

LEAF_MODULE = Section(
    "zero_optimization.leaf_module",
    Mode.MODEL,
    held(
        LeafModule,
        mem("classes", Kind.STRINGS),
        mem("names", Kind.STRINGS),
        mem("name_suffixes", Kind.STRINGS),
    ),
    "runtime/zero/leaf_module_config.py",
)

FP16 = Section(
    "fp16",
    Mode.MODEL,
    held(
        ZeroConfig,
        mem("enabled", B, "", default=False),
        free("auto_cast", B, False),
        free("loss_scale", Kind.LOSS_SCALE, 0),
        free("initial_scale_power", I, 16),
        free("loss_scale_window", Kind.SCALE_INT, 1000),
        free("hysteresis", I, 2),
        free("consecutive_hysteresis", B, False),
        free("min_loss_scale", Kind.SCALE_INT, 1),
        mem("fp16_master_weights_and_grads", B),
    ),
    "runtime/precision_config.py",
)

BF16 = Section(
    "bf16",
    Mode.MODEL,
    held(
        ZeroConfig,
        mem("enabled", B, "", default=False),
        mem("immediate_grad_update", B),
        mem("check_grad_overflow", B),
        mem("bf16_master_weights_and_grads", B),
        mem("bf16_optimizer_states", B),
    ),
    "runtime/precision_config.py",
)

ACTIVATION_CHECKPOINTING = Section(
    "activation_checkpointing",
    Mode.PLAIN,
    held(
        ActivationCheckpointing,
        mem("partition_activations", B),
        mem("cpu_checkpointing", B),
        mem("contiguous_memory_optimization", B),
        mem("number_checkpoints", I, optional=True, lo=1),
        mem("synchronize_checkpoint_boundary", B),
        mem("profile", B),
    ),
    "runtime/activation_checkpointing/config.py",
)

AIO = Section(
    "aio",
    Mode.PLAIN,
    held(
        Aio,
        mem("block_size", I, lo=1),
        mem("queue_depth", I, lo=1),
        mem("intra_op_parallelism", I, lo=1),
        mem("single_submit", B),
        mem("overlap_events", B),
        mem("use_gds", B),
    ),
    "runtime/swap_tensor/aio_config.py",
)

DATA_TYPES = Section(
    "data_types",
    Mode.PLAIN,
    held(
        ZeroConfig,
        mem("grad_accum_dtype", Kind.DTYPE, optional=True),
        mem("param_dtype", Kind.DTYPE, "", optional=True),
        other("buffer_dtype", Kind.DTYPE, optional=True),
        other("keep_in_fp32_modules", Kind.ANY, "auto"),
    ),
    "runtime/constants.py",
)

TORCH_AUTOCAST = Section(
    "torch_autocast",
    Mode.PLAIN,
    held(
        ZeroConfig,
        mem("enabled", B, "", default=False),
        mem("dtype", Kind.DTYPE, "", optional=True),
        other("lower_precision_safe_modules", Kind.STRINGS, optional=True),
    ),
    "runtime/config.py",
)

OPTIMIZER = Section(
    "optimizer",
    Mode.PLAIN,
    held(
        ZeroConfig,
        mem("type", S, "", optional=True),
        mem("params", Kind.SECTION, "", optional=True),
        free("legacy_fusion", B, False),
    ),
    "runtime/config.py",
)

SCHEDULER = Section(
    "scheduler",
    Mode.PLAIN,
    held(ZeroConfig, free("type", S, optional=True), free("params", Kind.SECTION, optional=True)),
    "runtime/config.py",
)
