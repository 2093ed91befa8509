"""What a reading of a ds_config turns up."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How bad a finding is."""

    ERROR = "error"  # DeepSpeed refuses, whoever fills what is open
    OPEN = "open"  # DeepSpeed alone refuses; the HF Trainer, Lightning or a flag fills it
    WARNING = "warning"  # it runs, but not as the file says
    NOTE = "note"  # it runs as written; worth knowing


class At(StrEnum):
    """When DeepSpeed says so."""

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
        """One line."""
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}; {self.remedy}" if self.remedy else text
