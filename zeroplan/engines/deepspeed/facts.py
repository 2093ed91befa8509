"""The numbers that DeepSpeed's ledger reads: counts of elements after padding, partitioning and grouping, and widths.

Everything that needs the list of parameters is summed here, once; the lines are then plain arithmetic.
Counts are elements of one rank unless said; ``bytes`` in a name means bytes an element.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroplan.core.buffers import Buffer, Place
from zeroplan.core.optimizer_row import Optimizer
from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.workload import OptimizerKind, Workload
from zeroplan.core.zero_config import OffloadDevice, ZeroConfig
from zeroplan.engines.deepspeed.counts import (
    bucket_bytes,
    files_of,
    flat_elements,
    parts,
    persistent_elements,
    saved_weights,
    secondary_shards,
    step_groups,
)
from zeroplan.engines.deepspeed.resolution import Resolution, resolution
from zeroplan.ledger.derive import pow2, shard
from zeroplan.models.spec import ModelSpec

#: What the names in the formulas mean.
GLOSSARY = {
    "params": "elements of the whole model",
    "trainable": "elements that receive a gradient",
    "frozen": "elements without gradient",
    "ranks": "data-parallel ranks",
    "param_bytes": "bytes of one model parameter",
    "master_bytes": "bytes of one master parameter",
    "accum_bytes": "bytes of one accumulated gradient element",
    "comm_bytes": "bytes of one gradient element on its way",
    "state_bytes": "bytes of one element of an optimizer state",
    "flat_group": "trainable elements, padded to a multiple of 2 × ranks",
    "kept_on_gpu": "elements that a partial offload updates on the GPU",
    "stepped_nvme": "elements whose optimizer states are on disk",
    "sharded": "elements of this rank's parts of the trainable parameters, each padded",
    "frozen_sharded": "elements of this rank's parts of the frozen parameters, each padded",
    "persistent": "elements of parameters at or below stage3_param_persistence_threshold, each padded",
    "secondary": "elements of this rank's second parts of all parameters (zero_hpz_partition_size)",
    "secondary_blocks": "bytes of one pinned block for each parameter's second part, each rounded to a power of two",
    "saved_weights": "elements of linear layers' weights that autograd keeps until their backward",
    "largest_param": "elements of the largest trainable parameter",
    "sub_group": "this rank's elements of the largest sub-group (sub_group_size)",
    "matrix": "elements that Muon updates",
    "rest": "elements that Muon leaves to Adam",
    "reduce_bucket": "reduce_bucket_size, elements",
    "bucket_bytes": "bytes of one element of the gradient buckets, one for each dtype that travels",
    "least_swapped": "bytes from which on a tensor is swapped to disk",
    "buckets": "buckets at once: two with overlap_comm",
    "pinned_grad_block": "bytes of the fp32 gradients' pinned blocks, each sub-group's rounded to a power of two",
    "small_param_blocks": "bytes of one pinned block for each parameter's part not in a file, each rounded to a power of two",
    "swap_buffers": "offload_optimizer.buffer_count",
    "swap_buffer": "elements of one swap buffer: the largest sub-group, aligned",
    "states_in_files": "elements of the sub-groups whose states are in files, each aligned",
    "grads_in_files": "elements of gradients in files: of parameters large enough, without what is not aligned",
    "params_in_files": "elements of parameters in files: of those large enough, each aligned",
    "swap_reserve": "elements of the largest sub-group's parameters, each aligned, where not all fit into max_in_cpu",
    "param_swap_buffers": "offload_param.buffer_count",
    "param_swap_buffer": "offload_param.buffer_size, elements, aligned",
    "params_in_cpu": "elements of parameters that stay in host memory (max_in_cpu)",
    "cublas_workspace": "bytes of one cuBLAS workspace on this GPU",
}


@dataclass(frozen=True, slots=True)
class Facts(Resolution):
    """What one rank of one run holds, in elements, and how wide the elements are."""

    stage: int
    params: int
    trainable: int
    frozen: int
    ranks: int
    flat_group: int  # trainable parameters, padded (stages 1 and 2)
    kept_on_gpu: int  # of what this rank's optimizer updates: a partial offload's part on the GPU
    stepped_nvme: int
    sharded: int  # this rank's part of the trainable parameters (stage 3)
    frozen_sharded: int
    persistent: int
    secondary: int
    secondary_blocks: int
    saved_weights: int  # without memory_efficient_linear
    largest_param: int
    largest_shard: int
    sub_group: int  # largest sub-group's elements
    matrix: int  # of `stepped`: what Muon updates
    rest: int
    bucket_bytes: int
    reduce_bucket: int
    buckets: int
    grad_accum: int
    pinned_grad_block: int  # bytes of the fp32 gradients' pinned blocks, every sub-group rounded by itself
    small_param_blocks: int  # bytes of pinned blocks of the parameters' first, separate shards
    swap_buffers: int
    swap_buffer: int
    param_swap_buffers: int
    param_swap_buffer: int
    states_in_files: int
    grads_in_files: int
    params_in_files: int
    swap_reserve: int
    params_in_cpu: int
    cublas_workspace: int
    pin_optimizer: bool
    pin_param: bool
    second_moment_always: bool  # DeepSpeedCPULion
    optimizer: Optimizer
    optimizer_kind: OptimizerKind

    @property
    def stepped(self) -> int:
        """Elements that this rank's optimizer updates."""
        if self.stage == 0:
            return self.trainable
        return self.sharded if self.stage == 3 else shard(self.flat_group, self.ranks)

    @property
    def stepped_hbm(self) -> int:
        """Of those, the ones updated on the GPU."""
        return self.stepped if self.optimizer_device is OffloadDevice.NONE else self.kept_on_gpu

    @property
    def stepped_host(self) -> int:
        """Of those, the ones updated on the host."""
        if self.optimizer_device is OffloadDevice.NONE:
            return 0
        elsewhere = self.kept_on_gpu + self.stepped_nvme
        return self.stepped - elsewhere if elsewhere else self.stepped

    @property
    def pinned(self) -> Place:
        """Where the offloaded optimizer's transfer buffers are."""
        return Place.PINNED if self.pin_optimizer else Place.DRAM


