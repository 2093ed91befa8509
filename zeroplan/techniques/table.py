"""Every technique, a row each, in the order in which their rules are held against a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zeroplan.core.workload import Workload
from zeroplan.techniques.base import Technique
from zeroplan.techniques.dora import DoraTechnique

#: The techniques.
TABLE: list[Technique[Any]] = [
    DoraTechnique(),
]


def techniques_of(workload: Workload) -> Iterator[tuple[Technique[Any], Any]]:
    """Yield the techniques that are on in a workload, with their values."""
    for technique in TABLE:
        value = technique.of(workload)
        if value is not None:
            yield technique, value


def keys_of(program: str) -> dict[str, str]:
    """Return the keys of a program that ask for techniques, and the option that each sets."""
    return {key: option for technique in TABLE for key, option in technique.keys.get(program, {}).items()}
