"""DeepSpeed's ledger, the buffers that others pass through: communication, staging, swapping, the step's temporaries.

Bytes of one rank; paths of sources as in lines.py, which joins the two.
"""

from __future__ import annotations

from zeroplan.core.buffers import ALWAYS, FROM_FIRST_STEP, Buffer, Phase, Place
from zeroplan.core.workload import OptimizerKind
from zeroplan.core.zero_config import OffloadDevice
from zeroplan.engines.deepspeed.rank import DeepSpeedRank
from zeroplan.engines.deepspeed.versions import Knob
from zeroplan.ledger.derive import pow2
from zeroplan.ledger.line import LedgerBuilder
from zeroplan.ledger.optimizer_lines import add_workspace_line

_lines = LedgerBuilder()
_add = _lines.add


def pinned(c: DeepSpeedRank) -> Place:
    """The memory of what the offloaded optimizer exchanges with the GPU (offload_optimizer.pin_memory)."""
    return c.pinned


def host_block(c: DeepSpeedRank, count: int) -> int:
    """Bytes of a block of the offloaded optimizer for `count` bytes: torch rounds pinned blocks to a power of two.

    Source: aten/src/ATen/core/CachingHostAllocator.h
    """
    return pow2(count) if c.pin_optimizer else count


# --- communication and staging ------------------------------------------------------------------------------------------


@_add(Buffer.COMM_BUCKET, Place.HBM, (Phase.BACKWARD,))
def ipg_bucket(c: DeepSpeedRank) -> int:
    """Gradients collected before a reduction, allocated at full size for each backward; two when overlapping.

    Source: stage_1_and_2.py, setup_buckets
    """
    if c.stage in (1, 2) and c.contiguous_gradients and not c.full_fp32_grads:
        return c.bucket_bytes * c.reduce_bucket * c.buckets
    return 0


@_add(Buffer.COMM_BUCKET, Place.HBM, ALWAYS)
def ipg_bucket_stage3(c: DeepSpeedRank) -> int:
    """The one bucket of gradients of stage 3, allocated at initialisation and never freed. Source: stage3.py, ipg_buckets"""
    return c.bucket_bytes * c.reduce_bucket if c.stage == 3 and c.contiguous_gradients else 0


@_add(Buffer.STAGE_D2H, Place.HBM, ALWAYS)
def offload_staging(c: DeepSpeedRank) -> int:
    """Room on the GPU for one gradient on its way to the host: the largest parameter (stages 1 and 2).

    Source: stage_1_and_2.py, temp_grad_buffer_for_gpu_offload
    """
    return c.param_bytes * c.largest_param if c.stage in (1, 2) and c.optimizer_device is OffloadDevice.CPU else 0


@_add(Buffer.STAGE_D2H, pinned, ALWAYS)
def offload_staging_host(c: DeepSpeedRank) -> int:
    """Its twin on the host. Source: stage_1_and_2.py, temp_grad_buffer_for_cpu_offload"""
    if c.stage in (1, 2) and c.optimizer_device is OffloadDevice.CPU:
        return host_block(c, c.param_bytes * c.largest_param)
    return 0


@_add(Buffer.STAGE_H2D, pinned, ALWAYS)
def updated_params_host(c: DeepSpeedRank) -> int:
    """Updated parameters in the model's dtype, on their way back to the GPU (stages 1 and 2).

    Source: stage_1_and_2.py, param_buffer_of_bit16_for_cpu_offload_groups
    """
    if c.stage in (1, 2) and c.optimizer_device is OffloadDevice.CPU and c.does(Knob.UPDATES_BUFFER):
        return host_block(c, c.param_bytes * c.stepped_host)
    return 0


@_add(Buffer.STAGE_H2D, Place.HBM, (Phase.STEP,))
def updated_masters_gpu(c: DeepSpeedRank) -> int:
    """Updated masters on the GPU, where they are cast to the model's dtype (stages 1 and 2 of DeepSpeed 0.14.1 to 0.16).

    Source: stage_1_and_2.py, step
    """
    casts_there = c.stage in (1, 2) and c.optimizer_device is OffloadDevice.CPU and c.does(Knob.UPDATES_CAST_ON_GPU)
    return c.master_bytes * c.sub_group if casts_there else 0


@_add(Buffer.STAGE_H2D, Place.DRAM, (Phase.STEP,))
def updated_params_cast(c: DeepSpeedRank) -> int:
    """A sub-group's updated parameters, cast on the host before they are copied to the GPU (stage 3).

    Source: stage3.py, _reassign_or_swap_out_partitioned_parameters (a copy across devices casts first)
    """
    if c.stage == 3 and c.optimizer_device is not OffloadDevice.NONE and c.param_device is OffloadDevice.NONE:
        return c.param_bytes * c.sub_group
    return 0


@_add(Buffer.STAGE_D2H, Place.DRAM, (Phase.INIT, Phase.STEP))
def masters_cast(c: DeepSpeedRank) -> int:
    """A sub-group in the masters' dtype on the host, where a blocking copy between devices casts: parameters are offloaded, and
    the optimizer steps their masters on the GPU (stage 3).

    Source: stage3.py, _create_fp32_partitions, _reassign_or_swap_out_partitioned_parameters
    """
    return c.master_bytes * max((c.stepped_at_once[at] for at in c.cast_on_host), default=0)


@_add(Buffer.OPTIM_NORM, Place.DRAM, (Phase.STEP,))
def magnitudes_on_host(c: DeepSpeedRank) -> int:
    """Absolute values and a mask of all offloaded gradients, in which fp16 is looked through for inf (stage 3).

    Source: stage3.py, has_overflow; aten/src/ATen/native/TensorCompare.cpp, isinf
    """
    looks = c.looks_at_flat_gradients and c.optimizer_device is not OffloadDevice.NONE
    return (c.accum_bytes + 1) * c.sharded if looks else 0


