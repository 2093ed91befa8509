"""The walk over a ds_config, key by key, against the schema.

Values are coerced as DeepSpeed would coerce them, and everything else is found out. For zeroplan's runtime the same walk
refuses the keys that the runtime does not know, and lists those that it ignores; see :class:`.schema.Key`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import islice
from typing import Any

from zeroplan.core.errors import did_you_mean
from zeroplan.core.versions import Version, version_text
from zeroplan.core.zero_config import NEWEST_DEEPSPEED
from zeroplan.ds_config.coercion import COERCE, ValueKind, exactly
from zeroplan.ds_config.dialect import Dialect, Support
from zeroplan.ds_config.findings import At, Severity
from zeroplan.ds_config.reading import MOST_UNKNOWN, KeyReport, Reading, show
from zeroplan.ds_config.schema import Key, MemoryEffect, Mode, Section
from zeroplan.ds_config.sections import HF_FILLS, REMOVED, SECTIONS, effects
from zeroplan.ds_config.versions import STRICT_PRECISION, came_later, still_known

AUTO = "auto"
_REMOVE = "remove it"

#: Spellings that people use at the top level, and what they mean.
_TOP_LEVEL_SLIPS = {
    "zero": "zero_optimization",
    "zero_config": "zero_optimization",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
}
#: Keys for which ``auto`` is a value.
_AUTO_IS_A_VALUE = frozenset({"select_strategy", "keep_in_fp32_modules"})
_OPEN_PARAMS = ("optimizer.params", "scheduler.params")
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_COMM_DTYPES = ("fp32", "fp16", "bf16")


def walk(
    raw: Mapping[str, Any],
    dialect: Dialect,
    fill: Mapping[str, Any],
    hidden_size: int | None,
    version: Version = NEWEST_DEEPSPEED,
) -> Reading:
    """Read every key of `raw`. `fill` maps dotted paths to values for what the file leaves open."""
    reading = Reading(dialect, fill=_canonical(fill), hidden_size=hidden_size, version=version)
    _walk_section(reading, SECTIONS[""], raw)
    for path, value in reading.fill.items():
        reading.values.setdefault(path, value)
    return reading


def _canonical(fill: Mapping[str, Any]) -> dict[str, Any]:
    filled = {}
    for path, value in fill.items():
        parent, _, name = path.rpartition(".")
        section = SECTIONS.get(parent)
        key = section.find(name) if section else None
        filled[_join(parent, key.name) if key else path] = value
    return filled


def _join(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name


def _walk_section(reading: Reading, section: Section, data: Mapping[str, Any]) -> None:
    seen: dict[str, str] = {}
    unknown = 0
    for name, value in data.items():
        where = _join(section.path, name)
        key = section.find(name)
        if section.mode is Mode.OPEN:
            _open_key(reading, section, where, value)
        elif where in REMOVED and not reading.for_runtime and still_known(where, reading.version):
            _key_of_old(reading, where, value)
        elif where in REMOVED and reading.for_runtime and isinstance(value, Mapping) and value.get("enabled") is False:
            reading.keys.append(KeyReport(where, MemoryEffect.REMOVED, value))
            reading.ignored.append(where)
        elif where in REMOVED and "." not in name and not (reading.for_runtime and key is not None):
            reading.keys.append(KeyReport(where, MemoryEffect.REMOVED, value))
            what = "was removed from DeepSpeed, which refuses the key"
            reading.add("key.removed", Severity.ERROR, where, what, f"{_REMOVE}: {REMOVED[where]}", "runtime/config.py")
        elif key is None:
            unknown += 1
            _unknown_key(reading, section, where, name, value, listed=unknown <= MOST_UNKNOWN)
        elif key.name in seen:
            what = f"is the same key as {seen[key.name]!r}, and only one of the two may stand"
            reading.keys.append(KeyReport(where, key.effect, value))
            reading.add("key.twice", Severity.ERROR, where, what, _REMOVE, section.source)
        else:
            seen[key.name] = name
            _known_key(reading, section, key, where, value)
    if unknown > MOST_UNKNOWN:
        what = f"{unknown - MOST_UNKNOWN:,} more unknown keys"
        refused = reading.for_runtime or section.mode is Mode.MODEL
        severity = Severity.ERROR if refused else Severity.WARNING
        reading.add("key.unknown", severity, section.path, what, "is this a ds_config?", section.source)


def _key_of_old(reading: Reading, where: str, value: Any) -> None:
    """Note a key that 0.19.8 has taken out and the version at hand still reads: switched on, it is not modelled."""
    switched_off = value in (None, False, -1) or (isinstance(value, Mapping) and value.get("enabled") is False)
    effect = MemoryEffect.NONE if switched_off else MemoryEffect.UNMODELLED
    reading.keys.append(KeyReport(where, effect, value, f"DeepSpeed {version_text(reading.version)} still knows it"))


def _key_of_newer(reading: Reading, section: Section, where: str, value: Any, since: Version) -> None:
    """Note a key that came after the version at hand, which refuses it or, in a plain section, ignores it."""
    reading.keys.append(KeyReport(where, MemoryEffect.NONE, value, f"since DeepSpeed {version_text(since)}"))
    if value == AUTO and section.mode is Mode.MODEL:
        return  # DeepSpeed drops these before it looks at the names
    plain = section.path in ("fp16", "bf16", "bfloat16") and reading.version < STRICT_PRECISION
    refused = section.mode is Mode.MODEL and not plain
    verb = "refuses it" if refused else "ignores it"
    what = f"DeepSpeed {version_text(reading.version)} does not know this key and {verb}: it came with {version_text(since)}"
    severity = Severity.ERROR if refused else Severity.WARNING
    reading.add("key.newer", severity, where, what, f"{_REMOVE}, or use a newer DeepSpeed", section.source)


def _open_key(reading: Reading, section: Section, where: str, value: Any) -> None:
    if value == AUTO and section.path in _OPEN_PARAMS:
        _left_open(reading, where, where, value, Mode.OPEN, None)
        return
    reading.keys.append(KeyReport(where, effects(where), value))
    reading.values[where] = value


# Keys that are unknown, or that the dialect's program does not honour


def _unknown_key(reading: Reading, section: Section, where: str, name: str, value: Any, *, listed: bool) -> None:
    """Note an unknown key. Those that are not `listed` are many, and only counted: near names take a millisecond a key."""
    slip = _TOP_LEVEL_SLIPS.get(name) if not section.path else None
    if not (listed or slip):
        reading.keys.append(KeyReport(where, MemoryEffect.UNKNOWN, value))
        return
    near = f"did you mean {slip!r}?" if slip else did_you_mean(name, section.names(reading.dialect))
    reading.keys.append(KeyReport(where, MemoryEffect.UNKNOWN, value, near))
    if reading.for_runtime:
        _unsupported(reading, section, name, near or _REMOVE)
        return
    if section.mode is not Mode.PLAIN:
        reader = "zeroplan's runtime" if section.mode is Mode.EXACT else "DeepSpeed"
        what = f"unknown key in {section.path}, which {reader} rejects"
        severity = Severity.WARNING if section.mode is Mode.EXACT else Severity.ERROR
        reading.add("key.unknown", severity, where, what, near or _REMOVE, section.source)
        return
    what = "unknown key, which DeepSpeed ignores"
    if slip == "zero_optimization":
        what = "DeepSpeed ignores a top-level key of this name, so the run trains at stage 0"
        near = "rename it to zero_optimization (did you mean 'zero_optimization'?)"
    reading.add("key.ignored", Severity.WARNING, where, what, near, section.source)
    if slip and isinstance(value, Mapping):
        _placeholders(reading, where, value)


def _placeholders(reading: Reading, where: str, data: Mapping[str, Any]) -> None:
    """Within an ignored block, name what would be wrong once it is renamed."""
    for name, value in islice(data.items(), MOST_UNKNOWN):
        path = _join(where, name)
        if isinstance(value, Mapping):
            _placeholders(reading, path, value)
        elif isinstance(value, str) and "|" in value:
            what = f"{value!r} is a placeholder, not a device" if name == "device" else f"{value!r} is a placeholder"
            reading.add(
                "value.placeholder", Severity.WARNING, path, what, "write one of the values", "runtime/zero/offload_config.py"
            )


def _unsupported(reading: Reading, section: Section, name: str, remedy: str) -> None:
    what = f"key {name!r} is not supported"
    reading.add("key.unsupported", Severity.ERROR, section.path or "ds_config", what, remedy)


def _refused(reading: Reading, section: Section, key: Key, where: str, value: Any) -> None:
    """A key that the runtime refuses, unless its value is the one that it has anyway."""
    reading.keys.append(KeyReport(where, key.effect, value))
    if _says_nothing(section, key, value):
        reading.ignored.append(where)
        return
    remedy = f"use {key.replaced_by}" if key.replaced_by else _REMOVE
    _unsupported(reading, section, where.removeprefix(f"{section.path}."), remedy)


def _says_nothing(section: Section, key: Key, value: Any) -> bool:
    if value is None or value == AUTO:
        return True
    if key.kind is ValueKind.SECTION:
        target = SECTIONS.get(_join(section.path, key.name))
        switch = target.keys.get("enabled") if target else None
        if not isinstance(value, Mapping) or switch is None or switch.default is not False:
            return False
        return value.get("enabled", False) is False
    try:
        found = COERCE[key.kind](value)
    except ValueError:
        return False
    return bool(found == key.default) or (found is False and key.default is None)


def _ignored_by_deepspeed(reading: Reading, section: Section, key: Key, where: str, value: Any) -> None:
    """Note a top-level key that DeepSpeed ignores: one of the runtime's own, or one that an older DeepSpeed read."""
    reading.keys.append(KeyReport(where, MemoryEffect.NONE, value, key.note))
    what = "only zeroplan's runtime reads it: DeepSpeed ignores it"
    remedy = f"use {key.replaced_by}" if key.replaced_by else ""
    reading.add("key.ignored", Severity.WARNING, where, what, remedy, section.source)


