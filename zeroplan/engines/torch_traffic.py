"""FSDP2's and DDP's traffic, in the setups that the measured rows describe: fp32 parameters, 16-bit arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from zeroplan.core.buffers import Phase
from zeroplan.core.workload import DType, Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.compute_traffic import ComputeFacts
from zeroplan.engines.rank_traffic import RankTraffic
from zeroplan.engines.torch_rank import TorchRank
from zeroplan.ledger.derive import fraction
from zeroplan.ledger.line import means
from zeroplan.ledger.traffic import Resource, WorkBuilder, WorkLedger


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts:
    """One rank."""

    sharded: bool
    resharded: bool
    ranks: int = means("data-parallel ranks")
    steps_before: int = means("ranks − 1, the steps of a ring")
    micro_batches: int = means("micro batches a step, of which the last reduces gradients")
    params: int = means("elements of the model")
    trainable: int = means("elements with a gradient")
    tensors: int = means("parameters")
    updated: int = means("elements that this rank's optimizer updates")
    param_bytes: int = means("bytes of one gathered parameter element")
    reduce_bytes: int = means("bytes of one gradient element on its way")
    state_bytes: int = means("bytes of one element's optimizer states")
    one_node: bool


def _link(c: TorchFacts) -> Resource:
    return Resource.LINK if c.one_node else Resource.NODE_LINK


_lines = WorkBuilder()


@_lines.add(_link, Phase.FORWARD)
def gather_forward(c: TorchFacts) -> int:
    """FSDP2 gathers each block's parameters in the arithmetic's dtype.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, foreach_all_gather
    """
    return fraction(c.param_bytes * c.params, c.steps_before, c.ranks) if c.sharded else 0


@_lines.add(_link, Phase.BACKWARD)
def gather_backward(c: TorchFacts) -> int:
    """FSDP2 gathers each block's parameters again for the backward, where they were resharded."""
    return fraction(c.param_bytes * c.params, c.steps_before, c.ranks) if c.sharded and c.resharded else 0


@_lines.add(_link, Phase.BACKWARD)
def reduce_gradients(c: TorchFacts) -> int:
    """Gradients, once a step, spread over its micro batches: FSDP2 reduce-scatters, DDP all-reduces.

    Source: _fsdp_collectives.py, foreach_reduce; torch/csrc/distributed/c10d/reducer.cpp
    """
    return fraction(c.reduce_bytes * c.trainable * (1 if c.sharded else 2), c.steps_before, c.ranks * c.micro_batches)


@_lines.add(Resource.HBM, Phase.FORWARD)
def cast_and_copy_forward(c: TorchFacts) -> int:
    """FSDP2 casts its shard, gathers and copies out; autocast casts every weight.

    Source: _fsdp_collectives.py, foreach_all_gather_copy_out
    """
    if not c.sharded:
        return (4 + 3 * c.param_bytes) * c.params
    return fraction((4 + c.param_bytes) * c.params, 1, c.ranks) + 2 * c.param_bytes * c.params


@_lines.add(Resource.HBM, Phase.BACKWARD)
def copy_backward(c: TorchFacts) -> int:
    """Gradients copied in, cast to fp32 and averaged; parameters that were resharded cast and copied out once more.

    Source: _fsdp_collectives.py, foreach_reduce_scatter_copy_in, foreach_all_gather_copy_out
    """
    gathered = fraction((4 + c.param_bytes) * c.params, 1, c.ranks) + 2 * c.param_bytes * c.params
    return (2 * c.param_bytes + 2 * c.reduce_bytes) * c.trainable + (gathered if c.sharded and c.resharded else 0)


@_lines.add(Resource.UNIT_HOOK, Phase.FORWARD, Phase.BACKWARD)
def unit_hooks(c: TorchFacts) -> int:
    """What FSDP2 does for each parameter: chunk, copy out, views, in the backward the reduction as well.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py, init_all_gather_outputs, init_unsharded_param
    """
    return c.tensors if c.sharded else 0


@_lines.add(Resource.LAUNCH, Phase.FORWARD)
def casts_forward(c: TorchFacts) -> int:
    """Autocast's casts of weights are kernels too."""
    return 0 if c.sharded else c.tensors


@_lines.add(Resource.HBM, Phase.STEP)
def step_on_gpu(c: TorchFacts) -> int:
    """Norm, clipping and the update of fp32 parameters."""
    return c.updated * (4 + 8 + 4 + 8 + 2 * c.state_bytes)


TRAFFIC: WorkLedger = _lines.ledger()


class TorchTraffic(RankTraffic[TorchRank]):
    """The traffic of FSDP2 and DDP, whose collectives always overlap the computation: stage 0 is DDP, 2 FSDP2 without
    resharding, 3 FSDP2.
    """

    ledger = TRAFFIC

    def facts(self, compute: ComputeFacts, workload: Workload, zero: ZeroConfig) -> TorchFacts:
        """Return the facts of rank 0."""
        rank, layout = self.rank(workload, zero), self._cluster.layout
        ranks = layout.shard_group if zero.stage else layout.dp
        reduced = workload.numerics.reduce_dtype
        updated = rank.matrix + rank.rest
        return TorchFacts(
            sharded=zero.stage > 0,
            resharded=zero.stage == 3,
            ranks=ranks,
            steps_before=ranks - 1,
            micro_batches=workload.batch.grad_accum,
            params=rank.params,
            trainable=rank.reached,
            tensors=len(rank.parameters),
            updated=updated,
            param_bytes=workload.numerics.dtype.bytes,
            reduce_bytes=DType.FP32.bytes if reduced is None or not zero.stage else reduced.bytes,
            state_bytes=rank.optimizer.bytes_per_element(rank.matrix / max(1, updated)),
            one_node=layout.shards_on_one_node,
        )
