"""DeepSpeed's traffic: what each stage sends, copies and steps, beside the model's own computation.

Lines of the forward and the backward are of one micro batch, those of the step of one optimizer step, all on one rank; host
and disk lines are of all ranks of a node, which share them. Bytes on a link are those that one GPU sends in a ring.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroplan.core.buffers import Phase
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import Device, ZeroConfig
from zeroplan.engines.compute_traffic import WORK_GLOSSARY, ComputeFacts
from zeroplan.engines.deepspeed.resolution import resolution
from zeroplan.ledger.derive import fraction
from zeroplan.ledger.optimizers import find_optimizer
from zeroplan.ledger.traffic import Resource, WorkBuilder, WorkLedger
from zeroplan.models.spec import ModelSpec

GLOSSARY = {
    **WORK_GLOSSARY,
    "ranks": "data-parallel ranks",
    "local_ranks": "of those, the ones on one node",
    "steps_before": "ranks − 1, the steps of a ring",
    "gathered": "elements that stage 3 gathers: all but the persistent ones",
    "persistent": "elements of parameters at or below stage3_param_persistence_threshold",
    "tensors": "parameters that are gathered",
    "trained_tensors": "parameters with a gradient",
    "owned_tensors": "of those, the ones whose gradients this rank keeps",
    "reduced": "elements whose gradients are reduced in each micro batch (stages 2 and 3)",
    "reduced_at_step": "elements whose gradients are reduced once a step (stages 0 and 1)",
    "updated": "elements that this rank's optimizer updates",
    "on_gpu": "of those, the ones updated on the GPU",
    "on_host": "of those, the ones updated on the host",
    "on_disk": "of those, the ones whose states are on disk",
    "last_to_host": "of those on the host or disk at stage 3, the ones whose gradients travel when the backward is over",
    "params_on_host": "this rank's elements of parameters that stay in host memory",
    "params_on_disk": "this rank's elements of parameters that stay on disk",
    "param_bytes": "bytes of one model parameter",
    "comm_bytes": "bytes of one gradient element on its way",
    "accum_bytes": "bytes of one accumulated gradient element",
    "state_bytes": "bytes of one element's optimizer states",
    "repeats": "micro batches after the first",
}


#: Small operations on each gradient: its cast to fp64 and norm; largest, least, two tests and their conjunction for overflow
#: (runtime/utils.py, has_inf_or_nan). With offload also its cast and its copy.
NORM_OPERATIONS, STEP_OPERATIONS, OFFLOAD_OPERATIONS = 3, 9, 11


@dataclass(frozen=True, slots=True)
class TrafficFacts:
    """One rank of one configuration; names as in :data:`GLOSSARY`. Modules are those of one micro batch."""

    forward_modules: int
    recomputed_modules: int
    backward_modules: int
    stage: int
    ranks: int
    local_ranks: int
    steps_before: int
    gathered: int
    persistent: int
    tensors: int
    trained_tensors: int
    owned_tensors: int
    reduced: int
    reduced_at_step: int
    updated: int
    on_gpu: int
    on_host: int
    on_disk: int
    last_to_host: int
    params_on_host: int
    params_on_disk: int
    param_bytes: int
    comm_bytes: int
    accum_bytes: int
    state_bytes: int
    repeats: int
    one_node: bool
    pinned: bool
    mixed: bool


def _link(c: TrafficFacts) -> Resource:
    return Resource.LINK if c.one_node else Resource.NODE_LINK


def _to_host(c: TrafficFacts) -> Resource:
    return Resource.PINNED if c.pinned else Resource.PAGEABLE


def _from_host(c: TrafficFacts) -> Resource:
    """A single rank waits for each copy before it goes on.

    Source: deepspeed/runtime/zero/partition_parameters.py, NoGatherHandle.wait
    """
    if c.ranks == 1:
        return Resource.AWAITED_PINNED if c.pinned else Resource.AWAITED_PAGEABLE
    return _to_host(c)


_lines = WorkBuilder()


@_lines.add(_link, Phase.FORWARD)
def gather_forward(c: TrafficFacts) -> int:
    """Parameters gathered module by module.

    Source: deepspeed/runtime/zero/partitioned_param_coordinator.py
    """
    return fraction(c.param_bytes * c.gathered, c.steps_before, c.ranks) if c.stage == 3 and c.ranks > 1 else 0


@_lines.add(_link, Phase.BACKWARD)
def gather_backward(c: TrafficFacts) -> int:
    """Parameters gathered again, in reverse."""
    return fraction(c.param_bytes * c.gathered, c.steps_before, c.ranks) if c.stage == 3 and c.ranks > 1 else 0


@_lines.add(Resource.COLLECTIVE, Phase.FORWARD)
def gather_calls_forward(c: TrafficFacts) -> int:
    """Gathers times the ring's steps: their latency."""
    return c.tensors * c.steps_before if c.stage == 3 and c.ranks > 1 else 0