# Keys that are known


def _known_key(reading: Reading, section: Section, key: Key, where: str, value: Any) -> None:
    support = key.support(reading.dialect)
    if support is Support.REFUSED:
        _refused(reading, section, key, where, value)
        return
    if support is Support.IGNORED and reading.dialect is Dialect.DEEPSPEED:
        _ignored_by_deepspeed(reading, section, key, where, value)
        return
    canonical = _join("bf16" if section.path == "bfloat16" else section.path, key.name)
    since = None if reading.for_runtime else came_later(canonical, reading.version)
    if since is not None:
        _key_of_newer(reading, section, where, value, since)
        return
    if value == AUTO and not (key.kind is ValueKind.INT_OR_STR or key.name in _AUTO_IS_A_VALUE):
        if canonical in reading.fill:
            reading.keys.append(KeyReport(where, key.effect, value, f"auto, here {reading.fill[canonical]!r}"))
            reading.values[canonical] = reading.fill[canonical]
        else:
            _left_open(reading, where, canonical, value, section.mode, key)
        return
    if support is Support.IGNORED:
        reading.ignored.append(where)
        if key.kind is ValueKind.SECTION:
            reading.keys.append(KeyReport(where, key.effect, None))
            return
    if value is None and (key.optional or (section.mode is not Mode.MODEL and key.kind is not ValueKind.SECTION)):
        reading.keys.append(KeyReport(where, key.effect, value))
        if key.optional:
            reading.values[canonical] = None
            _deprecated(reading, section, key, where)
        return
    if key.kind is ValueKind.SECTION:
        reading.keys.append(KeyReport(where, key.effect, None if isinstance(value, Mapping) else value))
        _subsection(reading, section, key, where, value)
        return
    reading.keys.append(KeyReport(where, key.effect, value, key.note))
    _value(reading, section, key, where, canonical, value)


