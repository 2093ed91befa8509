"""Reading a ds_config: :func:`inspect_ds_config` finds everything, :func:`read_ds_config` refuses what DeepSpeed refuses."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from zeroplan.core.curriculum import Curriculum
from zeroplan.core.errors import BadInput
from zeroplan.core.float8 import Float8Recipe
from zeroplan.core.layer_drop import LAYER_DROP, ProgressiveLayerDrop
from zeroplan.core.one_bit import local_steps
from zeroplan.core.optimizers import optimizer_of_type
from zeroplan.core.quantize_training import QuantizeTraining
from zeroplan.core.sparse_attention import SparseAttention
from zeroplan.core.unmodelled import Unmodelled
from zeroplan.core.versions import parse_version
from zeroplan.core.workload import DType, Workload
from zeroplan.core.zero_config import (
    DEEPSPEED_VERSION,
    NEWEST_DEEPSPEED,
    ZERO_DEFAULTS,
    ActivationCheckpointing,
    Aio,
    LeafModule,
    OffloadDevice,
    OffloadOptimizer,
    OffloadParam,
    ZenFlow,
    ZeroConfig,
)
from zeroplan.ds_config.batch import Batch, resolve_batch
from zeroplan.ds_config.dialect import Dialect
from zeroplan.ds_config.findings import At, Finding, Severity
from zeroplan.ds_config.optimizer_params import check_optimizer_params
from zeroplan.ds_config.reading import KeyReport, Reading
from zeroplan.ds_config.rules import View
from zeroplan.ds_config.rules_autoep import AUTOEP_REFUSALS
from zeroplan.ds_config.rules_config import CONFIG_REFUSALS
from zeroplan.ds_config.rules_engine import ENGINE_REFUSALS
from zeroplan.ds_config.rules_notes import REMARKS
from zeroplan.ds_config.rules_runtime import RUNTIME_REFUSALS
from zeroplan.ds_config.runtime_options import RuntimeOptions
from zeroplan.ds_config.runtime_sections import read_curriculum, read_quantize_training
from zeroplan.ds_config.schema import MemoryEffect
from zeroplan.ds_config.sections import SECTIONS
from zeroplan.ds_config.source import load_source
from zeroplan.ds_config.training import TrainingSettings
from zeroplan.ds_config.unmodelled import unmodelled_keys
from zeroplan.ds_config.versions import older_defaults
from zeroplan.ds_config.walk import walk
from zeroplan.ds_config.wrappers import Wrapper, wrapper

#: The id of a finding about a key that zeroplan knows and does not model.
UNMODELLED = "key.unmodelled"
_Held = TypeVar("_Held")
_ORDER = {Severity.ERROR: 0, Severity.OPEN: 1, Severity.WARNING: 2, Severity.NOTE: 3}


@dataclass(frozen=True, slots=True)
class DsConfig:
    """A ds_config as DeepSpeed 0.19.8 or zeroplan's runtime takes it.

    Attributes:
        dialect: whose reading it is.
        zero, training, runtime_options: what the file fixes, with defaults for the rest.
        raw: the file's object, untouched.
        source: its name, for messages.
        keys: what is known of each of its keys.
        findings: what is wrong or worth knowing, the worst first.
        unresolved_auto: canonical paths that were left at ``auto``.
        ignored: paths of keys that the runtime knows and that change nothing there.
        values: coerced values by canonical path.
        sparse_attention: the section of that name, where the runtime reads it; None without one.
        curriculum: of sequence lengths, where the runtime reads one; None without.
        layer_drop: progressive layer dropping, where the runtime reads it; None without.
        quantize_training: the section of that name, likewise.
    """

    zero: ZeroConfig
    training: TrainingSettings
    raw: dict[str, Any]
    source: str
    dialect: Dialect = Dialect.DEEPSPEED
    keys: tuple[KeyReport, ...] = ()
    findings: tuple[Finding, ...] = ()
    unresolved_auto: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    runtime_options: RuntimeOptions = field(default_factory=RuntimeOptions)
    sparse_attention: SparseAttention | None = None
    curriculum: Curriculum | None = None
    layer_drop: ProgressiveLayerDrop | None = None
    quantize_training: QuantizeTraining | None = None

    def of_severity(self, *severities: Severity) -> list[Finding]:
        """Return the findings of these severities."""
        return [finding for finding in self.findings if finding.severity in severities]

    @property
    def errors(self) -> list[Finding]:
        """Findings that the program refuses, whoever fills what is open."""
        return self.of_severity(Severity.ERROR)

    @property
    def warnings(self) -> list[Finding]:
        """Findings on settings that run otherwise than the file says, or only when something else fills them."""
        return self.of_severity(Severity.OPEN, Severity.WARNING)

    @property
    def unmodelled(self) -> tuple[Unmodelled, ...]:
        """Keys that plans leave out, without those of :attr:`zero`, of which the engine tells."""
        paths = [finding.where for finding in self.findings if finding.id == UNMODELLED]
        held = {f"zero_optimization.{name}" for name in ZERO_DEFAULTS}
        return unmodelled_keys([path for path in paths if path not in held], self.values, self.raw)

    @property
    def runs_alone(self) -> bool:
        """Whether the program takes the file as it is."""
        return not self.of_severity(Severity.ERROR, Severity.OPEN)

    @property
    def runs_filled(self) -> bool:
        """Whether the program takes it once the HF Trainer, Lightning or flags have filled what is open."""
        return not self.errors

    def refusal(self, faults: Sequence[Finding]) -> BadInput:
        """Return the error to raise for these findings: the first of them, and how many more there are."""
        more = f" ({len(faults) - 1} more: zeroplan check)" if len(faults) > 1 else ""
        where = f"{self.source}: {faults[0].where}" if faults[0].where else self.source
        return BadInput(faults[0].what, where=where, remedy=faults[0].remedy + more)

    @property
    def wrapper(self) -> Wrapper | None:
        """The optimizer wrapper that DeepSpeed builds on GPUs, None where it refuses the config or does not read it."""
        if self.errors or self.dialect is not Dialect.DEEPSPEED:
            return None
        fused_adam = self.training.builds_adam and not self.zero.offload_optimizer
        return wrapper(self.zero, self.training.dtype or DType.FP32, fused=fused_adam)

    def workload(self, base: Workload, *, given: frozenset[str] = frozenset()) -> Workload:
        """Return `base` with what the file fixes; see :meth:`zeroplan.ds_config.training.TrainingSettings.workload`.

        Raises:
            BadInput: a field named in `given` that the file contradicts.
        """
        pure = self.zero.step.bf16_master_weights_and_grads and self.zero.step.bf16_optimizer_states
        found = self.training.workload(base, pure=pure, given=given)
        longest = self.curriculum.longest if self.curriculum is not None else None
        if longest is not None and found.batch.seq_len is not None:
            found = found.but(seq_len=min(found.batch.seq_len, longest))
        recipe = self.runtime_options.float8_recipe
        in_bf16 = self.runtime_options.bf16_layers
        techniques = (self.sparse_attention, self.curriculum, self.layer_drop, self.quantize_training, recipe, in_bf16)
        if recipe is not None and found.technique(Float8Recipe) not in (None, recipe):
            what = f"{self.source} says {recipe}, the flag {found.technique(Float8Recipe)}"
            raise BadInput(what, where="--fp8", remedy="give one of them")
        row = optimizer_of_type(self.training.optimizer or "")
        local = local_steps(self.training.optimizer_params) if row is not None and row.compresses else 0
        return found.but(local_steps=local).with_techniques(*(one for one in techniques if one is not None))


def inspect_ds_config(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    dialect: Dialect = Dialect.DEEPSPEED,
    fill: Mapping[str, Any] | None = None,
    world_size: int | None = None,
    hidden_size: int | None = None,
    engine_version: str = DEEPSPEED_VERSION,
) -> DsConfig:
    """Read a ds_config and note everything that there is to say of it, errors included.

    Args:
        source: a path, a base64 string (as DeepSpeed takes one), or the object.
        dialect: the program whose reading is asked for.
        fill: values for what the file leaves open or at ``auto``, by dotted path (``{"bf16.enabled": True}``); see
            :func:`fill_from`. One that contradicts the file is an error.
        world_size: data-parallel ranks, for the batch arithmetic; None leaves them open.
        hidden_size: of the model, for the buckets that the HF Trainer derives from it.
        engine_version: of the DeepSpeed that reads the file: its keys, and its defaults where the file is silent. The other
            rules are those of 0.19.8 throughout.

    Raises:
        BadInput: when the source cannot be read as an object at all.
    """
    raw, name, strict = load_source(source)
    version = NEWEST_DEEPSPEED if dialect is Dialect.RUNTIME else parse_version(engine_version)
    reading = walk(raw, dialect, fill or {}, hidden_size, version)
    if not (strict or reading.for_runtime):
        what = "holds comments or trailing commas: DeepSpeed reads them (Hjson), the HF Trainer does not"
        reading.add("json.relaxed", Severity.WARNING, "", what, "write plain JSON", "runtime/config.py")
    if "bf16" in raw and raw["bf16"] is not None and "bfloat16" in raw:
        what = "ignored, because bf16 is there"
        reading.add("key.shadowed", Severity.WARNING, "bfloat16", what, "remove it", "runtime/precision_config.py")
    _deprecated_pairs(raw, reading)
    _checkpoint(raw, reading)
    micro, accum, train = _batch(reading, world_size)
    zero = _zero(older_defaults(version) | reading.values)
    zero = replace(zero, deepspeed=version, filled_later=tuple(reading.filled_later))
    training = _training(reading, micro, accum, train)
    runtime_options = RuntimeOptions(**_attrs(reading.values, "zeroplan"))
    sparse, curriculum, layer_drop = _sparse_attention(reading), read_curriculum(reading), _layer_drop(reading)
    quantize_training = read_quantize_training(reading)
    check_optimizer_params(reading, training, on_host=bool(zero.offload_optimizer))
    if reading.for_runtime:
        _impossible(reading, zero)
    reading.findings += run_rules(View(zero, training, reading.values, tuple(reading.autos), runtime_options), dialect)
    _unmodelled(reading)
    return DsConfig(
        zero=zero,
        training=training,
        raw=raw,
        source=name,
        dialect=dialect,
        keys=tuple(reading.keys),
        findings=tuple(sorted(reading.findings, key=lambda finding: _ORDER[finding.severity])),
        unresolved_auto=tuple(reading.autos),
        ignored=(*reading.ignored, *_without_files(reading, zero)),
        values=reading.values,
        runtime_options=runtime_options,
        sparse_attention=sparse,
        curriculum=curriculum,
        layer_drop=layer_drop,
        quantize_training=quantize_training,
    )


def read_ds_config(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    dialect: Dialect = Dialect.DEEPSPEED,
    fill: Mapping[str, Any] | None = None,
    world_size: int | None = None,
    hidden_size: int | None = None,
    engine_version: str = DEEPSPEED_VERSION,
) -> DsConfig:
    """Read a ds_config and refuse what the dialect's program refuses; arguments as for :func:`inspect_ds_config`.

    Raises:
        BadInput: the first thing that the program refuses, and how many more there are.
    """
    config = inspect_ds_config(
        source, dialect=dialect, fill=fill, world_size=world_size, hidden_size=hidden_size, engine_version=engine_version
    )
    if config.errors:
        raise config.refusal(config.errors)
    return config


def fill_from(*, dtype: DType | None = None, micro_batch: int | None = None, grad_accum: int | None = None) -> dict[str, Any]:
    """Return what flags say as `fill` takes it: the values that the HF Trainer would put in place of ``auto``."""
    filled: dict[str, Any] = {}
    if dtype is not None:
        filled |= {"bf16.enabled": dtype is DType.BF16, "fp16.enabled": dtype is DType.FP16}
    if micro_batch is not None:
        filled["train_micro_batch_size_per_gpu"] = micro_batch
    if grad_accum is not None:
        filled["gradient_accumulation_steps"] = grad_accum
    return filled


def _batch(reading: Reading, world_size: int | None) -> Batch:
    sequence = reading.values.get("sequence_parallel_size")
    if world_size is not None and isinstance(sequence, int) and sequence > 1 and world_size % sequence == 0:
        world_size //= sequence
    return resolve_batch(reading, world_size)


def _attrs(values: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the values of one section's keys as fields of its class."""
    found = {}
    for key in SECTIONS[path].keys.values():
        where = f"{path}.{key.name}" if path else key.name
        if key.attr and where in values and key.name not in _NESTED:
            found[key.attr] = values[where]
    return found


