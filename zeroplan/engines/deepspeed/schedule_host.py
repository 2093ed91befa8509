"""Host memory that DeepSpeed allocates on one rank: pageable and pinned buffers by phase.

Functions named in brackets are those of DeepSpeed 0.19.8's runtime/zero/stage3.py and zero/partition_parameters.py.
What the interpreter and the libraries take comes on top and is not DeepSpeed's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zeroplan.core.buffers import Buffer, Phase, Place
from zeroplan.core.workload import DType
from zeroplan.core.zero_config import OffloadDevice
from zeroplan.engines.deepspeed.groups import padded
from zeroplan.engines.deepspeed.rank import DeepSpeedRank
from zeroplan.engines.deepspeed.versions import Knob
from zeroplan.engines.simulation import HostBytes, HostPhase
from zeroplan.simulate.allocator.pinned_host import PAGE, PinnedAllocator, PinnedConfig


@dataclass(frozen=True, slots=True)
class HostMark:
    """Bytes at the end of a phase, and the most of their sum within it; of both, what they are of.

    `locked` is the part of `pinned` that torch does not hold.
    """

    phase: Phase
    pageable: int
    pinned: int
    peak: int
    alive: HostBytes
    kept: HostBytes
    locked: int = 0

    def host_phase(self) -> HostPhase:
        """Return this mark as the :class:`HostPhase` that an engine's simulation returns."""
        return HostPhase(self.phase, self.peak, self.pinned, self.alive, self.kept, self.locked)

    def repeated(self, step: HostMark) -> HostPhase:
        """This phase in later steps: its temporaries on top of what the first step left, whose end is the mark `step`."""
        passing = {key: self.alive.get(key, 0) - self.kept.get(key, 0) for key in {**self.alive, **self.kept}}
        return replace(HostPhase.of(self.phase, step.kept, passing), pinned=step.pinned, unmapped=step.locked)


