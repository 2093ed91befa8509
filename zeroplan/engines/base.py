"""What every engine offers: its options, its ledger, and the case that both are about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from zeroplan.core.cluster import Cluster
from zeroplan.core.tape_options import TraceOptions
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.ledger.line import Ledger
from zeroplan.models.spec import ModelSpec

if TYPE_CHECKING:  # a plan from the ledger alone needs no simulator
    from zeroplan.core.tape import ExpandedTape
    from zeroplan.engines.simulation import Simulation
    from zeroplan.simulate.allocator.config import AllocatorConfig


@dataclass(frozen=True, slots=True)
class Case:
    """One model, trained in one way, on one cluster, sharded in one way."""

    spec: ModelSpec
    workload: Workload
    cluster: Cluster
    zero: ZeroConfig

    @property
    def ranks(self) -> int:
        """Data-parallel ranks."""
        return self.cluster.ranks


class Engine(Protocol):
    """An engine whose memory can be predicted."""

    name: str
    version: str

    def options(self) -> list[ZeroConfig]:
        """Every stage with each offload that it allows, in the order in which they are shown."""
        ...

    def require_runnable(self, zero: ZeroConfig) -> None:
        """Refuse what this engine cannot do.

        Raises:
            BadInput: with what it can.
        """
        ...

    def require_workload(self, case: Case) -> None:
        """Refuse what this engine cannot train so.

        Raises:
            BadInput: naming the conflict.
        """
        ...

    def glossary(self) -> Mapping[str, str]:
        """What each name in the ledger's formulas means."""
        ...

    def ledger(self, case: Case) -> tuple[Ledger, Any]:
        """The engine's lines, and the facts they read, for rank 0."""
        ...

    def trace_options(self, case: Case) -> TraceOptions:
        """How the model must be traced to run under this engine."""
        ...

    def simulate(self, case: Case, tape: ExpandedTape, config: AllocatorConfig | None = None) -> Simulation:
        """The run, laid over the model's expanded tape, of the rank that needs the most."""
        ...
