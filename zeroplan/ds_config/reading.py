"""The record of a walk over a ds_config, and the messages about one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zeroplan.core.versions import Version
from zeroplan.core.zero_config import NEWEST_DEEPSPEED
from zeroplan.ds_config.coercion import ValueKind
from zeroplan.ds_config.dialect import Dialect
from zeroplan.ds_config.findings import At, Finding, Severity
from zeroplan.ds_config.schema import Key, MemoryEffect, Mode, Section

#: Unknown keys of one section that are listed one by one; the rest are counted.
MOST_UNKNOWN = 20


@dataclass(frozen=True, slots=True)
class KeyReport:
    """A key of the file: its value, where it came from, and its effect."""

    path: str
    effect: MemoryEffect
    value: Any
    note: str = ""


@dataclass(slots=True)
class Reading:
    """The record that the walk fills.

    Attributes:
        dialect: whose reading it is.
        values: canonical dotted paths and their coerced values.
        keys: what is known of each key of the file, in its order.
        findings: what is wrong or worth knowing.
        autos: canonical paths that stand at ``auto`` and that nothing filled.
        filled_later: names of the keys at ``auto`` that the HF Trainer derives from the hidden size.
        ignored: paths, as written, of keys that the dialect's program knows and ignores.
        fill: canonical paths and values for what the file leaves open.
        hidden_size: of the model, for the buckets that the HF Trainer derives from it; None where unknown.
        version: of the DeepSpeed whose keys and defaults hold.
    """

    dialect: Dialect = Dialect.DEEPSPEED
    values: dict[str, Any] = field(default_factory=dict)
    keys: list[KeyReport] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    autos: list[str] = field(default_factory=list)
    filled_later: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    fill: Mapping[str, Any] = field(default_factory=dict)
    hidden_size: int | None = None
    version: Version = NEWEST_DEEPSPEED

    @property
    def for_runtime(self) -> bool:
        """Whether this is the reading of zeroplan's runtime."""
        return self.dialect is Dialect.RUNTIME

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
        """Add one finding."""
        self.findings.append(Finding(id, severity, where, what, remedy, source, at))

    def bad_value(self, section: Section, key: Key, where: str, value: Any) -> None:
        """Note a value that is not of the key's kind."""
        noun = "a dtype" if key.kind is ValueKind.DTYPE else key.kind.value
        what, remedy = f"{show(value)} is not {noun}", f"write {key.kind.value}"
        if isinstance(value, str) and "|" in value:
            what, remedy = f"{show(value)} is a placeholder, not a value", f"write one of the values: {key.kind.value}"
        early = section.path == "torch_autocast" or where == "wall_clock_breakdown" or where.endswith("communication_data_type")
        at = At.CONFIG if early or key.kind is ValueKind.SECTION else raised_at(section)
        self.add("value.type", Severity.ERROR, where, what, remedy, section.source, at)

    def out_of_range(self, section: Section, key: Key, where: str, value: Any) -> None:
        """Note a number outside the key's bounds."""
        low, high = (key.lo if key.lo is not None else key.above), (key.hi if key.hi is not None else key.below)
        if low is not None and high is not None:
            what = f"{show(value)} is not between {low:g} and {high:g}"
            remedy = "both excluded" if key.above is not None else ""
        elif key.above is not None:
            what, remedy = f"{show(value)} is too small", f"use a number above {key.above:g}"
        else:
            what, remedy = f"{show(value)} is too small", f"use {key.lo:g} or more"
        self.add("value.range", Severity.ERROR, where, what, remedy, section.source, raised_at(section))


def raised_at(section: Section) -> At:
    """Return when DeepSpeed meets a bad value of a section."""
    return At.CONFIG if section.mode is Mode.MODEL else At.ENGINE


def show(value: Any) -> str:
    """Return the text of a value for a message: at most 60 characters, a boolean as JSON writes it."""
    text = repr(value) if not isinstance(value, bool) else str(value).lower()
    return text if len(text) <= 60 else text[:57] + "..."
