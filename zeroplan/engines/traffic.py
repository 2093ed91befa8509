"""The interface of an engine's work: what it sends, copies and updates beside the model's own computation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.compute_traffic import ComputeFacts
from zeroplan.ledger.traffic import WorkLedger


class Traffic(ABC):
    """One engine's lines of work for one model on one cluster. Sums over the model's parameters are kept between calls.

    Attributes:
        ledger: the lines. Those of the forward and the backward are of one micro batch, those of the step of one optimizer
            step, all on one rank.
    """

    ledger: ClassVar[WorkLedger]

    @abstractmethod
    def facts(self, compute: ComputeFacts, workload: Workload, zero: ZeroConfig) -> Any:
        """Return what the lines read of one configuration; `compute` is what the model's own computation takes."""

    def overlaps(self, zero: ZeroConfig) -> bool:
        """Return whether collectives and copies run beside the computation."""
        return True