class HostRecorder:
    """Adds up host buffers as they come and go, phase by phase.

    Attributes:
        marks: the phases so far.
        buffers: by buffer and whether it is pinned, the most bytes alive at once, as requested.
    """

    def __init__(self, config: PinnedConfig | None = None) -> None:
        self.pins = PinnedAllocator(config or PinnedConfig())
        self.marks: list[HostMark] = []
        self.buffers: dict[tuple[Buffer, bool], int] = {}
        self._alive: dict[tuple[Buffer, bool], int] = {}
        self._blocks: list[tuple[Buffer, int, int]] = []  # (buffer, bytes, handle of the pinned allocator or -1)
        self._pageable = 0
        self._locked = 0
        self._peak = 0
        self._at_peak: HostBytes = {}

    def lock(self, nbytes: int, buffer: Buffer) -> None:
        """Allocate whole pages that stay locked and are no block of torch's pinned cache."""
        self._locked += -(-nbytes // PAGE) * PAGE
        self._add(nbytes, (buffer, True))

    def alloc(self, nbytes: int, buffer: Buffer, *, pinned: bool = False) -> int:
        """Allocate a block and return its handle."""
        if pinned:
            block = self.pins.alloc(nbytes)
        else:
            block = -1
            self._pageable += nbytes
        self._add(nbytes, (buffer, pinned))
        self._blocks.append((buffer, nbytes, block))
        return len(self._blocks) - 1

    @property
    def _pinned(self) -> int:
        return self.pins.resident + self._locked

    def _add(self, nbytes: int, key: tuple[Buffer, bool]) -> None:
        self._alive[key] = self._alive.get(key, 0) + nbytes
        self.buffers[key] = max(self.buffers.get(key, 0), self._alive[key])
        if self._pageable + self._pinned > self._peak:
            self._peak, self._at_peak = self._pageable + self._pinned, self._now()

    def free(self, handle: int) -> None:
        """Gives pageable memory back to the system, a pinned block to torch's cache, where it stays resident."""
        buffer, nbytes, block = self._blocks[handle]
        if block < 0:
            self._pageable -= nbytes
        else:
            self.pins.free(block)
        self._alive[(buffer, block >= 0)] -= nbytes

    def pin(self, handle: int) -> int:
        """``tensor.pin_memory()``: a copy in pinned memory, beside the original until that is freed."""
        buffer, nbytes, _ = self._blocks[handle]
        return self.alloc(nbytes, buffer, pinned=True)

    def repin(self, handle: int) -> int:
        """Replace a pageable block by such a copy, and return the copy."""
        copy = self.pin(handle)
        self.free(handle)
        return copy

    def made(self, nbytes: int, buffer: Buffer, *, pin: bool) -> int:
        """Allocate a pageable block, which with `pin` such a copy replaces at once."""
        handle = self.alloc(nbytes, buffer)
        return self.repin(handle) if pin else handle

    def mark(self, phase: Phase) -> None:
        """Note the bytes at the end of a phase; the next phase begins."""
        kept = self._now()
        self.marks.append(HostMark(phase, self._pageable, self._pinned, self._peak, self._at_peak, kept, self._locked))
        self._peak, self._at_peak = self._pageable + self._pinned, kept

    def _now(self) -> HostBytes:
        """Return the bytes alive, as requested; the rest of the pinned blocks is the allocator's rounding and freed blocks."""
        found = {(buffer, _place(pinned)): count for (buffer, pinned), count in self._alive.items() if count}
        spare = self._pinned - sum(count for (_, place), count in found.items() if place is Place.PINNED)
        return found | ({(Buffer.FRAGMENTATION, Place.PINNED): spare} if spare else {})


def _place(pinned: bool) -> Place:
    return Place.PINNED if pinned else Place.DRAM


def record_host(rank: DeepSpeedRank, config: PinnedConfig | None = None) -> HostRecorder:
    """Record one rank's host buffers over loading, initialisation, a backward and a step.

    Model weights that are built on the GPU, as measured rows do, leave nothing on the host.
    """
    host = HostRecorder(config)
    if rank.zero.stage == 3:
        _stage3(rank, host)
    else:
        _stage12(rank, host)
    return host


def _states(rank: DeepSpeedRank, host: HostRecorder, at: int) -> list[int]:
    """Allocate the states that DeepSpeedCPUAdam and its like make for a group in their first step: pageable
    (ops/adam/cpu_adam.py).
    """
    made = [host.alloc(rank.state_bytes * rank.stepped_at_once[at], buffer) for buffer in rank.optimizer.host_states]
    return made + [host.alloc(nbytes, buffer) for buffer, nbytes in rank.states(at)]


def _temporaries(rank: DeepSpeedRank, host: HostRecorder, count: int) -> None:
    """torch's own AdamW (``torch_adam``): its multi-tensor kernels are for GPUs alone, so a square root and a quotient.
    Others of torch's add weight decay to a gradient out of place.

    Source: torch/optim/adam.py, _single_tensor_adam; torch/optim/sgd.py, _single_tensor_sgd
    """
    for _ in range(rank.decay_lists):
        host.free(host.alloc(rank.master_bytes * count, Buffer.OPTIM_TEMP))
    if rank.torch_adam:
        root, quotient = (host.alloc(rank.master_bytes * count, Buffer.OPTIM_TEMP) for _ in range(2))
        host.free(root)
        host.free(quotient)


def _checkpoints(rank: DeepSpeedRank, host: HostRecorder) -> None:
    """Pin a buffer for each checkpointed input that is copied; they are used again in every micro batch.

    Source: runtime/activation_checkpointing/offload_activations.py, _empty_cpu_like
    """
    for _ in range(rank.offloaded_inputs):
        host.alloc(rank.checkpoint, Buffer.ACTIVATION_CHECKPOINT, pinned=True)


def _stage12(rank: DeepSpeedRank, host: HostRecorder) -> None:
    host.mark(Phase.LOAD)
    if rank.stage and not rank.full_fp32_grads and not rank.does(Knob.FLATTENS_ON_GPU):
        for (_, params), ranks in zip(rank.param_groups, rank.group_ranks, strict=True):
            _flatten(rank, host, sum(rank.numel[p] for p in params), ranks)
    if not rank.offloads_optimizer:
        host.mark(Phase.INIT)
        _checkpoints(rank, host)
        for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.STEP):
            host.mark(phase)
        return
    pin = rank.zero.offload_optimizer.pin_memory
    w, m = rank.param_bytes, rank.master_bytes
    group = rank.flat
    part = group.partition
    # stage_1_and_2.py, __init__: the conversion to fp32 happens on the host, through a copy in the model's dtype
    here = rank.does(Knob.MASTERS_CLONED_ON_GPU)
    moved = -1 if here else host.alloc(w * part, Buffer.INIT_TEMP)
    if not here and w != m:  # a clone of what was moved, which it replaces
        clone = host.alloc(w * part, Buffer.INIT_TEMP)
        host.free(moved)
        moved = clone
    masters = host.alloc(m * part, Buffer.PARAM_MASTER)
    if here and w != m:
        host.free(host.alloc(w * part, Buffer.INIT_TEMP))
    if moved >= 0:
        host.free(moved)
    if pin or not rank.does(Knob.MASTERS_PINNED_BY_KEY):
        host.repin(masters)
    staging = host.alloc(w * part if rank.does(Knob.UPDATES_BUFFER) else 0, Buffer.STAGE_H2D)
    if pin:
        host.pin(staging)  # the pageable one keeps its name, and so lives, until the constructor returns
    host.made(w * rank.largest_param, Buffer.STAGE_D2H, pin=pin)
    host.made(m * part, Buffer.GRAD_MASTER, pin=pin)
    if pin:
        host.free(staging)
    early = not rank.does(Knob.STATES_AT_FIRST_STEP)
    if early:
        _first_step12(rank, host)
    host.mark(Phase.INIT)
    _checkpoints(rank, host)
    host.mark(Phase.FORWARD)
    if rank.workload.batch.grad_accum > 1 and m == DType.FP32.bytes:  # 16-bit masters' gradients accumulate in place
        for p, _ in group.owned(rank.rank):  # stage_1_and_2.py, async_accumulate_grad_in_cpu_via_gpu: whole parameters
            host.made(w * rank.numel[p], Buffer.GRAD_ACCUM, pin=pin)
    host.mark(Phase.BACKWARD)
    if early:
        _temporaries(rank, host, part)
    else:
        _first_step12(rank, host)
    casts_here = not (rank.does(Knob.UPDATES_CAST_ON_GPU) or rank.does(Knob.UPDATES_BUFFER))
    if casts_here and w != m:
        host.free(host.alloc(w * max(rank.stepped_at_once, default=0), Buffer.STAGE_H2D))
    host.mark(Phase.STEP)