_NESTED = ("offload_optimizer", "offload_param", "zenflow", "leaf_module")


def _zero(values: Mapping[str, Any]) -> ZeroConfig:
    """Return the typed config: every section's values over the defaults."""
    zero = "zero_optimization"
    settings: dict[str, Any] = {}
    for path in ("", zero, "fp16", "bf16", "data_types"):
        settings |= _attrs(values, path)
    for name in [name for name, value in settings.items() if value is None and name not in _NULLABLE]:
        del settings[name]
    optimizer = _attrs(values, f"{zero}.offload_optimizer")
    param = _attrs(values, f"{zero}.offload_param")
    for block in (optimizer, param):
        if "device" in block:
            block["device"] = OffloadDevice(block["device"])
    if values.get(f"{zero}.cpu_offload"):
        optimizer = {"device": OffloadDevice.CPU}
    if values.get(f"{zero}.cpu_offload_param"):
        param = {"device": OffloadDevice.CPU}
    if values.get(f"{zero}.stage3_gather_fp16_weights_on_model_save"):
        settings["gather_16bit_weights_on_model_save"] = True
    params = values.get("optimizer.params.fp32_optimizer_states")
    if isinstance(params, bool):
        settings["fp32_optimizer_states"] = params
    if settings.get("bf16_optimizer_states"):
        settings["fp32_optimizer_states"] = False  # get_optimizer_configuration of runtime/engine.py overrides it
    if values.get(f"{zero}.zenflow"):
        settings["zenflow"] = ZenFlow(**_attrs(values, f"{zero}.zenflow"))
    return ZeroConfig().but(
        offload_optimizer=OffloadOptimizer(**optimizer),
        offload_param=OffloadParam(**param),
        leaf_module=LeafModule(**_attrs(values, f"{zero}.leaf_module")),
        activation_checkpointing=ActivationCheckpointing(**_attrs(values, "activation_checkpointing")),
        aio=Aio(**_attrs(values, "aio")),
        **settings,
    )