@_lines.add(Resource.COLLECTIVE, Phase.BACKWARD)
def gather_calls_backward(c: TrafficFacts) -> int:
    """The same in the backward."""
    return c.tensors * c.steps_before if c.stage == 3 and c.ranks > 1 else 0


@_lines.add(_link, Phase.BACKWARD)
def reduce_each_micro_batch(c: TrafficFacts) -> int:
    """Gradients: stage 2 all-reduces its buckets (twice a reduce-scatter's bytes), stage 3 reduce-scatters.

    Source: deepspeed/runtime/zero/stage_1_and_2.py, average_tensor (use_multi_rank_bucket_allreduce)
    """
    if c.ranks == 1 or not c.reduced:
        return 0
    return fraction(c.comm_bytes * c.reduced * (1 if c.stage == 3 else 2), c.steps_before, c.ranks)


@_lines.add(_link, Phase.STEP)
def reduce_at_step(c: TrafficFacts) -> int:
    """Gradients all-reduced once all micro batches are done (stages 0 and 1)."""
    return fraction(2 * c.comm_bytes * c.reduced_at_step, c.steps_before, c.ranks) if c.ranks > 1 else 0


@_lines.add(Resource.HBM, Phase.BACKWARD)
def bucket_copies(c: TrafficFacts) -> int:
    """Gradients copied into their bucket and out of it: two reads, two writes."""
    return 4 * c.comm_bytes * c.reduced


@_lines.add(_from_host, Phase.FORWARD)
def upload_forward(c: TrafficFacts) -> int:
    """This rank's parameters from host memory."""
    return c.param_bytes * (c.params_on_host + c.params_on_disk)


@_lines.add(_from_host, Phase.BACKWARD)
def upload_backward(c: TrafficFacts) -> int:
    """The same again for the backward."""
    return c.param_bytes * (c.params_on_host + c.params_on_disk)


@_lines.add(Resource.READ, Phase.FORWARD)
def read_params_forward(c: TrafficFacts) -> int:
    """Parameters from disk, all ranks of the node."""
    return c.param_bytes * c.params_on_disk * c.local_ranks


@_lines.add(Resource.READ, Phase.BACKWARD)
def read_params_backward(c: TrafficFacts) -> int:
    """The same again for the backward."""
    return c.param_bytes * c.params_on_disk * c.local_ranks


@_lines.add(_to_host, Phase.BACKWARD)
def download_gradients(c: TrafficFacts) -> int:
    """Gradients to the host's fp32 buffer.

    Source: deepspeed/runtime/zero/stage_1_and_2.py, async_inplace_copy_grad_to_fp32_buffer_from_gpu; stage3.py
    """
    return 4 * (c.on_host + c.on_disk - c.last_to_host)


@_lines.add(_to_host, Phase.STEP)
def download_last_buckets(c: TrafficFacts) -> int:
    """Stage 3 sends a bucket while the backward goes on; the last ones leave when it is over.

    Source: deepspeed/runtime/zero/stage3.py, independent_gradient_partition_epilogue
    """
    return (4 + 2 * c.accum_bytes) * c.last_to_host


@_lines.add(Resource.GRADIENT_HOOK, Phase.BACKWARD)
def gradient_hooks(c: TrafficFacts) -> int:
    """Stage 2's hooks, one a parameter and micro batch."""
    return c.trained_tensors if c.stage == 2 else 0


@_lines.add(Resource.GRADIENT_HOOK, Phase.STEP)
def gradient_hooks_at_step(c: TrafficFacts) -> int:
    """Stage 1 reduces once a step."""
    return c.trained_tensors if c.stage == 1 else 0


@_lines.add(Resource.GATHER_HOOK, Phase.FORWARD)
def gather_hooks(c: TrafficFacts) -> int:
    """Stage 3's hooks before and after every module.

    Source: deepspeed/runtime/zero/parameter_offload.py, _register_deepspeed_module
    """
    return c.forward_modules if c.stage == 3 else 0


@_lines.add(Resource.GATHER_HOOK, Phase.BACKWARD)
def gather_hooks_recomputed(c: TrafficFacts) -> int:
    """The same for modules that recomputation enters again."""
    return c.recomputed_modules if c.stage == 3 else 0


@_lines.add(Resource.RELEASE_HOOK, Phase.BACKWARD)
def release_hooks(c: TrafficFacts) -> int:
    """Stage 3's hooks around every module of the backward, with the reduction of its gradients."""
    return c.backward_modules if c.stage == 3 else 0


