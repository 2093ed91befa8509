"""The numbers that DeepSpeed's ledger reads: counts of elements after padding, partitioning and grouping, and widths.

Everything that needs the list of parameters is summed here, once; the lines are then plain arithmetic.
Counts are elements of one rank unless said; ``bytes`` in a name means bytes an element.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroplan.core.buffers import Place
from zeroplan.core.workload import DType, OptimizerKind, Precision, Workload
from zeroplan.core.zero_config import Device, ZeroConfig
from zeroplan.ledger.derive import pow2, shard
from zeroplan.ledger.optimizers import Optimizer, find_optimizer
from zeroplan.models.spec import ModelSpec

#: DeepSpeed pads a flat group so that each rank's part starts on 4 bytes: 2 elements of 2 bytes.
#: Source: runtime/zero/stage_1_and_2.py, nccl_start_alignment_factor.
ALIGN_ELEMENTS = 2


#: What the names in the formulas mean.
GLOSSARY = {
    "params": "elements of the whole model",
    "trainable": "elements that receive a gradient",
    "frozen": "elements without gradient",
    "ranks": "data-parallel ranks",
    "local_ranks": "of those, the ones on one node",
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
    "persistent": "elements of parameters at or below stage3_param_persistence_threshold",
    "largest_param": "elements of the largest trainable parameter",
    "sub_group": "this rank's elements of the largest sub-group (sub_group_size)",
    "matrix": "elements that Muon updates",
    "rest": "elements that Muon leaves to Adam",
    "reduce_bucket": "reduce_bucket_size, elements",
    "buckets": "buckets at once: two with overlap_comm",
    "pinned_grad_block": "bytes of the fp32 gradients' pinned blocks, each sub-group's rounded to a power of two",
    "small_param_blocks": "bytes of one pinned block for each parameter's part, each rounded to a power of two",
    "swap_buffers": "offload_optimizer.buffer_count",
    "swap_buffer": "elements of one swap buffer: the largest sub-group",
    "param_swap_buffers": "offload_param.buffer_count",
    "param_swap_buffer": "offload_param.buffer_size, elements",
    "params_in_cpu": "elements of parameters that stay in host memory (max_in_cpu)",
    "cublas_workspace": "bytes of one cuBLAS workspace on this GPU",
}


@dataclass(frozen=True, slots=True)
class Facts:
    """What one rank of one run holds, in elements, and how wide the elements are."""

    stage: int
    offload_optimizer: Device
    offload_param: Device
    params: int
    trainable: int
    frozen: int
    ranks: int
    local_ranks: int
    param_bytes: int
    master_bytes: int  # 0 where the optimizer steps the model's own parameters
    accum_bytes: int
    comm_bytes: int
    state_bytes: int
    flat_group: int  # trainable parameters, padded (stages 1 and 2)
    kept_on_gpu: int  # of what this rank's optimizer updates: a partial offload's part on the GPU
    stepped_nvme: int
    sharded: int  # this rank's part of the trainable parameters (stage 3)
    frozen_sharded: int
    persistent: int
    largest_param: int
    largest_shard: int
    sub_group: int  # largest sub-group's elements
    matrix: int  # of `stepped`: what Muon updates
    rest: int
    reduce_bucket: int
    buckets: int
    grad_accum: int
    pinned_grad_block: int  # bytes of the fp32 gradients' pinned blocks, every sub-group rounded by itself
    small_param_blocks: int  # bytes of pinned blocks of the parameters' first, separate shards
    swap_buffers: int
    swap_buffer: int
    param_swap_buffers: int
    param_swap_buffer: int
    params_in_cpu: int
    cublas_workspace: int
    overlap_comm: bool
    contiguous_gradients: bool
    full_fp32_grads: bool  # BF16_Optimizer
    flat_stage0: bool  # stage 0 with a 16-bit wrapper
    pin_optimizer: bool
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
        return self.stepped if self.offload_optimizer is Device.NONE else self.kept_on_gpu

    @property
    def stepped_host(self) -> int:
        """Of those, the ones updated on the host."""
        if self.offload_optimizer is Device.NONE:
            return 0
        elsewhere = self.kept_on_gpu + self.stepped_nvme
        return self.stepped - elsewhere if elsewhere else self.stepped

    @property
    def pinned(self) -> Place:
        """Where the offloaded optimizer's transfer buffers are."""
        return Place.PINNED if self.pin_optimizer else Place.DRAM


