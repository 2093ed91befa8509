"""Host memory that DeepSpeed allocates on one rank: pageable and pinned buffers by phase.

``s12`` is DeepSpeed 0.19.8's runtime/zero/stage_1_and_2.py, ``s3`` its zero/stage3.py, ``pp`` zero/partition_parameters.py.
What the interpreter and the libraries take comes on top and is not DeepSpeed's.
"""

from __future__ import annotations

from zeroplan.core.buffers import Buffer, Phase
from zeroplan.core.zero_config import Device
from zeroplan.engines.deepspeed.groups import flat_group, secondary_shard, shard, sub_groups
from zeroplan.engines.deepspeed.host_recorder import HostRecorder
from zeroplan.engines.deepspeed.job import Job
from zeroplan.engines.deepspeed.resolution import groups_on_gpu
from zeroplan.simulate.pinned import PinnedConfig


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


def _states(job: Job, host: HostRecorder, count: int) -> None:
    """DeepSpeedCPUAdam's and its like's states: pageable, made by the first step (ops/adam/cpu_adam.py)."""
    if job.optimizer.name == "lion":  # ops/lion/cpu_lion.py makes a second moment that it never reads
        host.alloc(job.state_bytes * count, Buffer.OPTIM_EXP_AVG_SQ)
    for state in job.optimizer.states:
        host.alloc(job.state_size(state, count), state.buffer)


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
    zero = job.zero
    w, m = job.param_bytes, job.master_bytes
    shards = [shard(count, job.ranks) for count in job.numel]
    trained = job.trained
    total = sum(shards[p] for p in trained)
    counts = [sum(shards[p] for p in group) for group in sub_groups(trained, shards, zero.sub_group_size)]
    first: list[int] = []
    if zero.offload_param.device is Device.NVME:
        host.alloc(w * zero.offload_param.buffer_count * zero.offload_param.buffer_size, Buffer.SWAP_BUFFER, pinned=True)
    elif zero.offloads_param:
        first = _first_shards(job, host, shards)
    host.mark(Phase.LOAD)

    if not zero.offloads_param:
        host.free(host.alloc(w * total, Buffer.INIT_TEMP))  # zero/utils.py, defragment
    else:
        room = total if zero.offload_param.device is Device.CPU else min(total, zero.offload_param.max_in_cpu)
        host.alloc(w * room, Buffer.PARAM_SHARD, pinned=True)
        for handle in first:
            host.free(handle)
    if job.offloads_optimizer:
        _offloaded_optimizer(job, host, counts, total)
    host.mark(Phase.INIT)
    host.mark(Phase.FORWARD)
    host.mark(Phase.BACKWARD)
    if job.offloads_optimizer:
        on_host = host_counts(job, counts)
        for first_step in (True, False):  # in the second step all states are there from the first sub-group on
            for count in on_host:
                if first_step:
                    _states(job, host, count)
                _temporaries(job, host, count)
                if not zero.offloads_param and m != w:  # a blocking copy to the GPU converts on the host
                    host.free(host.alloc(w * count, Buffer.STAGE_H2D))
    host.mark(Phase.STEP)


def _first_shards(job: Job, host: HostRecorder, shards: list[int]) -> list[int]:
    """pp, _partition_param: a pinned block for each parameter, a tied one's twin included until it is collected.

    Beside them hpZ's second parts, which stay. Returns the blocks that the flat buffer replaces.
    """
    trained = set(job.trained)
    handles, pin = [], job.zero.offload_param.pin_memory
    for owned in job.modules:
        for p in owned:
            handle = host.alloc(job.param_bytes * shards[p], Buffer.PARAM_SHARD, pinned=pin)
            if p in trained:
                handles.append(handle)
    group = job.zero.zero_hpz_partition_size
    for numel in job.numel if group > 1 else ():  # pp, _partition_param_sec; made again in each forward
        host.alloc(job.param_bytes * secondary_shard(numel, job.ranks, group), Buffer.PARAM_SECONDARY, pinned=pin)
    return handles


def host_counts(job: Job, counts: list[int]) -> list[int]:
    """Elements of the sub-groups whose optimizer state stays in host memory between steps."""
    if job.optimizer_device is Device.NVME:
        return [count for count in counts if count * job.master_bytes < job.least_swapped]
    return counts[groups_on_gpu(len(counts), job.zero) :]


def _offloaded_optimizer(job: Job, host: HostRecorder, counts: list[int], total: int) -> None:
    """s3, _create_fp32_partitions, initialize_optimizer_states, _setup_for_real_optimizer."""
    offload, m, a = job.zero.offload_optimizer, job.master_bytes, job.accum_bytes
    on_host = host_counts(job, counts)
    if offload.device is Device.NVME:
        host.alloc(m * max(counts, default=0) * offload.buffer_count, Buffer.SWAP_BUFFER, pinned=True)
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
    for at, count in enumerate(on_host if offload.device is Device.NVME else counts):
        grads = host.alloc(m * count, Buffer.GRAD_MASTER)
        if offload.pin_memory:
            pageable, grads = grads, host.pin(grads)
            host.free(pageable)
        if moved >= 0:
            host.free(moved)
        moved = grads if offload.device is Device.CPU and at < groups_on_gpu(len(counts), job.zero) else -1
    host.free(largest)
    if moved >= 0:
        host.free(moved)
    flat = host.alloc(a * total, Buffer.GRAD_ACCUM)
    if offload.pin_memory:
        host.pin(flat)
        host.free(flat)