@_lines.add(_to_host, Phase.BACKWARD)
def accumulator_round_trip(c: TrafficFacts) -> int:
    """Stage 3 keeps accumulated gradients on the host as well: each goes there and comes back before its fp32 copy leaves.

    Source: deepspeed/runtime/zero/stage3.py, partition_grads
    """
    return 2 * c.accum_bytes * (c.on_host + c.on_disk - c.last_to_host) if c.stage == 3 else 0


@_lines.add(Resource.OPERATION, Phase.BACKWARD)
def offload_operations(c: TrafficFacts) -> int:
    """With offload: of each gradient that this rank keeps norm, test for overflow (stages 1 and 2), cast and copy, one by one.

    Source: deepspeed/runtime/zero/stage_1_and_2.py, copy_grads_in_partition; stage3.py, partition_grads
    """
    return OFFLOAD_OPERATIONS * c.owned_tensors if c.on_host else 0


@_lines.add(Resource.HBM, Phase.BACKWARD)
def offload_casts(c: TrafficFacts) -> int:
    """The same in bytes: norms in fp64, the largest and the least read, casts to fp32."""
    return c.on_host * (4 * c.param_bytes + 20) if c.mixed else 0


@_lines.add(Resource.OPERATION, Phase.STEP)
def step_operations(c: TrafficFacts) -> int:
    """Norm of each gradient by itself and, below stage 3, its test for overflow; with offload the norm is fetched.

    Source: deepspeed/runtime/zero/stage_1_and_2.py, get_grad_norm_direct, has_overflow_partitioned_grads_serial; stage3.py,
    step; runtime/fp16/fused_optimizer.py, step
    """
    if not c.mixed:
        return 0
    return (1 if c.on_host else NORM_OPERATIONS if c.stage == 3 else STEP_OPERATIONS) * c.owned_tensors


@_lines.add(Resource.HBM, Phase.STEP)
def step_on_gpu(c: TrafficFacts) -> int:
    """The update: states, masters and gradients read, all but the gradients written back."""
    return c.on_gpu * (4 + 8 + 2 * c.state_bytes)


@_lines.add(Resource.HBM, Phase.STEP)
def gradients_on_gpu(c: TrafficFacts) -> int:
    """Before the update: gradients flattened, cast to fp32 and clipped there, their norm taken in fp64.

    Source: deepspeed/runtime/zero/stage_1_and_2.py, step; runtime/fp16/fused_optimizer.py, step
    """
    norm, clip = c.param_bytes + 16, 8
    flat_and_cast = 3 * c.param_bytes + 4 if c.stage else 3 * c.param_bytes + 8  # stage 0 flattens in fp32, the others before
    return c.on_gpu * (norm + clip + (flat_and_cast if c.mixed else 0))


@_lines.add(Resource.HBM, Phase.STEP)
def copies_on_gpu(c: TrafficFacts) -> int:
    """After it: the 16-bit parameters from their masters."""
    return c.on_gpu * (4 + c.param_bytes) if c.mixed else 0


@_lines.add(Resource.CPU_ADAM, Phase.STEP)
def step_on_host(c: TrafficFacts) -> int:
    """The update on the host, all ranks of the node: gradient and master read, states read and written."""
    return (c.on_host + c.on_disk) * c.local_ranks * (4 + 8 + 2 * c.state_bytes)


@_lines.add(Resource.DRAM, Phase.STEP)
def unscale_on_host(c: TrafficFacts) -> int:
    """Gradients clipped on the host: read and written.

    Source: deepspeed/runtime/zero/stage_1_and_2.py, unscale_and_clip_grads
    """
    return 8 * (c.on_host + c.on_disk) * c.local_ranks


@_lines.add(_to_host, Phase.STEP)
def upload_updated(c: TrafficFacts) -> int:
    """Stages 1 and 2: updated parameters to the GPU, as the host cast them.

    Source: deepspeed/runtime/zero/stage_1_and_2.py, step (param_buffer_of_bit16_for_cpu_offload_groups)
    """
    return c.param_bytes * c.on_host if c.stage < 3 else 0


@_lines.add(Resource.FRESH, Phase.STEP)
def cast_updated(c: TrafficFacts) -> int:
    """Stage 3 with parameters on the GPU: a blocking copy between dtypes casts on the host, into new memory, each step.

    Source: deepspeed/runtime/zero/stage3.py, _reassign_or_swap_out_partitioned_parameters; torch, native/cuda/Copy.cu
    """
    if c.stage < 3 or c.params_on_host or c.params_on_disk or not c.mixed:
        return 0
    return c.param_bytes * (c.on_host + c.on_disk)


