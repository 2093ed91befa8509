"""What the toy sends and updates."""

from __future__ import annotations

from dataclasses import dataclass

from zeroplan.core.buffers import Phase
from zeroplan.core.cluster import Cluster
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.compute_traffic import ComputeFacts
from zeroplan.engines.traffic import Traffic
from zeroplan.ledger.derive import fraction
from zeroplan.ledger.line import means
from zeroplan.ledger.traffic import Resource, WorkBuilder
from zeroplan.models.spec import ModelSpec

_lines = WorkBuilder()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyTrafficFacts:
    trainable: int = means("elements with a gradient")
    ranks: int = means("data-parallel ranks")
    steps_before: int = means("ranks - 1, the steps of a ring")


@_lines.add(Resource.LINK, Phase.BACKWARD)
def reduce_gradients(c: ToyTrafficFacts) -> int:
    """Gradients all-reduced in fp32."""
    return fraction(8 * c.trainable, c.steps_before, c.ranks)


@_lines.add(Resource.HBM, Phase.STEP)
def update(c: ToyTrafficFacts) -> int:
    """AdamW: parameters, gradients and two states read, all but the gradients written."""
    return 28 * c.trainable


class ToyTraffic(Traffic):
    ledger = _lines.ledger()

    def __init__(self, spec: ModelSpec, cluster: Cluster) -> None:
        ranks = cluster.layout.dp
        self._facts = ToyTrafficFacts(trainable=spec.trainable, ranks=ranks, steps_before=ranks - 1)

    def facts(self, compute: ComputeFacts, workload: Workload, zero: ZeroConfig) -> ToyTrafficFacts:
        return self._facts
