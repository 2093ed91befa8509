"""The facts that DeepSpeed's lines of traffic read: one rank of one configuration, in elements, calls and bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import OffloadDevice, ZeroConfig
from zeroplan.engines.compute_traffic import ComputeFacts
from zeroplan.engines.deepspeed.rank import DeepSpeedRank
from zeroplan.engines.deepspeed.resolved_config import ResolvedConfig, muon_updates, resolve_config
from zeroplan.ledger.line import fact
from zeroplan.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sums over a rank's parameters that traffic needs, for two persistence thresholds and one bucket size.

    `last_buckets`: elements in the buckets that are sent when the backward is all but over. `matrices`: trainable elements that
    Muon would update.
    """

    params: int
    trainable: int
    persistent: int
    tensors: int
    trained_tensors: int
    last_buckets: int
    matrices: int

    @classmethod
    def of(cls, rank: DeepSpeedRank, spec: ModelSpec) -> Sizes:
        """Sum up what one rank has of a model's parameters, which the ledger reads, too."""
        numel, shapes, names = rank.numel, rank.parameters.shapes, rank.parameters.names
        kept = rank.persistent_params
        return cls(
            params=rank.params,
            trainable=rank.trainable,
            persistent=sum(numel[p] for p in kept),
            tensors=len(numel) - len(kept),
            trained_tensors=len(rank.trained),
            last_buckets=_last_buckets(spec, rank.reduce_bucket),
            matrices=sum(numel[p] for p in rank.trained if muon_updates(names[p], len(shapes[p]))),
        )


@dataclass(frozen=True)
class TrafficFacts:
    """Rank 0 of one configuration. Modules are those of one micro batch.

    `sizes` must be those of the configuration's persistence thresholds and ``reduce_bucket_size``.
    """

    sizes: Sizes
    compute: ComputeFacts
    workload: Workload
    zero: ZeroConfig
    layout: ParallelLayout

    forward_modules = fact("modules entered in the forward", lambda c: c.compute.forward_modules)
    recomputed_modules = fact("modules entered again in recomputation", lambda c: c.compute.recomputed_modules)
    backward_modules = fact("modules passed in the backward", lambda c: c.compute.backward_modules)
    stage = fact("the ZeRO stage", lambda c: c.zero.stage)
    ranks = fact("data-parallel ranks", lambda c: c.layout.shard_group)
    local_ranks = fact("data-parallel ranks on one node", lambda c: c.layout.gpus)
    steps_before = fact("ranks − 1, the steps of a ring", lambda c: c.ranks - 1)
    gathered = fact("elements that stage 3 gathers: all but the persistent ones", lambda c: c.sizes.params - c.sizes.persistent)
    persistent = fact("elements of parameters at or below stage3_param_persistence_threshold", lambda c: c.sizes.persistent)
    tensors = fact("parameters that are gathered", lambda c: c.sizes.tensors)
    trained_tensors = fact("parameters with a gradient", lambda c: c.sizes.trained_tensors)
    owned_tensors = fact(
        "parameters whose gradients this rank keeps",
        lambda c: -(-c.trained_tensors // c.ranks) if c.stage in (1, 2) else c.trained_tensors,
    )
    reduced = fact(
        "elements whose gradients are reduced in each micro batch (stages 2 and 3)",
        lambda c: c.sizes.trainable if c.stage >= 2 else 0,
    )
    reduced_last = fact(
        "elements in buckets that are reduced when the backward is over, where reductions overlap it",
        lambda c: c.sizes.last_buckets if c.stage >= 2 and c.overlaps else 0,
    )
    micro_batches = fact("micro batches a step", lambda c: c.workload.batch.grad_accum)
    reduced_at_step = fact(
        "elements whose gradients are reduced once a step (stages 0 and 1)", lambda c: c.sizes.trainable if c.stage < 2 else 0
    )
    updated = fact(
        "elements that this rank's optimizer updates",
        lambda c: c.sizes.trainable if c.stage == 0 else -(-c.sizes.trainable // c.ranks),
    )
    on_gpu = fact("elements that this rank's optimizer updates on the GPU", lambda c: c.updated - c._moved)
    on_host = fact(
        "elements that this rank's optimizer updates on the host, states in memory",
        lambda c: c._moved if c._resolved.optimizer_device is OffloadDevice.CPU else 0,
    )
    on_disk = fact(
        "elements that this rank's optimizer updates on the host, states on disk",
        lambda c: c._moved if c._resolved.optimizer_device is OffloadDevice.NVME else 0,
    )
    last_to_host = fact(
        "elements updated on the host at stage 3 whose gradients leave the GPU when the backward is over",
        lambda c: c._moved * c.sizes.last_buckets // c.sizes.trainable if c.stage == 3 and c._moved else 0,
    )
    params_on_host = fact(
        "this rank's elements of parameters that stay in host memory", lambda c: c._params_at(OffloadDevice.CPU)
    )
    params_on_disk = fact("this rank's elements of parameters that stay on disk", lambda c: c._params_at(OffloadDevice.NVME))
    param_bytes = fact("bytes of one model parameter", lambda c: c._resolved.param_bytes)
    comm_bytes = fact("bytes of one gradient element on its way", lambda c: c._resolved.comm_bytes)
    accum_bytes = fact("bytes of one accumulated gradient element", lambda c: c._resolved.accum_bytes)
    state_bytes = fact(
        "bytes of one element's optimizer states",
        lambda c: find_optimizer(c.workload.numerics.optimizer).bytes_per_element(c.sizes.matrices / max(1, c.sizes.trainable)),
    )
    repeats = fact("micro batches after the first", lambda c: c.micro_batches - 1)

    @cached_property
    def _resolved(self) -> ResolvedConfig:
        return resolve_config(self.workload, self.zero)

    @cached_property
    def _moved(self) -> int:
        """Elements whose update leaves the GPU."""
        if self._resolved.optimizer_device is OffloadDevice.NONE:
            return 0
        return round(self.updated * (self.zero.offload_optimizer.ratio if self.stage == 3 else 1))

    def _params_at(self, device: OffloadDevice) -> int:
        return -(-self.gathered // self.ranks) if self._resolved.param_device is device else 0

    @property
    def one_node(self) -> bool:
        """Whether the ranks that shard are on one node."""
        return self.layout.shards_on_one_node

    @property
    def pinned(self) -> bool:
        """Whether what is offloaded lies in pinned memory."""
        zero = self.zero
        return zero.offload_optimizer.pin_memory if zero.offload_optimizer else zero.offload_param.pin_memory

    @property
    def mixed(self) -> bool:
        """Whether the model is in 16 bits."""
        return self._resolved.param_bytes == 2

    @property
    def overlaps(self) -> bool:
        """Whether collectives overlap the computation."""
        return self.zero.overlaps_comm


def _last_buckets(spec: ModelSpec, bucket: int) -> int:
    """Elements of the buckets that are sent once the first unit's gradients come, which are the last of the backward.

    A bucket is sent when the next gradient does not fit, so what the blocks leave behind goes only then.
    Source: deepspeed/runtime/zero/stage3.py, reduce_independent_p_g_buckets_and_remove_grads
    """
    held = late = 0
    for place, unit in reversed(list(enumerate(spec.units))):
        own = [tensor.numel for tensor in reversed(unit.tensors) if tensor.trainable and tensor.tied_to is None]
        for numel in own * unit.count:
            if held and held + numel > bucket:
                late += held if place == 0 else 0
                held = 0
            held += numel
    return late + held
