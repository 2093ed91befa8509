"""Findings: what a reader of a ds_config has to tell its user."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

#: Keys that a line names; ``zeroplan check`` lists all.
_MOST_NAMED = 3


class Severity(StrEnum):
    """Severity of a finding."""

    ERROR = "error"  # DeepSpeed refuses, whoever fills what is open
    OPEN = "open"  # DeepSpeed alone refuses; the HF Trainer, Lightning or a flag fills it
    WARNING = "warning"  # it runs, but not as the file says
    NOTE = "note"  # it runs as written; worth knowing


class At(StrEnum):
    """Moments at which DeepSpeed refuses or warns."""

    CONFIG = "config"  # DeepSpeedConfig(...) is built
    ENGINE = "engine"  # deepspeed.initialize(...) builds the engine
    RUN = "run"  # later: a step, a swap, a launch


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding: a stable `id`, where in the file, what, the remedy, and DeepSpeed's file that decides it."""

    id: str
    severity: Severity
    where: str
    what: str
    remedy: str = ""
    source: str = ""
    at: At = At.CONFIG

    def __str__(self) -> str:
        """Return the finding as one line."""
        return self.at_keys([self.where])

    def at_keys(self, keys: Sequence[str]) -> str:
        """Return one line that says the same of several keys."""
        named = ", ".join(key for key in keys if key)
        text = f"{named}: {self.what}" if named else self.what
        return f"{text}; {self.remedy}" if self.remedy else text


def merged(findings: Iterable[Finding]) -> list[str]:
    """Return one line for each finding, in order; keys of which the same is said share a line, which counts many of them."""
    keys: dict[tuple[str, str], tuple[Finding, list[str]]] = {}
    for finding in findings:
        keys.setdefault((finding.what, finding.remedy), (finding, []))[1].append(finding.where)
    return [first.at_keys(where if len(where) <= _MOST_NAMED else [f"{len(where)} keys"]) for first, where in keys.values()]
