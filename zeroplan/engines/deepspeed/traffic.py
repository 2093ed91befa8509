"""DeepSpeed's traffic: what each stage sends, copies and steps, beside the model's own computation.

Lines of the forward and the backward are of one micro batch, those of the step of one optimizer step, all on one rank; host
and disk lines are of all ranks of a node, which share them. Bytes on a link are those that one GPU sends in a ring.
"""

from __future__ import annotations

from zeroplan.core.buffers import Phase
from zeroplan.core.cluster import Cluster
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.compute_traffic import ComputeFacts
from zeroplan.engines.deepspeed.rank import deepspeed_rank
from zeroplan.engines.deepspeed.traffic_facts import Sizes, TrafficFacts
from zeroplan.engines.traffic import Traffic
from zeroplan.ledger.derive import fraction
from zeroplan.ledger.traffic import Resource, WorkBuilder, WorkLedger
from zeroplan.models.spec import ModelSpec

#: Small operations on each gradient: its cast to fp64 and norm; largest, least, two tests and their conjunction for overflow
#: (runtime/utils.py, has_inf_or_nan). With offload both, its cast and its copy.
NORM_OPERATIONS, OVERFLOW_OPERATIONS, OFFLOAD_OPERATIONS = 3, 6, 11
#: Stage 0 casts each gradient and copies each updated parameter (runtime/fp16/fused_optimizer.py, step).
CAST_OPERATIONS = 2


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


@_lines.add(_link, Phase.FORWARD, Phase.BACKWARD)
def gather(c: TrafficFacts) -> int:
    """Parameters gathered module by module, in the backward in reverse.

    Source: deepspeed/runtime/zero/partitioned_param_coordinator.py
    """
    return fraction(c.param_bytes * c.gathered, c.steps_before, c.ranks) if c.stage == 3 and c.ranks > 1 else 0


@_lines.add(Resource.COLLECTIVE, Phase.FORWARD, Phase.BACKWARD)
def gather_calls(c: TrafficFacts) -> int:
    """Gathers times the ring's steps: their latency."""
    return c.tensors * c.steps_before if c.stage == 3 and c.ranks > 1 else 0


@_lines.add(_link, Phase.BACKWARD)
def reduce_each_micro_batch(c: TrafficFacts) -> int:
    """Gradients: stage 2 all-reduces its buckets (twice a reduce-scatter's bytes), stage 3 reduce-scatters.

    Source: deepspeed/runtime/zero/stage_1_and_2.py, average_tensor (use_multi_rank_bucket_allreduce)
    """
    if c.ranks == 1 or not c.reduced:
        return 0
    return fraction(c.comm_bytes * (c.reduced - c.reduced_last) * (1 if c.stage == 3 else 2), c.steps_before, c.ranks)


@_lines.add(_link, Phase.STEP)
def reduce_last_buckets(c: TrafficFacts) -> int:
    """Where reductions overlap the backward, the last buckets have none left beside them, and the host waits for them.

    Source: deepspeed/runtime/zero/stage3.py and stage_1_and_2.py, independent_gradient_partition_epilogue
    """
    if c.ranks == 1 or not c.reduced_last:
        return 0
    sent = c.comm_bytes * c.reduced_last * c.micro_batches * (1 if c.stage == 3 else 2)
    return fraction(sent, c.steps_before, c.ranks)


@_lines.add(_link, Phase.STEP, ahead=True)
def reduce_at_step(c: TrafficFacts) -> int:
    """Gradients all-reduced once all micro batches are done (stages 0 and 1)."""
    return fraction(2 * c.comm_bytes * c.reduced_at_step, c.steps_before, c.ranks) if c.ranks > 1 else 0


@_lines.add(Resource.HBM, Phase.FORWARD, Phase.BACKWARD)
def gathered_copies(c: TrafficFacts) -> int:
    """Each gathered parameter put together from its ranks' parts: a read, a write.

    Source: deepspeed/runtime/zero/partition_parameters.py, AllGatherCoalescedHandle.wait
    """
    return 2 * c.param_bytes * c.gathered if c.stage == 3 and c.ranks > 1 else 0


@_lines.add(Resource.HBM, Phase.BACKWARD)
def bucket_copies(c: TrafficFacts) -> int:
    """Gradients copied into their bucket and averaged there; among ranks also put in the order in which they are reduced.

    Source: deepspeed/runtime/zero/stage_1_and_2.py, average_tensor; runtime/comm/coalesced_collectives.py
    """
    return (4 if c.ranks == 1 else 6) * c.comm_bytes * c.reduced


@_lines.add(Resource.HBM, Phase.STEP, ahead=True)
def bucket_copies_at_step(c: TrafficFacts) -> int:
    """Stages 0 and 1: gradients copied into their bucket, averaged and put in order, once a step.

    Source: deepspeed/runtime/engine.py, allreduce_and_copy
    """
    if c.ranks == 1:
        return 4 * c.comm_bytes * c.reduced_at_step if c.stage else 0
    return 6 * c.comm_bytes * c.reduced_at_step


@_lines.add(_from_host, Phase.FORWARD, Phase.BACKWARD)
def upload(c: TrafficFacts) -> int:
    """This rank's parameters from host memory, in the forward and again in the backward."""
    return c.param_bytes * (c.params_on_host + c.params_on_disk)


