"""The parts of a ds_config's schema: keys, sections, and what is known of each key.

The keys themselves stand in the ``sections_*`` modules, by section; :mod:`.sections` collects them. A key that
:class:`~zeroplan.core.zero_config.ZeroConfig` holds takes its default from there (`attr` names the field). A test compares
every section with the models of the installed DeepSpeed, so a new version shows what it changed.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields, replace
from enum import StrEnum
from typing import Any

from zeroplan.core.zero_config import ZERO_DEFAULTS, ZeroConfig
from zeroplan.ds_config.coercion import ValueKind
from zeroplan.ds_config.dialect import Dialect, Support


class MemoryEffect(StrEnum):
    """Effect of a key on memory, as far as zeroplan knows."""

    MEMORY = "understood"
    NONE = "no effect on memory"
    UNMODELLED = "known, its effect on memory is not modelled"
    REMOVED = "removed from DeepSpeed"
    UNKNOWN = "unknown"


class Mode(StrEnum):
    """Ways in which DeepSpeed reads a section."""

    MODEL = "model"  # a pydantic model: unknown keys are errors, values are coerced, "auto" is dropped
    PLAIN = "plain"  # a plain dict: unknown keys are ignored, values are taken as they are, "auto" stays a string
    OPEN = "open"  # handed on as it is (optimizer.params, scheduler.params): any key
    EXACT = "exact"  # zeroplan's own: unknown keys are errors, nothing is coerced, "auto" counts as absent


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a section.

    Attributes:
        name: its spelling.
        kind: what its values are.
        effect: what it does to memory.
        default: its value where the file is silent.
        attr: the field that holds it, of the dataclass for its section; empty for none.
        alias: the other accepted spelling.
        optional: null is a value.
        lo, hi: inclusive bounds.
        above, below: exclusive bounds.
        threshold: it is compared and nothing is allocated by it, so 2⁶³ - 1 and all above it mean the same.
        replaced_by: what a deprecated key became.
        note: for ``zeroplan check``.
        deepspeed: what DeepSpeed does with it.
        runtime: what zeroplan's runtime does with it. A refused key at its default is ignored.
    """

    name: str
    kind: ValueKind
    effect: MemoryEffect
    default: Any = None
    attr: str = ""
    alias: str = ""
    optional: bool = False
    lo: float | None = None
    hi: float | None = None
    above: float | None = None
    below: float | None = None
    threshold: bool = False
    replaced_by: str = ""
    note: str = ""
    deepspeed: Support = Support.HONOURED
    runtime: Support = Support.IGNORED

    @property
    def deprecated(self) -> bool:
        """Whether another key replaces this one."""
        return bool(self.replaced_by)

    def support(self, dialect: Dialect) -> Support:
        """Return what the program of that dialect does with the key."""
        return self.deepspeed if dialect is Dialect.DEEPSPEED else self.runtime

    def holds(self, value: Any) -> bool:
        """Return whether a number is within the key's bounds; other values have none."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return True
        return not (
            (self.lo is not None and not value >= self.lo)
            or (self.hi is not None and not value <= self.hi)
            or (self.above is not None and not value > self.above)
            or (self.below is not None and not value < self.below)
        )


@dataclass(frozen=True, slots=True)
class Section:
    """One object of the file, by its dotted path, and the keys that are known in it.

    `source` is DeepSpeed's file that reads it, within deepspeed/ at 0.19.8.
    """

    path: str
    mode: Mode
    keys: dict[str, Key]
    source: str

    def find(self, name: str) -> Key | None:
        """Return the key of that name or alias."""
        return self.keys.get(name) or next((key for key in self.keys.values() if key.alias and key.alias == name), None)

    def names(self, dialect: Dialect = Dialect.DEEPSPEED) -> list[str]:
        """Return every spelling that the program of that dialect accepts."""
        known = [key for key in self.keys.values() if key.support(dialect) is not Support.REFUSED]
        return [spelling for key in known for spelling in (key.name, key.alias) if spelling]


def section(path: str, mode: Mode, source: str, *keys: Key, holder: type | None = None) -> Section:
    """Make a section of these keys. Keys with an `attr` take the default of that field of `holder`."""
    defaults = _defaults(holder) if holder is not None else {}
    return Section(path, mode, {k.name: replace(k, default=defaults[k.attr]) if k.attr else k for k in keys}, source)


def _defaults(cls: type) -> dict[str, Any]:
    if cls is ZeroConfig:
        return ZERO_DEFAULTS
    return {f.name: f.default_factory() if f.default_factory is not MISSING else f.default for f in fields(cls)}


def mem(name: str, kind: ValueKind, attr: str | None = None, **more: Any) -> Key:
    """Make a key that a line or a schedule reads; `attr` is the field that holds it, by default of the same name."""
    return Key(name, kind, MemoryEffect.MEMORY, attr=name if attr is None else attr, **more)


def free(name: str, kind: ValueKind, default: Any = None, **more: Any) -> Key:
    """Make a key without effect on memory."""
    return Key(name, kind, MemoryEffect.NONE, default, **more)


def other(name: str, kind: ValueKind, default: Any = None, **more: Any) -> Key:
    """Make a key that moves memory in a way that zeroplan does not model. The runtime refuses it."""
    return Key(name, kind, MemoryEffect.UNMODELLED, default, **{"runtime": Support.REFUSED, **more})


#: Short names for the ``sections_*`` modules.
INT, FLOAT, BOOL, STR = ValueKind.INT, ValueKind.FLOAT, ValueKind.BOOL, ValueKind.STR
HONOURED, IGNORED, REFUSED = Support.HONOURED, Support.IGNORED, Support.REFUSED
