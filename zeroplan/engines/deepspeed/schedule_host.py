"""Host memory that DeepSpeed allocates on one rank: pageable and pinned buffers by phase.

``s12`` is DeepSpeed 0.19.8's runtime/zero/stage_1_and_2.py, ``s3`` its zero/stage3.py, ``pp`` zero/partition_parameters.py.
What the interpreter and the libraries take comes on top and is not DeepSpeed's.
"""

from __future__ import annotations

from zeroplan.core.buffers import Buffer, Phase
from zeroplan.core.zero_config import OffloadDevice
from zeroplan.engines.deepspeed.groups import flat_group, secondary_shard, shard, sub_groups
from zeroplan.engines.deepspeed.host_recorder import HostRecorder
from zeroplan.engines.deepspeed.job import Job
from zeroplan.engines.deepspeed.resolution import groups_on_gpu
from zeroplan.engines.deepspeed.swapping import Swapping
from zeroplan.simulate.allocator.pinned_host import PinnedConfig


def record_host(job: Job, config: PinnedConfig | None = None) -> HostRecorder:
    """The host buffers of one rank over loading, initialisation, a backward and a step.

    Model weights that are built on the GPU, as measured rows do, leave nothing on the host.
    """
    host = HostRecorder(config)
    if job.zero.stage == 3:
        _stage3(job, host)
    else:
        _stage12(job, host)
    return host


def _states(job: Job, host: HostRecorder, count: int) -> list[int]:
    """DeepSpeedCPUAdam's and its like's states: pageable, made by the first step (ops/adam/cpu_adam.py)."""
    made = [host.alloc(job.state_bytes * count, buffer) for buffer in job.optimizer.host_states]
    return made + [host.alloc(job.state_size(state, count), state.buffer) for state in job.optimizer.states]


def _temporaries(job: Job, host: HostRecorder, count: int) -> None:
    """torch's own AdamW (``torch_adam``): its multi-tensor kernels are for GPUs alone, so a square root and a quotient.

    Source: torch/optim/adam.py, _single_tensor_adam
    """
    if job.torch_adam:
        root, quotient = (host.alloc(job.master_bytes * count, Buffer.OPTIM_TEMP) for _ in range(2))
        host.free(root)
        host.free(quotient)


def _stage12(job: Job, host: HostRecorder) -> None:
    host.mark(Phase.LOAD)
    if not job.offloads_optimizer:
        for phase in (Phase.INIT, Phase.FORWARD, Phase.BACKWARD, Phase.STEP):
            host.mark(phase)
        return
    pin = job.zero.offload_optimizer.pin_memory
    w, m = job.param_bytes, job.master_bytes
    zero = job.zero
    group = flat_group(
        job.trained,
        job.numel,
        job.ranks,
        width=w,
        round_robin=zero.round_robin_gradients,
        aligned=zero.parameter_alignment,
    )
    part = group.partition
    # s12, __init__: the conversion to fp32 happens on the host, through a copy in the model's dtype
    masters = host.alloc(m * part, Buffer.PARAM_MASTER)
    if w != m:
        host.free(host.alloc(w * part, Buffer.INIT_TEMP))
    if pin:
        host.pin(masters)
        host.free(masters)
    staging = host.alloc(w * part, Buffer.STAGE_H2D)
    if pin:
        host.pin(staging)  # the pageable one keeps its name, and so lives, until the constructor returns
    temp = host.alloc(w * max((job.numel[p] for p in group.order), default=0), Buffer.STAGE_D2H)
    if pin:
        host.pin(temp)
        host.free(temp)
    grads = host.alloc(m * part, Buffer.GRAD_MASTER)
    if pin:
        host.pin(grads)
        host.free(grads)
        host.free(staging)
    host.mark(Phase.INIT)
    host.mark(Phase.FORWARD)
    if job.workload.grad_accum > 1 and m != w:
        for p, _ in group.owned(job.rank):  # s12, async_accumulate_grad_in_cpu_via_gpu: whole parameters
            accumulated = host.alloc(w * job.numel[p], Buffer.GRAD_ACCUM)
            if pin:
                host.pin(accumulated)
                host.free(accumulated)
    host.mark(Phase.BACKWARD)
    _states(job, host, part)
    _temporaries(job, host, part)
    host.mark(Phase.STEP)