@_lines.add(Resource.DRAM, Phase.STEP)
def cast_updated_on_host(c: TrafficFacts) -> int:
    """Masters cast into a buffer that is there, all ranks of the node: all but stage 3 with parameters on the GPU."""
    if not c.mixed or (c.stage == 3 and not c.params_on_host + c.params_on_disk):
        return 0
    return (4 + c.param_bytes) * (c.on_host + c.on_disk) * c.local_ranks


@_lines.add(Resource.READ, Phase.STEP)
def read_states(c: TrafficFacts) -> int:
    """Masters, states and gradients from disk, all ranks of the node."""
    return c.on_disk * c.local_ranks * (8 + c.state_bytes)


@_lines.add(Resource.WRITE, Phase.STEP)
def write_states(c: TrafficFacts) -> int:
    """Masters and states to disk; gradients were written during the backward."""
    return c.on_disk * c.local_ranks * (8 + c.state_bytes)


@_lines.add(_link, Phase.STEP)
def gather_updated(c: TrafficFacts) -> int:
    """Updated parameters gathered: all of them at stages 1 and 2, the persistent ones at stage 3."""
    if c.ranks == 1 or c.stage == 0:
        return 0
    elements = c.persistent if c.stage == 3 else c.updated * c.ranks
    return fraction(c.param_bytes * elements, c.steps_before, c.ranks)


@_lines.add(_to_host, Phase.BACKWARD)
def accumulate_on_host(c: TrafficFacts) -> int:
    """With accumulation, 16-bit gradients go back up to be added to (stages 1 and 2)."""
    return c.param_bytes * c.on_host if c.repeats and c.stage < 3 else 0


TRAFFIC: WorkLedger = _lines.ledger()


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sums over a model's parameters that traffic needs, for one persistence threshold and one bucket size.

    `last_buckets`: elements in the buckets that are sent when the backward is all but over.
    """

    params: int
    trainable: int
    persistent: int
    tensors: int
    trained_tensors: int
    last_buckets: int

    @classmethod
    def of(cls, spec: ModelSpec, threshold: int, bucket: int) -> Sizes:
        """Of a model."""
        persistent = tensors = trained = 0
        for tensor, count in spec.tensor_groups():
            if tensor.numel <= threshold:
                persistent += tensor.numel * count
            else:
                tensors += count
            trained += count if tensor.trainable else 0
        return cls(spec.params, spec.trainable, persistent, tensors, trained, _last_buckets(spec, bucket))


def traffic_facts(
    sizes: Sizes, compute: ComputeFacts, workload: Workload, zero: ZeroConfig, *, ranks: int, local_ranks: int
) -> TrafficFacts:
    """The facts of rank 0.

    `sizes` must be those of the configuration's ``param_persistence_threshold`` and ``reduce_bucket_size``.
    """
    stage = zero.stage
    resolved = resolution(workload, zero)
    updated = sizes.trainable if stage == 0 else -(-sizes.trainable // ranks)
    device, param_device = resolved.optimizer_device, resolved.param_device
    moved = 0 if device is Device.NONE else round(updated * (zero.offload_optimizer.ratio if stage == 3 else 1))
    params = -(-(sizes.params - sizes.persistent) // ranks)
    return TrafficFacts(
        forward_modules=compute.forward_modules,
        recomputed_modules=compute.recomputed_modules,
        backward_modules=compute.backward_modules,
        stage=stage,
        ranks=ranks,
        local_ranks=local_ranks,
        steps_before=ranks - 1,
        gathered=sizes.params - sizes.persistent,
        persistent=sizes.persistent,
        tensors=sizes.tensors,
        trained_tensors=sizes.trained_tensors,
        owned_tensors=-(-sizes.trained_tensors // ranks) if stage in (1, 2) else sizes.trained_tensors,
        reduced=sizes.trainable if stage >= 2 else 0,
        reduced_at_step=sizes.trainable if stage < 2 else 0,
        updated=updated,
        on_gpu=updated - moved,
        on_host=moved if device is Device.CPU else 0,
        on_disk=moved if device is Device.NVME else 0,
        last_to_host=moved * sizes.last_buckets // sizes.trainable if stage == 3 and moved else 0,
        params_on_host=params if param_device is Device.CPU else 0,
        params_on_disk=params if param_device is Device.NVME else 0,
        param_bytes=resolved.param_bytes,
        comm_bytes=resolved.comm_bytes,
        accum_bytes=resolved.accum_bytes,
        state_bytes=find_optimizer(workload.optimizer).bytes_per_element,
        repeats=workload.grad_accum - 1,
        one_node=ranks <= local_ranks,
        pinned=zero.offload_optimizer.pin_memory if zero.offload_optimizer else zero.offload_param.pin_memory,
        mixed=resolved.param_bytes == 2,
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