@_add(Buffer.ACTIVATION_CHECKPOINT, Place.PINNED, (Phase.FORWARD, Phase.BACKWARD, Phase.STEP))
def offloaded_inputs(c: DeepSpeedRank) -> int:
    """Copies of recomputed blocks' inputs on the host; torch rounds each pinned block to a power of two.

    Source: activation_checkpointing/offload_activations.py, _empty_cpu_like
    """
    return c.offloaded_inputs * pow2(c.checkpoint) if c.offloaded_inputs else 0


@_add(Buffer.SWAP_BUFFER, Place.PINNED, ALWAYS)
def optimizer_swap_buffers(c: DeepSpeedRank) -> int:
    """Pinned buffers through which sub-groups travel to and from disk: buffer_count of the largest sub-group.

    Source: swap_tensor/utils.py, SwapBufferManager
    """
    return c.swap_buffers * c.master_bytes * c.swap_buffer if c.stepped_nvme else 0


@_add(Buffer.SWAP_BUFFER, Place.PINNED, ALWAYS)
def param_swap_buffers(c: DeepSpeedRank) -> int:
    """Pinned buffers through which parameters travel to and from disk: buffer_count × buffer_size.

    Source: swap_tensor/partitioned_param_swapper.py
    """
    return c.param_swap_buffers * c.param_swap_buffer * c.param_bytes


@_add(Buffer.SWAP_BUFFER, Place.PINNED, ALWAYS)
def param_swap_reserve(c: DeepSpeedRank) -> int:
    """A pinned buffer in which a step collects a sub-group's updated parameters on their way to disk.

    Source: swap_tensor/partitioned_param_swapper.py, reserve_partitioned_swap_space
    """
    return c.swap_reserve * c.param_bytes


@_add(Buffer.COMM_PIPELINE, Place.HBM, FROM_FIRST_STEP)
def pipeline_buffer(c: DeepSpeedRank) -> int:
    """One tensor in which a pipeline stage receives inputs and gradients of outputs, which are of one size.

    Source: pipe/engine.py, _allocate_or_extend_buffers
    """
    return c.hidden


# --- the optimizer step's temporaries -----------------------------------------------------------------------------------


@_add(Buffer.GRAD_SHARD, Place.HBM, (Phase.STEP,))
def step_gradients_flat(c: DeepSpeedRank) -> int:
    """The step's own copy of the gradients as one tensor, where they are more than one.

    Source: stage_1_and_2.py, flatten_dense_tensors_aligned; stage3.py, _prepare_fp32_grad_for_sub_group (one at a time)
    """
    if c.stage == 0 or c.optimizer_device is not OffloadDevice.NONE or c.full_fp32_grads or c.compact:
        return 0
    return c.accum_bytes * (c.sub_group if c.stage == 3 else c.stepped)


@_add(Buffer.GRAD_MASTER, Place.HBM, (Phase.STEP,))
def step_gradients_cast(c: DeepSpeedRank) -> int:
    """The step's gradients in the master's dtype, if that is another; at stage 0 also one by one, before they are flattened.

    Source: stage_1_and_2.py, step; stage3.py, _prepare_fp32_grad_for_sub_group; fp16/[un]fused_optimizer.py, step
    """
    if c.stage == 0:
        return c.master_bytes * c.stepped * (2 if c.fused_adam else 1) if c.own_masters else 0
    if c.optimizer_device is not OffloadDevice.NONE or c.accum_bytes == c.master_bytes:
        return 0
    return c.master_bytes * (c.sub_group if c.stage == 3 else c.stepped)


@_add(Buffer.OPTIM_TEMP, Place.HBM, (Phase.STEP,))
def optimizer_temporaries(c: DeepSpeedRank) -> int:
    """What the optimizer itself needs while it steps: nothing if fused, lists of temporaries or two tensors otherwise.

    A partial offload's part on the GPU is stepped by torch's multi-tensor AdamW, one sub-group at a time.

    Source: torch/optim/adamw.py (the multi-tensor step keeps a temporary for every tensor, the plain loop two for one);
        torch/optim/sgd.py (gradients with weight decay); stage3.py, backup_optimizer
    """
    if c.kept_on_gpu:
        return c.master_bytes * c.sub_group
    if c.optimizer_device is not OffloadDevice.NONE or c.optimizer_kind is OptimizerKind.FUSED:
        return 0
    largest = c.sub_group if c.stage == 3 else c.stepped if c.stage else c.largest_param
    if c.optimizer_kind is OptimizerKind.FOREACH:
        lists = (c.optimizer.foreach_lists + c.decay_lists) * c.master_bytes * (c.sub_group if c.stage == 3 else c.stepped)
        return lists + (c.master_bytes + 1) * largest if c.optimizer.selects else lists
    return 2 * c.master_bytes * largest


@_add(Buffer.OPTIM_TEMP, Place.DRAM, (Phase.STEP,))
def optimizer_temporaries_host(c: DeepSpeedRank) -> int:
    """A square root and a quotient of what is stepped at once, where torch's own Adam runs on the host (torch_adam), or
    gradients with their weight decay.

    Source: torch/optim/adam.py, _single_tensor_adam; torch/optim/sgd.py, _single_tensor_sgd
    """
    if c.optimizer_device is not OffloadDevice.CPU:
        return 0
    return (2 if c.torch_adam else c.decay_lists) * c.master_bytes * (c.sub_group if c.stage == 3 else c.stepped_host)


add_workspace_line(_lines)


PASSING = _lines.ledger()
