"""The walk over a ds_config, key by key, against the schema: values coerced as DeepSpeed would, everything else found out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zeroplan.core.errors import did_you_mean
from zeroplan.ds_config.findings import At, Finding, Severity
from zeroplan.ds_config.schema import Effect, Key, Mode, Section
from zeroplan.ds_config.sections import HF_FILLS, REMOVED, SECTIONS, effects
from zeroplan.ds_config.values import COERCE, Kind

AUTO = "auto"
_NOWHERE = "remove it"

#: Spellings that people use at the top level, and what they mean.
_TOP_LEVEL_SLIPS = {
    "zero": "zero_optimization",
    "zero_config": "zero_optimization",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
}


@dataclass(frozen=True, slots=True)
class KeyReport:
    """What is known of one key of the file."""

    path: str
    effect: Effect
    value: Any
    note: str = ""


@dataclass(slots=True)
class Reading:
    """What the walk collects. `values` maps canonical dotted paths to coerced values."""

    values: dict[str, Any] = field(default_factory=dict)
    keys: list[KeyReport] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    autos: list[str] = field(default_factory=list)
    fill: Mapping[str, Any] = field(default_factory=dict)
    hidden_size: int | None = None

    def add(
        self,
        id: str,
        severity: Severity,
        where: str,
        what: str,
        remedy: str = "",
        source: str = "",
        at: At = At.CONFIG,
    ) -> None:
        """Note one finding."""
        self.findings.append(Finding(id, severity, where, what, remedy, source, at))


def walk(raw: Mapping[str, Any], fill: Mapping[str, Any], hidden_size: int | None) -> Reading:
    """Read every key of `raw`. `fill` maps dotted paths to values for what the file leaves open."""
    reading = Reading(fill=_canonical_fill(fill), hidden_size=hidden_size)
    _walk_section(reading, SECTIONS[""], raw)
    for path, value in reading.fill.items():
        if path not in reading.values:
            reading.values[path] = value
    return reading


def _canonical_fill(fill: Mapping[str, Any]) -> dict[str, Any]:
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
    for name, value in data.items():
        where = _join(section.path, name)
        key = section.find(name)
        if section.mode is Mode.OPEN:
            _open_key(reading, section, where, value)
        elif where in REMOVED and "." not in name:
            reading.keys.append(KeyReport(where, Effect.REMOVED, value))
            what = "was removed from DeepSpeed, which refuses the key"
            reading.add("key.removed", Severity.ERROR, where, what, f"{_NOWHERE}: {REMOVED[where]}", "runtime/config.py")
        elif key is None:
            _unknown_key(reading, section, where, name, value)
        elif key.name in seen:
            what = f"is the same key as {seen[key.name]!r}, and DeepSpeed takes only one of the two"
            reading.keys.append(KeyReport(where, key.effect, value))
            reading.add("key.twice", Severity.ERROR, where, what, _NOWHERE, section.source)
        else:
            seen[key.name] = name
            _known_key(reading, section, key, where, value)


def _open_key(reading: Reading, section: Section, where: str, value: Any) -> None:
    if value == AUTO and section.path in ("optimizer.params", "scheduler.params"):
        _left_open(reading, where, where, value, Mode.OPEN, None)
        return
    reading.keys.append(KeyReport(where, effects(where), value))
    reading.values[where] = value


def _unknown_key(reading: Reading, section: Section, where: str, name: str, value: Any) -> None:
    slip = _TOP_LEVEL_SLIPS.get(name) if not section.path else None
    near = f"did you mean {slip!r}?" if slip else did_you_mean(name, section.names)
    reading.keys.append(KeyReport(where, Effect.UNKNOWN, value, near))
    if section.mode is Mode.MODEL:
        what = f"unknown key in {section.path}, which DeepSpeed rejects"
        reading.add("key.unknown", Severity.ERROR, where, what, near or _NOWHERE, section.source)
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
    for name, value in data.items():
        path = _join(where, name)
        if isinstance(value, Mapping):
            _placeholders(reading, path, value)
        elif isinstance(value, str) and "|" in value:
            what = f"{value!r} is a placeholder, not a device" if name == "device" else f"{value!r} is a placeholder"
            reading.add(
                "value.placeholder", Severity.WARNING, path, what, "write one of the values", "runtime/zero/offload_config.py"
            )


def _known_key(reading: Reading, section: Section, key: Key, where: str, value: Any) -> None:
    canonical = _join("bf16" if section.path == "bfloat16" else section.path, key.name)
    if value == AUTO and not (key.kind is Kind.INT_OR_STR or key.name in ("select_strategy", "keep_in_fp32_modules")):
        if canonical in reading.fill:
            reading.keys.append(KeyReport(where, key.effect, value, f"auto, here {reading.fill[canonical]!r}"))
            reading.values[canonical] = reading.fill[canonical]
        else:
            _left_open(reading, where, canonical, value, section.mode, key)
        return
    if value is None and (key.optional or (section.mode is Mode.PLAIN and key.kind is not Kind.SECTION)):
        reading.keys.append(KeyReport(where, key.effect, value))
        if key.optional:
            reading.values[canonical] = None
            _deprecated(reading, section, key, where)
        return
    if key.kind is Kind.SECTION:
        reading.keys.append(KeyReport(where, key.effect, None if isinstance(value, Mapping) else value))
        _subsection(reading, section, key, where, value)
        return
    reading.keys.append(KeyReport(where, key.effect, value, key.note))
    if section.mode is Mode.PLAIN and key.kind is Kind.BOOL and not isinstance(value, bool):
        value = _truth(reading, section, where, value)
    try:
        found = _plain(key, value) if section.mode is Mode.PLAIN else COERCE[key.kind](value)
    except ValueError:
        _bad_value(reading, section, key, where, value)
        return
    if not _within(key, found):
        what = f"{_show(value)} is out of range ({_bounds(key)})"
        reading.add("value.range", Severity.ERROR, where, what, "", section.source, _when(section))
        return
    _contradiction(reading, canonical, where, found)
    reading.values[canonical] = found
    _deprecated(reading, section, key, where)


def _contradiction(reading: Reading, canonical: str, where: str, found: Any) -> None:
    if canonical in reading.fill and reading.fill[canonical] != found:
        what = f"the file says {_show(found)}, the flags say {_show(reading.fill[canonical])}"
        reading.add("flag.contradicts", Severity.ERROR, where, what, "change one of the two")


def _deprecated(reading: Reading, section: Section, key: Key, where: str) -> None:
    if key.deprecated:
        what = "deprecated"
        reading.add("key.deprecated", Severity.WARNING, where, what, f"use {key.replaced_by}", section.source)


def _subsection(reading: Reading, section: Section, key: Key, where: str, value: Any) -> None:
    path = _join(section.path, key.name)
    if isinstance(value, bool) and path == "zero_optimization":
        # read_zero_config_deprecated: true is stage 1, with the all-gather bucket from the top level
        reading.values["zero_optimization.stage"] = int(value)
        _contradiction(reading, "zero_optimization.stage", where, int(value))
        what = f"{str(value).lower()} means stage {int(value)}, in the form of DeepSpeed's first years"
        remedy = f'deprecated: write {{"stage": {int(value)}}}'
        reading.add("zero.boolean", Severity.WARNING, where, what, remedy, "runtime/zero/config.py")
        return
    if not isinstance(value, Mapping):
        _bad_value(reading, section, key, where, value)
        return
    reading.values[path] = True
    _deprecated(reading, section, key, where)
    target = SECTIONS.get("bf16" if path == "bfloat16" else path)
    if target is not None:
        _walk_section(reading, target, value)


def _left_open(reading: Reading, where: str, canonical: str, value: Any, mode: Mode, key: Key | None) -> None:
    """An ``auto`` that nobody fills: dropped in a pydantic block, kept as a string elsewhere."""
    reading.keys.append(KeyReport(where, key.effect if key else effects(where), value, "left open"))
    trainer = canonical in HF_FILLS
    if trainer and reading.hidden_size is not None:
        derived = hf_bucket(canonical, reading.hidden_size)
        if derived is not None:
            reading.values[canonical] = derived
            what = f"auto: the HF Trainer puts {derived:,} here (hidden size {reading.hidden_size:,})"
            reading.add("auto.derived", Severity.NOTE, where, what, "", "transformers integrations/deepspeed.py")
            return
    reading.autos.append(canonical)
    who = "the HF Trainer fills it" if trainer else "the HF Trainer leaves it too"
    if mode is Mode.MODEL:
        default = "the default" if key is None or key.kind is Kind.SECTION else f"the default {_show(_visible(key.default))}"
        severity = Severity.WARNING if trainer or canonical.endswith(".stage") else Severity.NOTE
        what = f'"auto" is dropped by DeepSpeed alone, which takes {default}; {who}'
        reading.add("auto.dropped", severity, where, what, "", "runtime/config_utils.py")
    else:
        severity = Severity.OPEN if trainer else Severity.ERROR
        what = f'"auto" is rejected by DeepSpeed alone; {who}'
        early = canonical in _BATCH or (key is not None and key.kind is Kind.SECTION)
        at = At.CONFIG if early else At.RUN if canonical == "gradient_clipping" else At.ENGINE
        remedy = "" if trainer else "write a value"
        reading.add("auto.rejected", severity, where, what, remedy, "runtime/config.py", at)


_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def hf_bucket(canonical: str, hidden_size: int) -> int | None:
    """What transformers' Trainer makes of an ``auto`` bucket: h², 0.9 h² and 10 h elements."""
    h = hidden_size
    return {
        "zero_optimization.reduce_bucket_size": h * h,
        "zero_optimization.prefetch_bucket_size": int(0.9 * h * h),
        "zero_optimization.param_persistence_threshold": 10 * h,
    }.get(canonical)