def _stage3(job: Job, host: HostRecorder) -> None:
    zero, rules, w = job.zero, Swapping.of(job.zero, job), job.param_bytes
    shards = [shard(count, job.ranks) for count in job.numel]
    groups = sub_groups(job.trained, shards, zero.sub_group_size)
    counts = [sum(shards[p] for p in group) for group in groups]
    total = sum(counts)
    in_flat = rules.in_flat(counts)
    if zero.offload_param.device is OffloadDevice.NVME:
        buffer = rules.whole(zero.offload_param.buffer_size, w)
        host.lock(w * zero.offload_param.buffer_count * buffer, Buffer.SWAP_BUFFER)
    first = _first_shards(job, host, shards, rules) if zero.offloads_param else []
    host.mark(Phase.LOAD)

    if not zero.offloads_param:
        host.free(host.alloc(w * total, Buffer.INIT_TEMP))  # zero/utils.py, defragment
    else:
        host.alloc(w * rules.flat(total), Buffer.PARAM_SHARD, pinned=True)
        moved = {p for group, fits in zip(groups, in_flat, strict=True) if fits for p in group}
        for p, handle in first:
            if p in moved:
                host.free(handle)
        reserve = rules.reserve([[shards[p] for p in group] for group in groups], w)
        if reserve:
            host.lock(w * reserve, Buffer.SWAP_BUFFER)
    if job.offloads_optimizer:
        _offloaded_optimizer(job, host, counts, total)
    host.mark(Phase.INIT)
    host.mark(Phase.FORWARD)
    host.mark(Phase.BACKWARD)
    if job.offloads_optimizer:
        _step(job, host, counts)
    host.mark(Phase.STEP)


def _step(job: Job, host: HostRecorder, counts: list[int]) -> None:
    """Two steps: the first makes the states, in the second all of them are there from the first sub-group on.

    States that go to a file are made in pageable memory, too, and go when they have been written.
    """
    on_disk = job.optimizer_device is OffloadDevice.NVME
    stepped = counts if on_disk else host_counts(job, counts)
    for first_step in (True, False):
        for count in stepped:
            swapped = on_disk and count * job.master_bytes >= job.least_swapped
            made = _states(job, host, count) if first_step else []
            _temporaries(job, host, count)
            if not job.zero.offloads_param and job.master_bytes != job.param_bytes:
                # a blocking copy to the GPU converts on the host
                host.free(host.alloc(job.param_bytes * count, Buffer.STAGE_H2D))
            for handle in made if swapped else ():
                host.free(handle)


def _first_shards(job: Job, host: HostRecorder, shards: list[int], rules: Swapping) -> list[tuple[int, int]]:
    """pp, _partition_param: a pinned block for each parameter, a tied one's twin included until it is collected.

    With NVMe only for those that are too small for a file. Beside them hpZ's second parts, which stay. Returns the trained
    parameters' blocks, which the flat buffer replaces.
    """
    trained = set(job.trained)
    blocks, pin = [], job.zero.offload_param.pin_memory
    in_files = job.zero.offload_param.device is OffloadDevice.NVME
    for owned in job.modules:
        for p in owned:
            if in_files and rules.swaps(shards[p], job.param_bytes):
                continue
            handle = host.alloc(job.param_bytes * shards[p], Buffer.PARAM_SHARD, pinned=pin)
            if p in trained:
                blocks.append((p, handle))
    group = job.zero.zero_hpz_partition_size
    for numel in job.numel if group > 1 else ():  # pp, _partition_param_sec; made again in each forward
        host.alloc(job.param_bytes * secondary_shard(numel, job.ranks, group), Buffer.PARAM_SECONDARY, pinned=pin)
    return blocks


def host_counts(job: Job, counts: list[int]) -> list[int]:
    """Elements of the sub-groups whose optimizer state stays in host memory between steps."""
    if job.optimizer_device is OffloadDevice.NVME:
        return [count for count in counts if count * job.master_bytes < job.least_swapped]
    return counts[groups_on_gpu(len(counts), job.zero) :]


def _offloaded_optimizer(job: Job, host: HostRecorder, counts: list[int], total: int) -> None:
    """s3, _create_fp32_partitions, initialize_optimizer_states, _setup_for_real_optimizer.

    Masters that go from files to files may pass through a temporary of a sub-group (without ``fast_init``): no more than the
    buffer of the largest gradient that follows.
    """
    offload, m, a = job.zero.offload_optimizer, job.master_bytes, job.accum_bytes
    on_host = host_counts(job, counts)
    if offload.device is OffloadDevice.NVME:
        whole = Swapping.of(job.zero, job).whole(max(counts, default=0), m)
        host.lock(m * whole * offload.buffer_count, Buffer.SWAP_BUFFER)
    converted = -1
    for count in on_host:
        following = host.alloc(m * count, Buffer.INIT_TEMP)
        if converted >= 0:
            host.free(converted)
        converted = following
        host.alloc(m * count, Buffer.PARAM_MASTER)
    if converted >= 0:
        host.free(converted)
    largest = host.alloc(m * max(counts, default=0), Buffer.INIT_TEMP)
    moved = -1  # a sub-group's gradient that went on to the GPU keeps its name, and so lives, until the next one's is made
    for at, count in enumerate(on_host if offload.device is OffloadDevice.NVME else counts):
        grads = host.alloc(m * count, Buffer.GRAD_MASTER)
        if offload.pin_memory:
            pageable, grads = grads, host.pin(grads)
            host.free(pageable)
        if moved >= 0:
            host.free(moved)
        moved = grads if offload.device is OffloadDevice.CPU and at < groups_on_gpu(len(counts), job.zero) else -1
    host.free(largest)
    if moved >= 0:
        host.free(moved)
    flat = host.alloc(a * total, Buffer.GRAD_ACCUM)
    if offload.pin_memory:
        host.pin(flat)
        host.free(flat)
