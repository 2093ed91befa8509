"""Traffic that reads the rank which an engine's ledger and schedule read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from zeroplan.core.cluster import Cluster
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.case import Case
from zeroplan.engines.rank import Rank
from zeroplan.engines.traffic import Traffic
from zeroplan.models.spec import ModelSpec

R = TypeVar("R", bound=Rank)


class RankTraffic(Traffic, Generic[R]):
    """Traffic of ranks that an engine derives.

    Args:
        derive: that rank of a case.
    """

    def __init__(self, spec: ModelSpec, cluster: Cluster, derive: Callable[[Case], R]) -> None:
        self._spec, self._cluster, self._derive = spec, cluster, derive
        self._ranks: dict[tuple[object, ...], R] = {}

    def rank(self, workload: Workload, zero: ZeroConfig) -> R:
        """Return it, derived once for all batches of a configuration."""
        key = (zero, workload.numerics, workload.loop, workload.objective, workload.techniques)
        if key not in self._ranks:
            self._ranks[key] = self._derive(Case(self._spec, workload, self._cluster, zero))
        return self._ranks[key]
