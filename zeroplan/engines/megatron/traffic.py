"""Megatron-LM's traffic between data-parallel ranks, and its optimizer's."""

from __future__ import annotations

from dataclasses import dataclass

from zeroplan.core.buffers import Phase
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.compute_traffic import ComputeFacts
from zeroplan.engines.megatron.rank import MegatronRank
from zeroplan.engines.rank_traffic import RankTraffic
from zeroplan.ledger.derive import fraction
from zeroplan.ledger.line import means
from zeroplan.ledger.traffic import Resource, WorkBuilder


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronFacts:
    """One rank."""

    distributed: bool
    one_node: bool
    ranks: int = means("data-parallel ranks")
    steps_before: int = means("ranks − 1, the steps of a ring")
    micro_batches: int = means("micro batches a step, of which the last reduces gradients")
    trainable: int = means("elements with a gradient")
    updated: int = means("elements that this rank's optimizer updates")
    param_bytes: int = means("bytes of one parameter")
    grad_bytes: int = means("bytes of one gradient in its buffer")
    state_bytes: int = means("bytes of one element's optimizer states")


def _link(c: MegatronFacts) -> Resource:
    return Resource.LINK if c.one_node else Resource.NODE_LINK


_lines = WorkBuilder()


@_lines.add(_link, Phase.BACKWARD)
def reduce_gradients(c: MegatronFacts) -> int:
    """Gradients, once a step, spread over its micro batches: scattered, or summed for all.

    Source: megatron/core/distributed/param_and_grad_buffer.py, start_grad_sync
    """
    return fraction(c.grad_bytes * c.trainable * (1 if c.distributed else 2), c.steps_before, c.ranks * c.micro_batches)


@_lines.add(_link, Phase.STEP)
def gather_parameters(c: MegatronFacts) -> int:
    """Parameters gathered once a step by the distributed optimizer.

    Source: megatron/core/optimizer/distrib_optimizer.py, step_with_ready_grads
    """
    return fraction(c.param_bytes * c.trainable, c.steps_before, c.ranks) if c.distributed else 0


@_lines.add(Resource.HBM, Phase.BACKWARD)
def accumulate(c: MegatronFacts) -> int:
    """Products of weights' gradients read and write the buffer."""
    return 2 * c.grad_bytes * c.trainable


@_lines.add(Resource.HBM, Phase.STEP)
def step_on_gpu(c: MegatronFacts) -> int:
    """The gradients' norm and clipping, the update of fp32 masters, and their copy to the parameters; the buffer is zeroed."""
    return c.updated * (4 + 8 + 4 + 8 + 2 * c.state_bytes + c.param_bytes) + 4 * c.trainable


class MegatronTraffic(RankTraffic[MegatronRank]):
    """What data-parallel ranks send; reductions run beside the computation with ``--overlap-grad-reduce``."""

    ledger = _lines.ledger()

    def facts(self, compute: ComputeFacts, workload: Workload, zero: ZeroConfig) -> MegatronFacts:
        """Return the facts of rank 0."""
        rank = self.rank(workload, zero)
        return MegatronFacts(
            distributed=rank.distributed,
            one_node=rank.layout.shards_on_one_node,
            ranks=rank.ranks,
            steps_before=rank.ranks - 1,
            micro_batches=workload.batch.grad_accum,
            trainable=rank.held,
            updated=rank.stepped,
            param_bytes=rank.element,
            grad_bytes=rank.grad_element,
            state_bytes=rank.optimizer.bytes_per_element(0.0),
        )

    def overlaps(self, zero: ZeroConfig) -> bool:
        """Return no: gradients are reduced behind the backward unless ``--overlap-grad-reduce`` is given."""
        return False