def facts(spec: ModelSpec, workload: Workload, zero: ZeroConfig, layout: ParallelLayout, *, cublas_workspace: int) -> Facts:
    """The facts of rank 0 for one configuration."""
    optimizer = find_optimizer(workload.optimizer)
    stage, ranks = zero.stage, layout.shard_group
    resolved = resolution(workload, zero)
    w, m, offload = resolved.param_bytes, resolved.master_bytes, resolved.optimizer_device
    flat = flat_elements(spec, zero, ranks, w)
    least = resolved.least_swapped if resolved.param_device is OffloadDevice.NVME else None
    part = parts(spec, ranks=ranks, width=w, whole_matrices=stage < 3, least_in_file=least)
    files = files_of(spec, zero, resolved, ranks)
    groups = step_groups(spec, zero, ranks, flat)
    stepped = sum(groups.sizes) if stage else spec.trainable
    matrix = min(-(-part.matrix // ranks) if stage in (1, 2) else part.matrix, stepped)
    secondary = secondary_shards(spec, zero, ranks)
    off = zero.offload_optimizer
    return Facts(
        **resolved.values(),
        stage=stage,
        params=spec.params,
        trainable=spec.trainable,
        frozen=spec.frozen,
        ranks=ranks,
        flat_group=flat,
        kept_on_gpu=groups.on_gpu,
        stepped_nvme=groups.swapped(resolved),
        sharded=part.sharded,
        frozen_sharded=part.frozen,
        persistent=persistent_elements(spec, zero, ranks),
        secondary=sum(secondary),
        secondary_blocks=sum(pow2(count * w) for count in secondary),
        saved_weights=saved_weights(spec, workload, zero, resolved, ranks),
        largest_param=part.largest_param,
        largest_shard=part.largest_shard,
        sub_group=groups.largest,
        matrix=matrix,
        rest=stepped - matrix,
        bucket_bytes=bucket_bytes(spec, workload, stage, resolved),
        reduce_bucket=zero.reduce_bucket_size,
        buckets=2 if zero.overlaps_comm else 1,
        grad_accum=workload.grad_accum,
        pinned_grad_block=sum(pow2(size * m) for size in groups.sizes[groups.staying :]),
        small_param_blocks=part.blocks,
        swap_buffers=off.buffer_count,
        swap_buffer=files.buffer,
        param_swap_buffers=zero.offload_param.buffer_count,
        param_swap_buffer=files.param_buffer,
        states_in_files=files.states,
        grads_in_files=files.gradients,
        params_in_files=files.params,
        swap_reserve=files.reserve,
        params_in_cpu=min(part.sharded, zero.offload_param.max_in_cpu),
        cublas_workspace=cublas_workspace,
        pin_optimizer=off.pin_memory,
        pin_param=zero.offload_param.pin_memory,
        second_moment_always=offload is not OffloadDevice.NONE and Buffer.OPTIM_EXP_AVG_SQ in optimizer.host_states,
        optimizer=optimizer,
        optimizer_kind=workload.optimizer_kind,
    )
