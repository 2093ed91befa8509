"""The facts that DeepSpeed's lines of traffic read: one rank of one configuration, in elements, calls and bytes."""

from __future__ import annotations

from dataclasses import dataclass

from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import OffloadDevice, ZeroConfig
from zeroplan.engines.compute_traffic import ComputeFacts
from zeroplan.engines.deepspeed.rank import DeepSpeedRank
from zeroplan.engines.deepspeed.resolved_config import muon_updates, resolve_config
from zeroplan.ledger.line import means
from zeroplan.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficFacts:
    """One rank of one configuration. Modules are those of one micro batch."""

    forward_modules: int
    recomputed_modules: int
    backward_modules: int
    stage: int
    ranks: int = means("data-parallel ranks")
    local_ranks: int = means("data-parallel ranks on one node")
    steps_before: int = means("ranks − 1, the steps of a ring")
    gathered: int = means("elements that stage 3 gathers: all but the persistent ones")
    persistent: int = means("elements of parameters at or below stage3_param_persistence_threshold")
    tensors: int = means("parameters that are gathered")
    trained_tensors: int = means("parameters with a gradient")
    owned_tensors: int = means("parameters whose gradients this rank keeps")
    reduced: int = means("elements whose gradients are reduced in each micro batch (stages 2 and 3)")
    reduced_last: int = means("elements in buckets that are reduced when the backward is over, where reductions overlap it")
    micro_batches: int = means("micro batches a step")
    reduced_at_step: int = means("elements whose gradients are reduced once a step (stages 0 and 1)")
    updated: int = means("elements that this rank's optimizer updates")
    on_gpu: int = means("elements that this rank's optimizer updates on the GPU")
    on_host: int = means("elements that this rank's optimizer updates on the host, states in memory")
    on_disk: int = means("elements that this rank's optimizer updates on the host, states on disk")
    last_to_host: int = means("elements updated on the host at stage 3 whose gradients leave the GPU when the backward is over")
    params_on_host: int = means("this rank's elements of parameters that stay in host memory")
    params_on_disk: int = means("this rank's elements of parameters that stay on disk")
    param_bytes: int = means("bytes of one model parameter")
    comm_bytes: int = means("bytes of one gradient element on its way")
    accum_bytes: int = means("bytes of one accumulated gradient element")
    state_bytes: int = means("bytes of one element's optimizer states")
    repeats: int = means("micro batches after the first")
    one_node: bool
    pinned: bool
    mixed: bool
    overlaps: bool


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


def traffic_facts(
    sizes: Sizes, compute: ComputeFacts, workload: Workload, zero: ZeroConfig, layout: ParallelLayout
) -> TrafficFacts:
    """Return the facts of rank 0.

    `sizes` must be those of the configuration's persistence thresholds and ``reduce_bucket_size``.
    """
    stage, ranks = zero.stage, layout.shard_group
    resolved = resolve_config(workload, zero)
    updated = sizes.trainable if stage == 0 else -(-sizes.trainable // ranks)
    device, param_device = resolved.optimizer_device, resolved.param_device
    moved = 0 if device is OffloadDevice.NONE else round(updated * (zero.offload_optimizer.ratio if stage == 3 else 1))
    params = -(-(sizes.params - sizes.persistent) // ranks)
    return TrafficFacts(
        forward_modules=compute.forward_modules,
        recomputed_modules=compute.recomputed_modules,
        backward_modules=compute.backward_modules,
        stage=stage,
        ranks=ranks,
        local_ranks=layout.gpus,
        steps_before=ranks - 1,
        gathered=sizes.params - sizes.persistent,
        persistent=sizes.persistent,
        tensors=sizes.tensors,
        trained_tensors=sizes.trained_tensors,
        owned_tensors=-(-sizes.trained_tensors // ranks) if stage in (1, 2) else sizes.trained_tensors,
        reduced=sizes.trainable if stage >= 2 else 0,
        reduced_last=sizes.last_buckets if stage >= 2 and zero.overlaps_comm else 0,
        micro_batches=workload.batch.grad_accum,
        reduced_at_step=sizes.trainable if stage < 2 else 0,
        updated=updated,
        on_gpu=updated - moved,
        on_host=moved if device is OffloadDevice.CPU else 0,
        on_disk=moved if device is OffloadDevice.NVME else 0,
        last_to_host=moved * sizes.last_buckets // sizes.trainable if stage == 3 and moved else 0,
        params_on_host=params if param_device is OffloadDevice.CPU else 0,
        params_on_disk=params if param_device is OffloadDevice.NVME else 0,
        param_bytes=resolved.param_bytes,
        comm_bytes=resolved.comm_bytes,
        accum_bytes=resolved.accum_bytes,
        state_bytes=find_optimizer(workload.numerics.optimizer).bytes_per_element(sizes.matrices / max(1, sizes.trainable)),
        repeats=workload.batch.grad_accum - 1,
        one_node=layout.shards_on_one_node,
        pinned=zero.offload_optimizer.pin_memory if zero.offload_optimizer else zero.offload_param.pin_memory,
        mixed=resolved.param_bytes == 2,
        overlaps=zero.overlaps_comm,
    )


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