def _value(reading: Reading, section: Section, key: Key, where: str, canonical: str, value: Any) -> None:
    try:
        found = _coerced(reading, section, key, where, value)
    except ValueError:
        reading.bad_value(section, key, where, value)
        return
    if not key.holds(found):
        reading.out_of_range(section, key, where, value)
        return
    if isinstance(found, int) and abs(found) > sys.maxsize:
        if not key.threshold:
            what = f"{show(value)} is more than 64 bits hold"
            reading.add("value.huge", Severity.ERROR, where, what, "write a smaller number", section.source, At.RUN)
            return
        found = sys.maxsize
    if canonical in reading.fill and reading.fill[canonical] != found:
        what = f"the file says {show(found)}, the flags say {show(reading.fill[canonical])}"
        reading.add("flag.contradicts", Severity.ERROR, where, what, "change one of the two")
    reading.values[canonical] = found
    _deprecated(reading, section, key, where)


def _coerced(reading: Reading, section: Section, key: Key, where: str, value: Any) -> Any:
    """The value as the section's reader takes it. Raises ValueError: when it is not of the key's kind."""
    if section.mode is Mode.EXACT:
        return exactly(key.kind, value)
    if section.mode is Mode.MODEL:
        return COERCE[key.kind](value)
    # Outside the pydantic blocks DeepSpeed takes values as they stand: a string is no number there, and anything is a boolean.
    if key.kind is ValueKind.BOOL and not isinstance(value, bool):
        if reading.for_runtime or (where == "wall_clock_breakdown" and not isinstance(value, int)):
            raise ValueError  # DeepSpeed combines wall_clock_breakdown with |, which takes no string
        what = f"{show(value)} is no boolean, and DeepSpeed takes it as {show(bool(value))}"
        reading.add("value.truth", Severity.WARNING, where, what, "write true or false", section.source)
        return bool(value)
    if key.kind in (ValueKind.INT, ValueKind.FLOAT) and isinstance(value, str):
        raise ValueError
    if key.name.endswith("communication_data_type"):
        return COERCE[ValueKind.DTYPE](value.lower() if isinstance(value, str) and value.lower() in _COMM_DTYPES else None)
    return COERCE[key.kind](value)