_NULLABLE = {name for name, default in ZERO_DEFAULTS.items() if default is None} | {"seq_parallel_communication_data_type"}


def _sparse_attention(reading: Reading) -> SparseAttention | None:
    """Return the section as the runtime takes it; None without one."""
    if not (reading.for_runtime and "sparse_attention" in reading.values):
        return None
    return _held(reading, "sparse_attention", SparseAttention)


def _layer_drop(reading: Reading) -> ProgressiveLayerDrop | None:
    """Return the section as the runtime takes it; None without one, or where it is not enabled."""
    if not (reading.for_runtime and reading.values.get(f"{LAYER_DROP}.enabled")):
        return None
    return _held(reading, LAYER_DROP, ProgressiveLayerDrop)


def _held(reading: Reading, name: str, kind: type[_Held]) -> _Held | None:
    """Return the section `name` in its class; None where it is impossible, which becomes an error."""
    given = _attrs(reading.values, name)
    given |= {key: tuple(value) for key, value in given.items() if isinstance(value, list)}
    try:
        return kind(**given)
    except BadInput as fault:
        reading.add(f"{name}.impossible", Severity.ERROR, f"{name}.{fault.where}", fault.what, fault.remedy)
        return None


def _training(reading: Reading, micro: int | None, accum: int | None, train: int | None) -> TrainingSettings:
    values = reading.values
    open_dtype = not reading.for_runtime and any(path in reading.autos for path in ("bf16.enabled", "fp16.enabled"))
    dtype: DType | None = None if open_dtype else DType.FP32
    if values.get("bf16.enabled"):
        dtype = DType.BF16
    elif values.get("fp16.enabled"):
        dtype = DType.FP16
    autocast: DType | None = None
    if values.get("torch_autocast.enabled"):
        autocast = values.get("torch_autocast.dtype") or DType.FP16  # torch.autocast's own default on CUDA
        dtype = dtype or DType.FP32
    prefix = "optimizer.params."
    params = {path.removeprefix(prefix): value for path, value in values.items() if path.startswith(prefix)}
    kind = values.get("optimizer.type")
    scheduler = values.get("scheduler.type")
    return TrainingSettings(
        micro_batch=micro,
        grad_accum=accum,
        train_batch=train,
        dtype=dtype,
        autocast=autocast,
        optimizer=kind or None,
        optimizer_params=params,
        scheduler=scheduler or None,
    )


