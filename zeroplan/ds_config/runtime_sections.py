"""Sections of a ds_config that the included runtime reads: a curriculum by sequence length, and ``quantize_training``.

A curriculum has two of DeepSpeed's spellings. The legacy section is ``curriculum_learning``. Later ones are
``data_efficiency.data_sampling.curriculum_learning``, with a schedule for each of its ``curriculum_metrics``: ``seqlen`` or
``seqlen_truncate`` with ``single_cluster`` cuts samples and needs no index of them (DeepSpeed 0.19.8,
``runtime/data_pipeline``). What else that section can ask for is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroplan.core.curriculum import CURRICULUM_LEARNING as LEGACY
from zeroplan.core.curriculum import Curriculum
from zeroplan.core.errors import BadInput
from zeroplan.core.quantize_training import QUANTIZE_TRAINING as NAME
from zeroplan.core.quantize_training import QuantizeTraining
from zeroplan.ds_config.findings import Severity
from zeroplan.ds_config.reading import Reading

DATA_EFFICIENCY = "data_efficiency"
_SAMPLING = f"{DATA_EFFICIENCY}.data_sampling"
_METRICS = f"{_SAMPLING}.curriculum_learning.curriculum_metrics"
#: Names of metrics that are sequence lengths; the second is that of Megatron-DeepSpeed's scripts.
_LENGTHS = ("seqlen", "seqlen_truncate")
_SCHEDULE = ("min_difficulty", "max_difficulty", "schedule_type")
_SCHEDULE_CONFIG = ("total_curriculum_step", "difficulty_step", "root_degree", "difficulty", "max_step")
#: Keys that arrange DeepSpeed's own sampling and change nothing here.
_WITHOUT_EFFECT = {
    DATA_EFFICIENCY: ("seed",),
    _SAMPLING: ("num_epochs", "num_workers", "pin_memory"),
    f"{_SAMPLING}.curriculum_learning": ("data_cluster_path",),
}


def read_curriculum(reading: Reading) -> Curriculum | None:
    """Return the curriculum that the runtime is asked for; None for none, and for an impossible one: an error."""
    if not reading.for_runtime:
        return None
    try:
        legacy, later = _legacy(reading.values), _later(reading)
        if legacy is not None and later is not None:
            raise BadInput(f"there is one in {DATA_EFFICIENCY} too", where=LEGACY, remedy="remove one of the two")
    except BadInput as fault:
        reading.add("curriculum.impossible", Severity.ERROR, fault.where, fault.what, fault.remedy)
        return None
    return legacy or later


def _legacy(values: Mapping[str, Any]) -> Curriculum | None:
    if not values.get(f"{LEGACY}.enabled"):
        return None
    kind = values.get(f"{LEGACY}.curriculum_type")
    if kind != "seqlen":
        raise BadInput(f"{kind!r} is no curriculum", where=f"{LEGACY}.curriculum_type", remedy='write "seqlen"')
    given = {name: values[f"{LEGACY}.{name}"] for name in _SCHEDULE if f"{LEGACY}.{name}" in values}
    path = f"{LEGACY}.schedule_config"
    given |= {name: values[f"{path}.{name}"] for name in _SCHEDULE_CONFIG if f"{path}.{name}" in values}
    return _made(given, LEGACY)


def _later(reading: Reading) -> Curriculum | None:
    prefix = f"{DATA_EFFICIENCY}."
    top = {path.removeprefix(prefix): value for path, value in reading.values.items() if path.startswith(prefix)}
    if DATA_EFFICIENCY not in reading.values:
        return None
    if not _enabled(top, DATA_EFFICIENCY):
        reading.ignored.append(DATA_EFFICIENCY)
        return None
    _known(reading, top, DATA_EFFICIENCY, "enabled", "data_sampling", "data_routing")
    if _enabled(top.get("data_routing", {}), f"{prefix}data_routing"):
        raise BadInput("random layerwise token dropping is not supported", where=f"{prefix}data_routing", remedy="remove it")
    sampling = top.get("data_sampling", {})
    if not _enabled(sampling, _SAMPLING):
        return None
    _known(reading, sampling, _SAMPLING, "enabled", LEGACY)
    learning = sampling.get(LEGACY, {})
    if not _enabled(learning, f"{_SAMPLING}.{LEGACY}"):
        return None
    _known(reading, learning, f"{_SAMPLING}.{LEGACY}", "enabled", "curriculum_metrics")
    metrics = learning.get("curriculum_metrics")
    if not isinstance(metrics, Mapping) or len(metrics) != 1:
        raise BadInput("is not one metric", where=_METRICS, remedy="write seqlen with its schedule")
    name, metric = next(iter(metrics.items()))
    where = f"{_METRICS}.{name}"
    if name not in _LENGTHS:
        raise BadInput("samples are not chosen by a metric", where=where, remedy=f"use {' or '.join(_LENGTHS)}")
    return _metric(reading, metric, where)


def _metric(reading: Reading, metric: object, where: str) -> Curriculum:
    if not isinstance(metric, Mapping):
        raise BadInput("is not an object", where=where, remedy="write its schedule")
    _known(reading, metric, where, *_SCHEDULE, "schedule_config", "difficulty_type", "clustering_type")
    for key, only in (("difficulty_type", "value"), ("clustering_type", "single_cluster")):
        if metric.get(key, only) != only:
            what = f"{metric[key]!r} chooses samples by an index, which is not supported"
            raise BadInput(what, where=f"{where}.{key}", remedy=f'write "{only}"')
    config = metric.get("schedule_config", {})
    if not isinstance(config, Mapping):
        raise BadInput("is not an object", where=f"{where}.schedule_config", remedy="write its keys")
    _known(reading, config, f"{where}.schedule_config", *_SCHEDULE_CONFIG)
    return _made({name: metric[name] for name in _SCHEDULE if name in metric} | dict(config), where)


def _enabled(section: object, where: str) -> bool:
    """Whether a section is switched on; DeepSpeed takes one without the key for switched off."""
    if not isinstance(section, Mapping):
        raise BadInput("is not an object", where=where, remedy="write its keys")
    value = section.get("enabled", False)
    if not isinstance(value, bool):
        raise BadInput(f"{value!r} is not true or false", where=f"{where}.enabled", remedy="write true or false")
    return value


def _known(reading: Reading, section: Mapping[str, Any], where: str, *names: str) -> None:
    ignored = _WITHOUT_EFFECT.get(where, ())
    for name in section:
        if name in ignored:
            reading.ignored.append(f"{where}.{name}")
        elif name not in names:
            raise BadInput(f"key {name!r} is not supported", where=where, remedy="remove it")


def _made(given: Mapping[str, Any], where: str) -> Curriculum:
    """The curriculum of these keys. Raises BadInput: a key that is missing or impossible."""
    for name in _SCHEDULE:
        if name not in given:
            raise BadInput("is not there, and has no default", where=f"{where}.{name}", remedy="write it")
    for name in ("difficulty", "max_step"):
        if name in given and not isinstance(given[name], list):
            raise BadInput("is not a list", where=f"{where}.schedule_config.{name}", remedy="write [8, 16]")
    try:
        made: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
        return Curriculum(**made)
    except BadInput as fault:
        raise BadInput(fault.what, where=f"{where}.{fault.where}", remedy=fault.remedy) from None


_KEYS = (
    "quantize_groups",
    "quantize_bits.start_bits",
    "quantize_bits.target_bits",
    "quantize_schedule.quantize_period",
    "quantize_schedule.schedule_offset",
    "quantize_algo.q_type",
    "quantize_algo.rounding",
)


def read_quantize_training(reading: Reading) -> QuantizeTraining | None:
    """Return what the runtime is asked for; None for nothing, and for something impossible: an error."""
    values = {path.removeprefix(f"{NAME}."): value for path, value in reading.values.items() if path.startswith(f"{NAME}.")}
    if not (reading.for_runtime and values.get("enabled")):
        return None
    given: dict[str, Any] = {key.rpartition(".")[2]: values[key] for key in _KEYS if key in values}
    try:
        if values.get("eigenvalue.enabled"):
            what = "periods by the eigenvalues of layers are not supported"
            raise BadInput(what, where="eigenvalue", remedy="remove it")
        kind = values.get("quantize_type")  # as the tutorial has it
        if kind is not None and given.setdefault("q_type", kind) != kind:
            raise BadInput(f"{kind!r} is not quantize_algo.q_type", where="quantize_type", remedy="remove one of the two")
        if values.get("fp16_mixed_quantize.enabled"):
            given["quantize_change_ratio"] = values.get("fp16_mixed_quantize.quantize_change_ratio", 0.001)
        return QuantizeTraining(**given)
    except BadInput as fault:
        reading.add(f"{NAME}.impossible", Severity.ERROR, f"{NAME}.{fault.where}", fault.what, fault.remedy)
        return None