def _plain(key: Key, value: Any) -> Any:
    """A value outside the pydantic blocks: taken as it stands, so a string is no number there."""
    if key.kind in (Kind.INT, Kind.FLOAT) and isinstance(value, str):
        raise ValueError
    if key.name.endswith("communication_data_type"):
        return COERCE[Kind.DTYPE](value.lower() if isinstance(value, str) and value.lower() in _COMM else None)
    return COERCE[key.kind](value)


_COMM = ("fp32", "fp16", "bf16")


def _truth(reading: Reading, section: Section, where: str, value: Any) -> bool | None:
    """A boolean outside the pydantic blocks is whatever Python's ``if`` makes of it."""
    if where == "wall_clock_breakdown" and not isinstance(value, int):
        return None  # combined with | there, which takes no string
    what = f"{_show(value)} is no boolean, and DeepSpeed takes it as {_show(bool(value))}"
    reading.add("value.truth", Severity.WARNING, where, what, "write true or false", section.source)
    return bool(value)


def _within(key: Key, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    return not (
        (key.lo is not None and not value >= key.lo)
        or (key.hi is not None and not value <= key.hi)
        or (key.above is not None and not value > key.above)
        or (key.below is not None and not value < key.below)
    )


def _bounds(key: Key) -> str:
    parts = [("at least", key.lo), ("at most", key.hi), ("above", key.above), ("below", key.below)]
    return " and ".join(f"{word} {bound:g}" for word, bound in parts if bound is not None)


def _bad_value(reading: Reading, section: Section, key: Key, where: str, value: Any) -> None:
    what = f"{_show(value)} is not {key.kind.value}"
    remedy = f"write {key.kind.value}"
    if isinstance(value, str) and "|" in value:
        what, remedy = f"{_show(value)} is a placeholder, not a value", f"write one of the values: {key.kind.value}"
    early = section.path == "torch_autocast" or where == "wall_clock_breakdown" or where.endswith("communication_data_type")
    at = At.CONFIG if early or key.kind is Kind.SECTION else _when(section)
    reading.add("value.type", Severity.ERROR, where, what, remedy, section.source, at)


def _when(section: Section) -> At:
    return At.CONFIG if section.mode is Mode.MODEL else At.ENGINE


def _visible(value: Any) -> Any:
    return getattr(value, "value", value)


def _show(value: Any) -> str:
    text = repr(value) if not isinstance(value, bool) else str(value).lower()
    return text if len(text) <= 60 else text[:57] + "..."