def _first_step12(rank: DeepSpeedRank, host: HostRecorder) -> None:
    """The step that makes the states of stages 1 and 2."""
    for at in range(len(rank.stepped_at_once)):
        _states(rank, host, at)
    _temporaries(rank, host, rank.flat.partition)


def _flatten(rank: DeepSpeedRank, host: HostRecorder, count: int, ranks: int) -> None:
    """A parameter group on the host, by parameter and then flat, until the flat copy is on the GPU.

    `count` are its elements, which are padded for `ranks`.

    Source: zero/stage_1_and_2.py, __init__, before its :attr:`Knob.FLATTENS_ON_GPU`
    """
    apart = host.alloc(rank.param_bytes * count, Buffer.INIT_TEMP)
    flat = host.alloc(rank.param_bytes * padded(count, ranks), Buffer.INIT_TEMP)
    host.free(apart)
    host.free(flat)


def _stage3(rank: DeepSpeedRank, host: HostRecorder) -> None:
    zero, rules, w = rank.zero, rank.swapping, rank.param_bytes
    if zero.offload_param.device is OffloadDevice.NVME:
        host.lock(w * rank.param_swap_buffers * rank.param_swap_buffer, Buffer.SWAP_BUFFER)
    first = _first_shards(rank, host) if zero.offloads_param else []
    host.mark(Phase.LOAD)

    if not zero.offloads_param:
        host.free(host.alloc(w * rank.sharded, Buffer.INIT_TEMP))  # zero/utils.py, defragment
    else:
        host.alloc(w * rules.flat(rank.sharded), Buffer.PARAM_SHARD, pinned=True)
        in_flat = rules.in_flat(rank.stepped_at_once)
        moved = {p for group, fits in zip(rank.sub_groups, in_flat, strict=True) if fits for p in group}
        for p, handle in first:
            if p in moved or not rank.parameters.trainable[p]:
                host.free(handle)
        if rank.swap_reserve:
            host.lock(w * rank.swap_reserve, Buffer.SWAP_BUFFER)
    _cast(rank, host)  # stage3.py, _create_fp32_partitions
    if rank.offloads_optimizer:
        _offloaded_optimizer(rank, host)
        if not rank.does(Knob.STATES_AT_FIRST_STEP):
            _step(rank, host)
    host.mark(Phase.INIT)
    _checkpoints(rank, host)
    host.mark(Phase.FORWARD)
    host.mark(Phase.BACKWARD)
    if rank.offloads_optimizer:
        _step(rank, host, makes_states=rank.does(Knob.STATES_AT_FIRST_STEP))
        _look_for_inf(rank, host)  # as the next step does, beside all states
    _cast(rank, host)  # stage3.py, _reassign_or_swap_out_partitioned_parameters
    host.mark(Phase.STEP)


