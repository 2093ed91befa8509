"""Sums over a model's parameters that DeepSpeed's facts need: parts, groups and what is kept. Counts are elements of a rank."""

from __future__ import annotations

from dataclasses import dataclass

from zeroplan.core.workload import Precision, Workload
from zeroplan.core.zero_config import OffloadDevice, ZeroConfig
from zeroplan.engines.deepspeed.groups import flat_group, padded, persistent, secondary_shard, sub_groups
from zeroplan.engines.deepspeed.resolution import Resolution, groups_on_gpu, muon_updates
from zeroplan.engines.deepspeed.swapping import Swapping
from zeroplan.ledger.derive import pow2, shard
from zeroplan.models.spec import ModelSpec, Tensor


@dataclass(frozen=True, slots=True)
class Parts:
    """This rank's parts of the parameters at stage 3, and the largest of them.

    Attributes:
        sharded: of trainable parameters.
        frozen: of the others.
        matrix: of trainable parameters that Muon updates; below stage 3 their whole elements.
        largest_param: elements of the largest trainable parameter.
        largest_shard: of its part.
        blocks: bytes of one pinned block for each part, each rounded to a power of two; of those that go to files, none.
    """

    sharded: int
    frozen: int
    matrix: int
    largest_param: int
    largest_shard: int
    blocks: int


def parts(spec: ModelSpec, *, ranks: int, width: int, whole_matrices: bool, least_in_file: int | None = None) -> Parts:
    """Of a model whose parameters have `width` bytes an element; every parameter is padded by itself.

    `least_in_file`: bytes from which on a part goes to a file (None: none does).
    """
    sharded = frozen = matrix = largest = largest_shard = blocks = 0
    for unit in spec.units:
        for t in unit.tensors:
            if t.tied_to is not None:
                continue
            part = shard(t.numel, ranks)
            if least_in_file is None or part * width < least_in_file:
                blocks += pow2(part * width) * unit.count
            if not t.trainable:
                frozen += part * unit.count
                continue
            largest, largest_shard = max(largest, t.numel), max(largest_shard, part)
            sharded += part * unit.count
            if muon_updates(f"{unit.name}.{t.name}", len(t.shape)):
                matrix += (t.numel if whole_matrices else part) * unit.count
    if not spec.has_shapes:
        largest = spec.largest_module or 0  # a bare count's one stand-in tensor says nothing of its layers
    return Parts(sharded, frozen, matrix, largest, largest_shard, blocks)


@dataclass(frozen=True, slots=True)
class Files:
    """NVMe offload's files and locked buffers, all aligned; elements. See Note [Swapping].

    Attributes:
        params: in files, of parameters.
        param_buffer: of one buffer that parameters pass through.
        reserve: of the buffer in which a step collects updated parameters.
        states: in files, of masters and of each state.
        gradients: in files, of gradients.
        buffer: of one buffer that sub-groups pass through.
    """

    params: int = 0
    param_buffer: int = 0
    reserve: int = 0
    states: int = 0
    gradients: int = 0
    buffer: int = 0


@dataclass(frozen=True, slots=True)
class Groups:
    """What this rank's optimizer steps at once: one group below stage 3, sub-groups there.

    Attributes:
        sizes: elements of each.
        staying: how many of them a partial offload leaves on the GPU.
    """

    sizes: tuple[int, ...]
    staying: int

    @property
    def largest(self) -> int:
        """Elements of the largest."""
        return max(self.sizes, default=0)

    @property
    def on_gpu(self) -> int:
        """Elements that a partial offload leaves on the GPU."""
        return sum(self.sizes[: self.staying])

    def swapped(self, resolved: Resolution) -> int:
        """Elements of the groups whose states go to files."""
        if resolved.optimizer_device is not OffloadDevice.NVME:
            return 0
        return sum(size for size in self.sizes if size * resolved.master_bytes >= resolved.least_swapped)