def _deprecated_pairs(raw: Mapping[str, Any], reading: Reading) -> None:
    """A deprecated key beside the one that replaced it is an error, whatever their values (config_utils.py)."""
    block = raw.get("zero_optimization")
    if not isinstance(block, Mapping):
        return
    pairs = {
        "cpu_offload": ("offload_optimizer",),
        "cpu_offload_param": ("offload_param",),
        "stage3_gather_fp16_weights_on_model_save": (
            "gather_16bit_weights_on_model_save",
            "stage3_gather_16bit_weights_on_model_save",
        ),
    }
    for old, news in pairs.items():
        for new in news:
            if block.get(old, "auto") != "auto" and block.get(new, "auto") != "auto":
                what = f"cannot stand beside {new}, which replaces it"
                where = f"zero_optimization.{old}"
                reading.add("key.replaced", Severity.ERROR, where, what, "remove it", "runtime/config_utils.py")


def _checkpoint(raw: Mapping[str, Any], reading: Reading) -> None:
    mode = reading.values.get("checkpoint.tag_validation", "WARN")
    if isinstance(mode, str) and mode.upper() not in ("WARN", "IGNORE", "FAIL"):
        what = f"{mode[:40]!r} is no validation mode"
        remedy = "write Warn, Ignore or Fail"
        reading.add("checkpoint.tag", Severity.ERROR, "checkpoint.tag_validation", what, remedy, "runtime/config.py")


