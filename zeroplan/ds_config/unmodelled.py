"""Sections and keys of a ds_config that change memory in a way that no plan models, each with its effect.

Keys that :class:`~zeroplan.core.zero_config.ZeroConfig` holds are not here: the engine that reads them says what it leaves out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from zeroplan.core.unmodelled import Effect, Unmodelled

_SAYS = "changes memory in a way that is not modelled"
#: What is known of some sections and keys; of all others the effect is unknown.
_KNOWN = {
    "hybrid_engine": (Effect.MORE, "its inference keeps a key-value cache, and workspaces, beside the training"),
    "expert_parallel": (Effect.UNKNOWN, "AutoEP's layers share the experts and exchange tokens; every rank's own are counted"),
    "pipeline": (Effect.UNKNOWN, "a PipelineModule reads it, whose stages --pp plans; without it the whole model is counted"),
    "data_types.keep_in_fp32_modules": (Effect.MORE, "these modules stay in 32 bits, and 16 are planned"),
}
#: Sections that do nothing unless this key is true.
_SWITCHES = {"hybrid_engine": "enabled", "compile": "deepcompile", "data_efficiency": "enabled", "expert_parallel": "enabled"}


def unmodelled_keys(paths: Iterable[str], values: Mapping[str, Any], raw: Mapping[str, Any]) -> tuple[Unmodelled, ...]:
    """Return the keys of a file that the figures leave out.

    Args:
        paths: the sections and keys that are known and not modelled.
        values: the file's coerced values by dotted path.
        raw: the file's object.
    """
    found = []
    for path in dict.fromkeys(paths):
        section = raw.get(path)
        switch = _SWITCHES.get(path)
        if switch is not None and isinstance(section, Mapping) and not section.get(switch):
            continue
        if path == "data_types.keep_in_fp32_modules" and values.get(path) in ("auto", [], ()):
            continue
        found.append(Unmodelled(path, *_KNOWN.get(path, (Effect.UNKNOWN, _SAYS))))
    return tuple(found)