def step_groups(spec: ModelSpec, zero: ZeroConfig, ranks: int, flat: int) -> Groups:
    """The groups; `flat` is the flat group's elements on all ranks."""
    if zero.stage < 3:
        return Groups((flat // ranks,) if zero.stage else (), 0)
    shards = trainable_shards(spec, ranks)
    sizes = tuple(sum(shards[p] for p in group) for group in sub_groups(range(len(shards)), shards, zero.sub_group_size))
    return Groups(sizes, groups_on_gpu(len(sizes), zero))


def files_of(spec: ModelSpec, zero: ZeroConfig, resolved: Resolution, ranks: int) -> Files:
    """What NVMe offload has in files and in locked buffers."""
    optimizer, params = resolved.optimizer_device is OffloadDevice.NVME, resolved.param_device is OffloadDevice.NVME
    if zero.stage < 3 or not (optimizer or params):
        return Files()
    rules, shards = Swapping.of(zero, resolved), trainable_shards(spec, ranks)
    groups = [[shards[p] for p in group] for group in sub_groups(range(len(shards)), shards, zero.sub_group_size)]
    counts = [sum(group) for group in groups]
    w, m = resolved.param_bytes, resolved.master_bytes
    every = [*shards, *(shard(t.numel, ranks) for t, count in spec.tensor_groups() if not t.trainable for _ in range(count))]
    return Files(
        params=rules.param_files(every, w) if params else 0,
        param_buffer=rules.whole(zero.offload_param.buffer_size, w) if params else 0,
        reserve=rules.reserve(groups, w) if params else 0,
        states=rules.state_files(counts, m) if optimizer else 0,
        gradients=rules.gradient_files(groups, m) if optimizer else 0,
        buffer=rules.whole(max(counts, default=0), m) if optimizer else 0,
    )


def trainable_shards(spec: ModelSpec, ranks: int) -> list[int]:
    """This rank's elements of every trainable parameter, in order."""
    counts: list[int] = []
    for unit in spec.units:
        counts += [shard(t.numel, ranks) for t in unit.tensors if t.trainable and t.tied_to is None] * unit.count
    return counts


def persistent_elements(spec: ModelSpec, zero: ZeroConfig, ranks: int) -> int:
    """Elements of the parameters that stay gathered, each padded as it is gathered."""
    threshold, most = zero.param_persistence_threshold, zero.model_persistence_threshold
    small = [(t.numel, count) for t, count in spec.tensor_groups() if t.numel <= threshold]
    if sum(numel * count for numel, count in small) > most:
        numel = [t.numel for _, t in spec.tensors()]
        small = [(numel[p], 1) for p in persistent(numel, threshold, most)]
    return sum(shard(numel, ranks) * ranks * count for numel, count in small)


def secondary_shards(spec: ModelSpec, zero: ZeroConfig, ranks: int) -> list[int]:
    """This rank's elements of every parameter's second part."""
    if zero.stage < 3 or zero.zero_hpz_partition_size <= 1:
        return []
    counts: list[int] = []
    for tensor, count in spec.tensor_groups():
        counts += [secondary_shard(tensor.numel, ranks, zero.zero_hpz_partition_size)] * count
    return counts


def saved_weights(spec: ModelSpec, workload: Workload, zero: ZeroConfig, resolved: Resolution, ranks: int) -> int:
    """Elements of the gathered weights that autograd keeps from the forward to their backward; see saved_weights.py.

    Of the blocks that are recomputed, those of one at a time. A single rank's weights are its shards, unless they are fetched.
    """
    alone = ranks == 1 and resolved.param_device is OffloadDevice.NONE
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


def flat_elements(spec: ModelSpec, zero: ZeroConfig, ranks: int, width: int) -> int:
    """Elements of the trainable parameters as one flat tensor, padded."""
    if not zero.parameter_alignment:
        return padded(spec.trainable, ranks)
    numel = [t.numel for _, t in spec.tensors() if t.trainable]
    order = range(len(numel))
    return flat_group(order, numel, ranks, width=width, round_robin=zero.round_robin_gradients, aligned=True).numel


def _of_linear(tensor: Tensor) -> bool:
    """Whether a parameter is a linear layer's; of a matrix that nobody named it is assumed."""
    return tensor.kind in ("linear", "head") if tensor.kind else len(tensor.shape) >= 2


def bucket_bytes(spec: ModelSpec, workload: Workload, stage: int, resolved: Resolution) -> int:
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