def _impossible(reading: Reading, zero: ZeroConfig) -> None:
    """Add an error for a combination that DeepSpeed runs otherwise than it says, and that the runtime refuses."""
    try:
        zero.require_possible()
    except BadInput as fault:
        reading.add("zero.impossible", Severity.ERROR, f"zero_optimization.{fault.where}", fault.what, fault.remedy)


#: Keys of ``offload_param`` that matter for parameters in files only.
_FOR_FILES = ("buffer_count", "buffer_size", "max_in_cpu")


def _without_files(reading: Reading, zero: ZeroConfig) -> list[str]:
    """Keys of the runtime that act on parameters in files, where there are none."""
    if not reading.for_runtime or zero.offload_param.device is OffloadDevice.NVME:
        return []
    return [path for name in _FOR_FILES if (path := f"zero_optimization.offload_param.{name}") in reading.values]


_OF_ALL = "changes memory in a way that is not modelled: plans leave it out"
#: Keys that divide a model or its samples among ranks, and where that is planned.
_LAYOUTS = ("tensor_parallel", "sequence_parallel_size", "data_parallel_size", "expert_parallel")
_OF_LAYOUTS = "ranks share a model or its samples: estimate and explain plan it, a search counts data parallelism alone"


def _unmodelled(reading: Reading) -> None:
    """One warning for each key that zeroplan knows and does not model, so that no plan is silently wrong."""
    if reading.for_runtime:
        return  # it refuses them
    moved = [key.path for key in reading.keys if key.effect is MemoryEffect.UNMODELLED and key.value not in (None, False)]
    modelled = {key.path.partition(".")[0] for key in reading.keys if key.effect is MemoryEffect.MEMORY}
    named = (path if (top := path.partition(".")[0]) in modelled else top for path in moved)
    for where in dict.fromkeys(named):
        what = _OF_ALL if where not in _LAYOUTS else _OF_LAYOUTS
        reading.add(UNMODELLED, Severity.WARNING, where, what, "", "", At.ENGINE)


RULES = (*CONFIG_REFUSALS, *ENGINE_REFUSALS, *AUTOEP_REFUSALS, *REMARKS, *RUNTIME_REFUSALS)


def run_rules(view: View, dialect: Dialect) -> Iterator[Finding]:
    """Return the findings of every rule that holds of the dialect's program and applies to the config."""
    for rule in RULES:
        if dialect in rule.dialects and rule.applies(view):
            yield rule.finding(view)