@_lines.add(Resource.READ, Phase.FORWARD, Phase.BACKWARD)
def read_params(c: TrafficFacts) -> int:
    """Parameters from disk, all ranks of the node."""
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


@_lines.add(Resource.GRADIENT_HOOK, Phase.STEP, ahead=True)
def gradient_hooks_at_step(c: TrafficFacts) -> int:
    """Stage 1 reduces once a step, in a loop that nothing makes wait for the backward.

    Source: deepspeed/runtime/zero/stage_1_and_2.py, reduce_gradients
    """
    return c.trained_tensors if c.stage == 1 else 0


@_lines.add(Resource.AWAITED, Phase.BACKWARD)
def offload_awaited(c: TrafficFacts) -> int:
    """Stages 1 and 2 with offload read each gradient's test for overflow on the host before they copy it.

    Source: deepspeed/runtime/zero/stage_1_and_2.py, update_offload_overflow_tracker
    """
    return c.owned_tensors if c.stage in (1, 2) and c.on_host else 0


@_lines.add(Resource.GATHER_HOOK, Phase.FORWARD)
def gather_hooks(c: TrafficFacts) -> int:
    """Stage 3's hooks before and after every module.

    Source: deepspeed/runtime/zero/parameter_offload.py, _register_deepspeed_module
    """
    return c.forward_modules if c.stage == 3 else 0


@_lines.add(Resource.GATHER_HOOK, Phase.BACKWARD)
def gather_hooks_recomputed(c: TrafficFacts) -> int:
    """Stage 3's hooks before and after every module that recomputation enters again."""
    return c.recomputed_modules if c.stage == 3 else 0


@_lines.add(Resource.RELEASE_HOOK, Phase.BACKWARD)
def release_hooks(c: TrafficFacts) -> int:
    """Stage 3's hooks around every module of the backward, with the reduction of its gradients."""
    return c.backward_modules if c.stage == 3 else 0


@_lines.add(Resource.UPLOAD_HOOK, Phase.FORWARD, Phase.BACKWARD)
def upload_hooks(c: TrafficFacts) -> int:
    """Parameters copied from the host or disk one by one, in the forward and again in the backward."""
    return c.tensors if c.params_on_host + c.params_on_disk else 0


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
    """With offload: bytes of the gradients' norms in fp64, of their largest and least, and of their casts to fp32."""
    return c.on_host * (4 * c.param_bytes + 20) if c.mixed else 0


@_lines.add(Resource.OPERATION, Phase.STEP, ahead=True)
def copies_back(c: TrafficFacts) -> int:
    """Stage 0: reduced gradients copied back one by one. Source: deepspeed/runtime/engine.py, allreduce_and_copy"""
    return c.trained_tensors if c.stage == 0 and c.ranks > 1 else 0


@_lines.add(Resource.OPERATION, Phase.STEP, ahead=lambda c: c.stage > 0 and not c.overlaps)
def overflow_operations(c: TrafficFacts) -> int:
    """Below stage 3: each gradient of this rank tested for overflow. With overlap_comm the host waits before that.

    Source: deepspeed/runtime/zero/stage_1_and_2.py, has_overflow, independent_gradient_partition_epilogue
    """
    return OVERFLOW_OPERATIONS * c.owned_tensors if c.mixed and c.stage < 3 and not c.on_host else 0


@_lines.add(Resource.AWAITED, Phase.STEP)
def overflow_awaited(c: TrafficFacts) -> int:
    """Stage 0 reads the outcome of each test on the host before it makes the next.

    Source: deepspeed/runtime/utils.py, CheckOverflow.has_overflow_serial
    """
    return c.trained_tensors if c.mixed and c.stage == 0 else 0


@_lines.add(Resource.OPERATION, Phase.STEP)
def step_operations(c: TrafficFacts) -> int:
    """Norm of each gradient by itself, fetched with offload; stage 0 casts each to fp32 and copies each parameter back.

    Source: deepspeed/runtime/zero/stage_1_and_2.py, get_grad_norm_direct; runtime/fp16/fused_optimizer.py, step
    """
    if not c.mixed:
        return 0
    return (1 if c.on_host else NORM_OPERATIONS if c.stage else CAST_OPERATIONS) * c.owned_tensors


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


class DeepSpeedTraffic(Traffic):
    """DeepSpeed's traffic for one model on one cluster."""

    ledger = TRAFFIC

    def __init__(self, spec: ModelSpec, cluster: Cluster) -> None:
        self._spec, self._cluster = spec, cluster
        self._sizes: dict[tuple[object, ...], Sizes] = {}

    def facts(self, compute: ComputeFacts, workload: Workload, zero: ZeroConfig) -> TrafficFacts:
        """Return the facts of rank 0."""
        key = (
            zero.stage3.param_persistence_threshold,
            zero.stage3.model_persistence_threshold,
            zero.buckets.reduce_bucket_size,
            workload.quantize,
        )
        layout, sizes = self._cluster.layout, self._sizes.get(key)
        if sizes is None:
            rank = deepspeed_rank(self._spec.parameters, workload, zero, layout)
            sizes = self._sizes[key] = Sizes.of(rank, self._spec)
        return TrafficFacts(sizes, compute, workload, zero, layout)

    def overlaps(self, zero: ZeroConfig) -> bool:
        """Whether collectives overlap the computation: as ``overlap_comm`` says, else only at stage 3."""
        return zero.overlaps_comm