def _cast(rank: DeepSpeedRank, host: HostRecorder) -> None:
    """Cast parameters to masters on the GPU, or back: a blocking copy between devices makes the wider tensor on the host.

    Source: aten/src/ATen/native/cuda/Copy.cu, copy_kernel_cuda (conversion_device)
    """
    for at in rank.cast_on_host:
        host.free(host.alloc(rank.master_bytes * rank.stepped_at_once[at], Buffer.STAGE_D2H))


def _look_for_inf(rank: DeepSpeedRank, host: HostRecorder) -> None:
    """Look through all offloaded gradients by their absolute values and a mask (has_overflow)."""
    if rank.looks_at_flat_gradients:
        for handle in [host.alloc(width * rank.sharded, Buffer.OPTIM_NORM) for width in (rank.accum_bytes, 1)]:
            host.free(handle)


def _step(rank: DeepSpeedRank, host: HostRecorder, *, makes_states: bool = True) -> None:
    """Two steps: the first `makes_states`, in the second all of them are there from the first sub-group on.

    States that go to a file are made in pageable memory, too, and go when they have been written.
    """
    on_disk = rank.optimizer_device is OffloadDevice.NVME
    stepped = range(len(rank.stepped_at_once)) if on_disk else rank.in_memory
    for first_step in (True, False):
        for at in stepped:
            count = rank.stepped_at_once[at]
            made = _states(rank, host, at) if first_step and makes_states else []
            _temporaries(rank, host, count)
            if not rank.zero.offloads_param and rank.master_bytes != rank.param_bytes:
                # a blocking copy to the GPU converts on the host
                host.free(host.alloc(rank.param_bytes * count, Buffer.STAGE_H2D))
            for handle in made if rank.is_swapped(at) else ():
                host.free(handle)


def _first_shards(rank: DeepSpeedRank, host: HostRecorder) -> list[tuple[int, int]]:
    """Pin a block for each parameter, a tied one's twin included until it is collected (_partition_param).

    With NVMe only for those that are too small for a file. Beside them hpZ's second parts, which stay. Returns the blocks that
    initialisation frees: the trained parameters', which the flat buffer replaces, and the twins of frozen ones.
    """
    trained = set(rank.trained)
    blocks, pin, seen = [], rank.zero.offload_param.pin_memory, set[int]()
    in_files = rank.zero.offload_param.device is OffloadDevice.NVME
    for owned in rank.parameters.modules:
        for p in owned:
            if in_files and rank.swapping.swaps(rank.shards[p], rank.param_bytes):
                continue
            kind = Buffer.PARAM_SHARD if rank.parameters.trainable[p] else Buffer.PARAM_FROZEN
            handle = host.alloc(rank.param_bytes * rank.shards[p], kind, pinned=pin)
            if p in trained or p in seen:
                blocks.append((p, handle))
            seen.add(p)
    for count in rank.secondary_shards:  # partition_parameters.py, _partition_param_sec; made again in each forward
        host.alloc(rank.param_bytes * count, Buffer.PARAM_SECONDARY, pinned=pin)
    return blocks


def _offloaded_optimizer(rank: DeepSpeedRank, host: HostRecorder) -> None:
    """Allocate the offloaded masters, gradients and states (stage3.py, _create_fp32_partitions, initialize_optimizer_states,
    _setup_for_real_optimizer).

    Masters that go from files to files may pass through a temporary of a sub-group (without ``fast_init``): no more than the
    buffer of the largest gradient that follows.
    """
    offload, m, a = rank.zero.offload_optimizer, rank.master_bytes, rank.accum_bytes
    counts, on_host = rank.stepped_at_once, rank.stepped_in_memory
    if offload.device is OffloadDevice.NVME:
        host.lock(m * rank.swap_buffer * rank.swap_buffers, Buffer.SWAP_BUFFER)
    converted = -1
    for count in on_host:
        following = host.alloc(m * count, Buffer.INIT_TEMP)
        if converted >= 0:
            host.free(converted)
        converted = following
        host.alloc(m * count, Buffer.PARAM_MASTER)
    if converted >= 0:
        host.free(converted)
    largest = host.alloc(m * rank.sub_group, Buffer.INIT_TEMP)
    moved = -1  # a sub-group's gradient that went on to the GPU keeps its name, and so lives, until the next one's is made
    for at, count in enumerate(on_host if offload.device is OffloadDevice.NVME else counts):
        grads = host.made(m * count, Buffer.GRAD_MASTER, pin=offload.pin_memory)
        if moved >= 0:
            host.free(moved)
        moved = grads if offload.device is OffloadDevice.CPU and at < rank.staying else -1
    host.free(largest)
    if moved >= 0:
        host.free(moved)
    host.made(a * rank.sharded, Buffer.GRAD_ACCUM, pin=offload.pin_memory)