def sub_groups(spec: ModelSpec, ranks: int, sub_group_size: int) -> list[int]:
    """The elements of this rank in each stage-3 sub-group.

    A sub-group closes with the parameter that reaches `sub_group_size`, so it may exceed it by one parameter's part.
    Source: deepspeed/runtime/zero/stage3.py, _create_fp16_sub_groups.
    """
    total = sum(-(-t.numel // ranks) * n for t, n in spec.tensor_groups() if t.trainable)
    if total <= sub_group_size:
        return [total] if total else []
    groups, current = [], 0
    for _, tensor in spec.tensors():
        if tensor.trainable:
            current += -(-tensor.numel // ranks)
            if current >= sub_group_size:
                groups.append(current)
                current = 0
    return [*groups, current] if current else groups


def _width(dtype: DType | None, default: int) -> int:
    return default if dtype is None else dtype.bytes


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether Muon updates it. Source: deepspeed/__init__.py, set_optimizer_flags."""
    return len(shape) >= 2 and "embed" not in name.lower() and "lm_head" not in name.lower()


def facts(
    spec: ModelSpec, workload: Workload, zero: ZeroConfig, *, ranks: int, local_ranks: int, cublas_workspace: int
) -> Facts:
    """The facts of rank 0 for one configuration."""
    optimizer = find_optimizer(workload.optimizer)
    stage = zero.stage
    w = workload.param_bytes
    fp32 = w == 4
    masters_16 = (
        zero.bf16_master_weights_and_grads or zero.fp16_master_weights_and_grads or workload.precision is Precision.PURE
    )
    m = w if masters_16 else 4
    if stage == 0 and fp32:
        m = 0  # DeepSpeed steps the model's own fp32 parameters
    accum = _width(zero.grad_accum_dtype, w)
    offload = zero.offload_optimizer.device if stage else Device.NONE
    offload_param = zero.offload_param.device if stage == 3 else Device.NONE
    if stage in (1, 2) and offload is Device.NVME:
        offload = Device.CPU  # DeepSpeed only asks whether the device is "none" there
    bf16_optimizer = (
        stage == 1
        and workload.dtype is DType.BF16
        and not fp32
        and accum == 4
        and zero.offload_optimizer.device is not Device.CPU
    )
    if bf16_optimizer:
        offload = Device.NONE

    flat_group = -(-spec.trainable // (ALIGN_ELEMENTS * ranks)) * ALIGN_ELEMENTS * ranks
    threshold = zero.param_persistence_threshold
    sharded = frozen_sharded = persistent = largest_param = largest_shard = matrix = small_blocks = 0
    for unit in spec.units:
        for t in unit.tensors:
            if t.tied_to is not None:
                continue
            part = -(-t.numel // ranks)
            largest_param = max(largest_param, t.numel if t.trainable else 0)
            largest_shard = max(largest_shard, part if t.trainable else 0)
            small_blocks += pow2(part * w) * unit.count
            if t.numel <= threshold:
                persistent += t.numel * unit.count
            if t.trainable:
                sharded += part * unit.count
                if _is_matrix(f"{unit.name}.{t.name}", t.shape):
                    matrix += (part if stage == 3 else t.numel) * unit.count
            else:
                frozen_sharded += part * unit.count
    if not spec.has_shapes:
        largest_param = spec.largest_module or 0  # a bare count's one stand-in tensor says nothing of its layers
    if persistent > zero.model_persistence_threshold:
        persistent = zero.model_persistence_threshold
    groups = sub_groups(spec, ranks, zero.sub_group_size) if stage == 3 else [flat_group // ranks]

    stepped = {0: spec.trainable, 3: sharded}.get(stage, flat_group // ranks)
    kept = 0
    if stage == 3 and offload is Device.CPU and zero.offload_optimizer.ratio < 1:
        kept = sum(groups[: int((1 - zero.offload_optimizer.ratio) * len(groups))])
    on_nvme = 0
    if offload is Device.NVME:
        least = max(1 << 20, zero.aio.block_size)  # smaller tensors are not worth a file; swap_tensor/optimizer_utils.py
        on_nvme = sum(g for g in groups if g * m >= least)
    if stage in (1, 2):
        matrix = -(-matrix // ranks)
    off = zero.offload_optimizer
    return Facts(
        stage=stage,
        offload_optimizer=offload,
        offload_param=offload_param,
        params=spec.params,
        trainable=spec.trainable,
        frozen=spec.frozen,
        ranks=ranks,
        local_ranks=local_ranks,
        param_bytes=w,
        master_bytes=m,
        accum_bytes=accum,
        comm_bytes=_width(zero.communication_data_type, 2 if workload.precision is Precision.AUTOCAST else w),
        state_bytes=(m or w) if not (masters_16 and not zero.bf16_optimizer_states and zero.fp32_optimizer_states) else 4,
        flat_group=flat_group,
        kept_on_gpu=kept,
        stepped_nvme=on_nvme,
        sharded=sharded,
        frozen_sharded=frozen_sharded,
        persistent=persistent,
        largest_param=largest_param,
        largest_shard=largest_shard,
        sub_group=max(groups, default=0),
        matrix=min(matrix, stepped),
        rest=stepped - min(matrix, stepped),
        reduce_bucket=zero.reduce_bucket_size,
        buckets=2 if zero.overlaps_comm else 1,
        grad_accum=workload.grad_accum,
        pinned_grad_block=sum(pow2(g * m) for g in groups[len(groups) - _host_groups(groups, zero) :]),
        small_param_blocks=small_blocks,
        swap_buffers=off.buffer_count,
        swap_buffer=max(groups, default=0),
        param_swap_buffers=zero.offload_param.buffer_count,
        param_swap_buffer=zero.offload_param.buffer_size,
        params_in_cpu=min(sharded, zero.offload_param.max_in_cpu),
        cublas_workspace=cublas_workspace,
        overlap_comm=zero.overlaps_comm,
        contiguous_gradients=zero.contiguous_gradients or offload is not Device.NONE,
        full_fp32_grads=bf16_optimizer,
        flat_stage0=stage == 0 and not fp32,
        pin_optimizer=off.pin_memory,
        second_moment_always=offload is not Device.NONE and optimizer.name == "lion",
        optimizer=optimizer,
        optimizer_kind=workload.optimizer_kind,
    )


def _host_groups(groups: list[int], zero: ZeroConfig) -> int:
    """How many of the sub-groups are offloaded: all but the first int((1 − ratio) × count). Source: stage3.py."""
    return len(groups) - int((1 - zero.offload_optimizer.ratio) * len(groups))