def _deprecated(reading: Reading, section: Section, key: Key, where: str) -> None:
    if key.deprecated and not reading.for_runtime:
        reading.add("key.deprecated", Severity.WARNING, where, "deprecated", f"use {key.replaced_by}", section.source)


def _subsection(reading: Reading, section: Section, key: Key, where: str, value: Any) -> None:
    path = _join(section.path, key.name)
    if isinstance(value, bool) and path == "zero_optimization":
        # read_zero_config_deprecated: true is stage 1, with the all-gather bucket from the top level
        stage = int(value)
        if reading.fill.get("zero_optimization.stage", stage) != stage:
            what = f"the file says {stage}, the flags say {reading.fill['zero_optimization.stage']}"
            reading.add("flag.contradicts", Severity.ERROR, where, what, "change one of the two")
        reading.values["zero_optimization.stage"] = stage
        what = f"{show(value)} means stage {stage}, in the form of DeepSpeed's first years"
        remedy = f'deprecated: write {{"stage": {stage}}}'
        reading.add("zero.boolean", Severity.WARNING, where, what, remedy, "runtime/zero/config.py")
        return
    if not isinstance(value, Mapping):
        reading.bad_value(section, key, where, value)
        return
    reading.values[path] = True
    _deprecated(reading, section, key, where)
    target = SECTIONS.get("bf16" if path == "bfloat16" else path)
    if target is not None:
        _walk_section(reading, target, value)


#: Keys at ``auto`` of which a runtime that nothing fills is another than the file seems to ask for.
_DECIDING = frozenset({"bf16.enabled", "fp16.enabled", "zero_optimization.stage", "optimizer.type"})


def _left_open(reading: Reading, where: str, canonical: str, value: Any, mode: Mode, key: Key | None) -> None:
    """Note an ``auto`` that nobody fills: it is dropped in a pydantic block and kept as a string elsewhere."""
    reading.keys.append(KeyReport(where, key.effect if key else effects(where), value, "left open"))
    if reading.for_runtime:
        reading.autos.append(canonical)
        if where.endswith("params.lr"):
            what, remedy = "'auto' is for the HF Trainer to fill", "write the learning rate"
            reading.add("auto.rejected", Severity.OPEN, where, what, remedy)
        elif canonical in _DECIDING:
            default = "none" if key is None or key.optional else show(_plain(key.default))
            what = f'"auto" is left out by the runtime alone, which takes {default}; the HF Trainer may fill it'
            reading.add("auto.dropped", Severity.WARNING, where, what, "write a value")
        return
    trainer = canonical in HF_FILLS
    if trainer and reading.hidden_size is not None:
        derived = hf_bucket(canonical, reading.hidden_size)
        if derived is not None:
            reading.values[canonical] = derived
            reading.filled_later.append(canonical.rpartition(".")[2])
            what = f"auto: the HF Trainer puts {derived:,} here (hidden size {reading.hidden_size:,})"
            reading.add("auto.derived", Severity.NOTE, where, what, "", "transformers integrations/deepspeed.py")
            return
    reading.autos.append(canonical)
    who = "the HF Trainer fills it" if trainer else "the HF Trainer leaves it too"
    if mode is Mode.MODEL:
        default = "the default" if key is None or key.kind is ValueKind.SECTION else f"the default {show(_plain(key.default))}"
        severity = Severity.WARNING if trainer or canonical.endswith(".stage") else Severity.NOTE
        what = f'"auto" is dropped by DeepSpeed alone, which takes {default}; {who}'
        reading.add("auto.dropped", severity, where, what, "", "runtime/config_utils.py")
    else:
        severity = Severity.OPEN if trainer else Severity.ERROR
        what = f'"auto" is rejected by DeepSpeed alone; {who}'
        early = canonical in _BATCH or (key is not None and key.kind is ValueKind.SECTION)
        at = At.CONFIG if early else At.RUN if canonical == "gradient_clipping" else At.ENGINE
        remedy = "" if trainer else "write a value"
        reading.add("auto.rejected", severity, where, what, remedy, "runtime/config.py", at)


def hf_bucket(canonical: str, hidden_size: int) -> int | None:
    """Return what the HF Trainer puts for an ``auto`` bucket, in elements, at hidden size h; None for another key."""
    h = hidden_size
    return {
        "zero_optimization.reduce_bucket_size": h * h,
        "zero_optimization.prefetch_bucket_size": int(0.9 * h * h),
        "zero_optimization.param_persistence_threshold": 10 * h,
    }.get(canonical)


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)
