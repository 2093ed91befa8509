"""The numbers that DeepSpeed's ledger reads: counts of elements after padding, partitioning and grouping, and widths.

Everything that needs the list of parameters is summed here, once; the lines are then plain arithmetic.
Counts are elements of one rank unless said; ``bytes`` in a name means bytes an element.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroplan.core.buffers import Place
from zeroplan.core.workload import OptimizerKind, Precision, Workload
from zeroplan.core.zero_config import Device, ZeroConfig
from zeroplan.engines.deepspeed.groups import flat_group, padded, persistent, secondary_shard, sub_groups
from zeroplan.engines.deepspeed.resolution import Resolution, groups_on_gpu, muon_updates, resolution
from zeroplan.ledger.derive import pow2, shard
from zeroplan.ledger.optimizers import Optimizer, find_optimizer
from zeroplan.models.spec import ModelSpec, Tensor

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
    "small_param_blocks": "bytes of one pinned block for each parameter's part, each rounded to a power of two",
    "swap_buffers": "offload_optimizer.buffer_count",
    "swap_buffer": "elements of one swap buffer: the largest sub-group",
    "param_swap_buffers": "offload_param.buffer_count",
    "param_swap_buffer": "offload_param.buffer_size, elements",
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
    local_ranks: int
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
        return self.stepped if self.optimizer_device is Device.NONE else self.kept_on_gpu

    @property
    def stepped_host(self) -> int:
        """Of those, the ones updated on the host."""
        if self.optimizer_device is Device.NONE:
            return 0
        elsewhere = self.kept_on_gpu + self.stepped_nvme
        return self.stepped - elsewhere if elsewhere else self.stepped

    @property
    def pinned(self) -> Place:
        """Where the offloaded optimizer's transfer buffers are."""
        return Place.PINNED if self.pin_optimizer else Place.DRAM


def _shards(spec: ModelSpec, ranks: int) -> list[int]:
    """This rank's elements of every trainable parameter, in order."""
    counts: list[int] = []
    for unit in spec.units:
        counts += [shard(t.numel, ranks) for t in unit.tensors if t.trainable and t.tied_to is None] * unit.count
    return counts


def _persistent(spec: ModelSpec, zero: ZeroConfig, ranks: int) -> int:
    """Elements of the parameters that stay gathered, each padded as it is gathered."""
    threshold, most = zero.param_persistence_threshold, zero.model_persistence_threshold
    small = [(t.numel, count) for t, count in spec.tensor_groups() if t.numel <= threshold]
    if sum(numel * count for numel, count in small) > most:
        numel = [t.numel for _, t in spec.tensors()]
        small = [(numel[p], 1) for p in persistent(numel, threshold, most)]
    return sum(shard(numel, ranks) * ranks * count for numel, count in small)


def _secondary(spec: ModelSpec, zero: ZeroConfig, ranks: int) -> list[int]:
    """This rank's elements of every parameter's second part."""
    if zero.stage < 3 or zero.zero_hpz_partition_size <= 1:
        return []
    counts: list[int] = []
    for tensor, count in spec.tensor_groups():
        counts += [secondary_shard(tensor.numel, ranks, zero.zero_hpz_partition_size)] * count
    return counts


def _saved_weights(spec: ModelSpec, workload: Workload, zero: ZeroConfig, resolved: Resolution, ranks: int) -> int:
    """Elements of the gathered weights that autograd keeps from the forward to their backward; see saved_weights.py.

    Of the blocks that are recomputed, those of one at a time. A single rank's weights are its shards, unless they are fetched.
    """
    alone = ranks == 1 and resolved.param_device is Device.NONE
    if zero.stage < 3 or zero.memory_efficient_linear or workload.precision is Precision.AUTOCAST or alone:
        return 0
    policy = workload.recomputation
    kept = largest = 0
    for unit in spec.units:
        weights = sum(t.numel for t in unit.tensors if _of_linear(t))
        again = unit.count // policy.every if policy is not None and unit.block else 0
        kept += weights * (unit.count - again)
        largest = max(largest, weights if again else 0)
    return kept + largest


def _flat_elements(spec: ModelSpec, zero: ZeroConfig, ranks: int, width: int) -> int:
    """Elements of the trainable parameters as one flat tensor, padded."""
    if not zero.parameter_alignment:
        return padded(spec.trainable, ranks)
    numel = [t.numel for _, t in spec.tensors() if t.trainable]
    order = range(len(numel))
    return flat_group(order, numel, ranks, width=width, round_robin=zero.round_robin_gradients, aligned=True).numel


def _of_linear(tensor: Tensor) -> bool:
    """Whether a parameter is a linear layer's; of a matrix that nobody named it is assumed."""
    return tensor.kind in ("linear", "head") if tensor.kind else len(tensor.shape) >= 2


def _bucket_bytes(spec: ModelSpec, workload: Workload, stage: int, resolved: Resolution) -> int:
    """Bytes of one element of every bucket of gradients: one for each dtype in which gradients travel.

    Under ``torch_autocast`` the gradients of linear layers travel in 16 bits.
    Source: zero/stage_1_and_2.py, setup_buckets (all buckets have one dtype); zero/stage3.py, ipg_buckets
    """
    travelling = {resolved.comm_bytes}
    if workload.precision is Precision.AUTOCAST:
        travelling = {
            workload.dtype.bytes if _of_linear(t) else resolved.param_bytes for t, _ in spec.tensor_groups() if t.trainable
        }
    if stage == 3:
        return sum(travelling)
    return len(travelling) * (resolved.accum_bytes if resolved.accumulates_apart else resolved.param_bytes)


def facts(
    spec: ModelSpec, workload: Workload, zero: ZeroConfig, *, ranks: int, local_ranks: int, cublas_workspace: int
) -> Facts:
    """The facts of rank 0 for one configuration."""
    optimizer = find_optimizer(workload.optimizer)
    stage = zero.stage
    resolved = resolution(workload, zero)
    w, m, offload = resolved.param_bytes, resolved.master_bytes, resolved.optimizer_device
    flat_elements = _flat_elements(spec, zero, ranks, w)
    sharded = frozen_sharded = largest_param = largest_shard = matrix = small_blocks = 0
    for unit in spec.units:
        for t in unit.tensors:
            if t.tied_to is not None:
                continue
            part = shard(t.numel, ranks)
            small_blocks += pow2(part * w) * unit.count
            if not t.trainable:
                frozen_sharded += part * unit.count
                continue
            largest_param = max(largest_param, t.numel)
            largest_shard = max(largest_shard, part)
            sharded += part * unit.count
            if muon_updates(f"{unit.name}.{t.name}", len(t.shape)):
                matrix += (part if stage == 3 else t.numel) * unit.count
    if not spec.has_shapes:
        largest_param = spec.largest_module or 0  # a bare count's one stand-in tensor says nothing of its layers
    groups, stepped = [], spec.trainable
    if stage == 3:
        shards = _shards(spec, ranks)
        groups = [sum(shards[p] for p in group) for group in sub_groups(range(len(shards)), shards, zero.sub_group_size)]
        stepped = sharded
    elif stage:
        groups = [flat_elements // ranks]
        stepped = flat_elements // ranks
    staying = groups_on_gpu(len(groups), zero) if stage == 3 else 0
    on_nvme = sum(g for g in groups if g * m >= resolved.least_swapped) if offload is Device.NVME else 0
    if stage in (1, 2):
        matrix = -(-matrix // ranks)
    off = zero.offload_optimizer
    secondary = _secondary(spec, zero, ranks)
    return Facts(
        **resolved.values(),
        stage=stage,
        params=spec.params,
        trainable=spec.trainable,
        frozen=spec.frozen,
        ranks=ranks,
        local_ranks=local_ranks,
        flat_group=flat_elements,
        kept_on_gpu=sum(groups[:staying]),
        stepped_nvme=on_nvme,
        sharded=sharded,
        frozen_sharded=frozen_sharded,
        persistent=_persistent(spec, zero, ranks),
        secondary=sum(secondary),
        secondary_blocks=sum(pow2(count * w) for count in secondary),
        saved_weights=_saved_weights(spec, workload, zero, resolved, ranks),
        largest_param=largest_param,
        largest_shard=largest_shard,
        sub_group=max(groups, default=0),
        matrix=min(matrix, stepped),
        rest=stepped - min(matrix, stepped),
        bucket_bytes=_bucket_bytes(spec, workload, stage, resolved),
        reduce_bucket=zero.reduce_bucket_size,
        buckets=2 if zero.overlaps_comm else 1,
        grad_accum=workload.grad_accum,
        pinned_grad_block=sum(pow2(g * m) for g in groups[staying:]),
        small_param_blocks=small_blocks,
        swap_buffers=off.buffer_count,
        swap_buffer=max(groups, default=0),
        param_swap_buffers=zero.offload_param.buffer_count,
        param_swap_buffer=zero.offload_param.buffer_size,
        params_in_cpu=min(sharded, zero.offload_param.max_in_cpu),
        cublas_workspace=cublas_workspace,
        pin_optimizer=off.pin_memory,
        pin_param=zero.offload_param.pin_memory,
        second_moment_always=offload is not Device.NONE and optimizer.name == "lion",
        optimizer=optimizer,
        optimizer_kind=workload.optimizer_kind,
    )
