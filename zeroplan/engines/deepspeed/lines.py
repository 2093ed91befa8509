"""DeepSpeed's ledger: every buffer whose size follows from the config, stages 0 to 3, on GPU, host and disk. Here are those
that hold parameters, gradients and optimizer states; what they pass through stands in passing_lines.py.

All lines are bytes of one rank. `phases` say when the buffer lives; how lives overlap is the schedules' business.
Sources are paths in DeepSpeed 0.19.8 under ``deepspeed/runtime/``; ``stage_1_and_2.py`` and ``stage3.py`` are in its zero/.

Sources are files of DeepSpeed 0.19.8's runtime/zero.
"""

from __future__ import annotations

from functools import partial

from zeroplan.core.buffers import ALWAYS, FROM_FIRST_STEP, Buffer, Phase, Place
from zeroplan.core.zero_config import OffloadDevice
from zeroplan.engines.deepspeed.passing_lines import PASSING, host_block, pinned
from zeroplan.engines.deepspeed.rank import DeepSpeedRank
from zeroplan.engines.deepspeed.versions import Knob
from zeroplan.ledger.derive import pow2, shard
from zeroplan.ledger.line import Ledger, LedgerBuilder
from zeroplan.ledger.optimizer_lines import add_quant_states_line, add_state_lines


def params_on_host(c: DeepSpeedRank) -> Place:
    """The memory of parameters that are copied from the host (offload_param.pin_memory)."""
    return Place.PINNED if c.pin_param else Place.DRAM


def add_muon_lines(lines: LedgerBuilder) -> None:
    """Register them: zero bytes for every other optimizer."""
    _add = lines.add

    @_add(Buffer.OPTIM_MOMENTUM, Place.HBM, FROM_FIRST_STEP, state=True)
    def muon_momentum(c: DeepSpeedRank) -> int:
        """Momentum of the matrices that Muon updates: of this rank's parts, or whole where the backward orthogonalises them.

        Source: Note [Muon's groups] in engines/deepspeed/stepped_groups.py
        """
        if c.optimizer_device is not OffloadDevice.NONE or c.stage == 3:
            return 0
        return c.momentum_bytes * (c.most_momentum if c.stages_momentum else c.matrix)

    @_add(Buffer.OPTIM_MOMENTUM, Place.HBM, ALWAYS, state=True)
    def muon_momentum_stage3(c: DeepSpeedRank) -> int:
        """Momentum of this rank's parts of the matrices, made at initialisation, as wide as a gradient on its way.

        Source: stage3.py, _create_momentum_buffer
        """
        return c.momentum_bytes * c.matrix if c.stage == 3 and c.optimizer_device is OffloadDevice.NONE else 0

    @_add(Buffer.OPTIM_MOMENTUM, Place.HBM, FROM_FIRST_STEP, state=True)
    def muon_momentum_staged(c: DeepSpeedRank) -> int:
        """The momentum of the step under way, until no gradient of it is found to be infinite.

        Source: stage_1_and_2.py, _muon_staging_momentum
        """
        return c.momentum_bytes * c.most_momentum

    @_add(Buffer.OPTIM_MOMENTUM, Place.DRAM, FROM_FIRST_STEP, state=True)
    def muon_momentum_host(c: DeepSpeedRank) -> int:
        """Momentum of this rank's parts of the matrices, offloaded.

        Source: stage_1_and_2.py and stage3.py, _apply_muon_updates_cpu_offload
        """
        return 0 if c.optimizer_device is OffloadDevice.NONE else c.momentum_bytes * c.matrix_in_memory

    @_add(Buffer.OPTIM_MOMENTUM, Place.NVME, FROM_FIRST_STEP, state=True)
    def muon_momentum_nvme(c: DeepSpeedRank) -> int:
        """Momentum of this rank's parts of the matrices in files, one a sub-group.

        Source: stage3.py, _create_momentum_buffer
        """
        return c.momentum_bytes * c.matrix_in_files

    @_add(Buffer.COMM_ALL_GATHER, Place.HBM, FROM_FIRST_STEP)
    def muon_gathers(c: DeepSpeedRank) -> int:
        """Buffers through which Muon gathers whole matrices in the step, kept for the next one.

        Source: stage_1_and_2.py, _muon_all_gather_partitions; stage3.py, _partitioned_buffers_all_gather
        """
        return c.muon_gathers

    @_add(Buffer.OPTIM_TEMP, Place.HBM, (Phase.STEP,))
    def muon_matrices(c: DeepSpeedRank) -> int:
        """Whole gradients, momentum and updates of the matrices that Muon updates together.

        Source: engines/deepspeed/muon.py
        """
        return c.muon_together

    @_add(Buffer.GRAD_SHARD, Place.HBM, (Phase.STEP,))
    def muon_updates(c: DeepSpeedRank) -> int:
        """Updates of the whole matrices that the backward orthogonalises, until the step.

        Source: stage_1_and_2.py, get_flat_partition
        """
        return c.momentum_bytes * c.most_momentum


_lines = LedgerBuilder()
_add = _lines.add

_BACKWARD_TO_STEP = (Phase.BACKWARD, Phase.STEP)
_UNTIL_STEP = (Phase.INIT, Phase.FORWARD, Phase.BACKWARD)
_FROM_FIRST_FORWARD = (Phase.FORWARD, Phase.BACKWARD, Phase.STEP)


def _kept_width(c: DeepSpeedRank) -> int:
    """Bytes of an element of the reduced gradients that stages 1 and 2 keep on the GPU, besides those left where they are."""
    if c.compact:
        return c.accum_bytes
    kept = c.contiguous_gradients and c.optimizer_device is OffloadDevice.NONE and not c.full_fp32_grads
    return c.param_bytes if kept else 0


# --- parameters ---------------------------------------------------------------------------------------------------------


@_add(Buffer.PARAM_FULL, Place.HBM, ALWAYS, state=True)
def param_full(c: DeepSpeedRank) -> int:
    """The whole trainable model on every rank.

    Source: stage_1_and_2.py, flatten_dense_tensors_aligned (stages 1 and 2 pad the flat group)
    """
    if c.stage == 3:
        return 0
    return c.param_bytes * (c.flat_group if c.stage else c.trainable)


@_add(Buffer.PARAM_REFERENCE, Place.HBM, ALWAYS, state=True)
def param_reference(c: DeepSpeedRank) -> int:
    """A frozen reference model of the same size in the model's dtype: whole, as an engine of stage 0 without an optimizer, or
    this rank's part of each parameter at stage 3.

    Source: TRL 1.16, models/utils.py, prepare_deepspeed
    """
    return c.param_bytes * c.reference


@_add(Buffer.PARAM_SHARD, Place.HBM, ALWAYS, state=True)
def param_shard(c: DeepSpeedRank) -> int:
    """This rank's part of every parameter, in the model's dtype. Source: zero/partition_parameters.py, _partition_param"""
    return c.param_bytes * c.sharded if c.stage == 3 and c.param_device is OffloadDevice.NONE else 0


@_add(Buffer.PARAM_SHARD, Place.PINNED, ALWAYS, state=True)
def param_shard_host(c: DeepSpeedRank) -> int:
    """The parameters' parts in one flat host buffer, always pinned.

    Source: stage3.py, _create_param_groups_fp16_flat_cpu_memory
    """
    if c.param_device is OffloadDevice.CPU:
        return pow2(c.param_bytes * c.sharded)
    return pow2(c.param_bytes * c.params_in_cpu) if c.param_device is OffloadDevice.NVME else 0


@_add(Buffer.INIT_TEMP, Place.PINNED, ALWAYS)
def param_first_shards(c: DeepSpeedRank) -> int:
    """Each parameter's own pinned part, replaced by the flat buffer but kept in torch's cache of host blocks.

    Source: zero/partition_parameters.py, _partition_param (with NVMe, of parameters too small for a file)
    """
    return c.small_param_blocks if c.param_device is not OffloadDevice.NONE else 0


@_add(Buffer.PARAM_SHARD, Place.NVME, ALWAYS, state=True)
def param_shard_nvme(c: DeepSpeedRank) -> int:
    """The parameters' parts in files, those too that a flat buffer holds.

    Source: swap_tensor/partitioned_param_swapper.py, swappable_tensor, _io_aligned_numel
    """
    return c.param_bytes * c.params_in_files


@_add(Buffer.PARAM_FROZEN, Place.HBM, ALWAYS, state=True)
def param_frozen(c: DeepSpeedRank) -> int:
    """Parameters without gradient: whole below stage 3, this rank's part at stage 3.

    Source: engine.py, _configure_distributed_model; zero/partition_parameters.py, _partition_param
    """
    if c.stage < 3:
        return c.param_bytes * c.frozen
    return c.param_bytes * c.frozen_sharded if c.param_device is OffloadDevice.NONE else 0


add_quant_states_line(_lines, Buffer.PARAM_FROZEN)


@_add(Buffer.PARAM_FROZEN, Place.PINNED, ALWAYS, state=True)
def param_frozen_host(c: DeepSpeedRank) -> int:
    """Offloaded parameters without gradient, each in a pinned block of its own; those in files have none.

    Source: zero/partition_parameters.py, _partition_param
    """
    return c.frozen_blocks if c.param_device is not OffloadDevice.NONE else 0


@_add(Buffer.PARAM_PERSISTENT, Place.HBM, _FROM_FIRST_FORWARD)
def param_persistent(c: DeepSpeedRank) -> int:
    """Small parameters that stay gathered beside their part (stage3_param_persistence_threshold).

    A single rank's part is the whole: it is gathered only where that means from the host.

    Source: zero/parameter_offload.py, mark_persistent_parameters; zero/partition_parameters.py, all_gather_coalesced
    """
    if c.stage != 3 or (c.ranks == 1 and c.param_device is OffloadDevice.NONE):
        return 0
    return c.param_bytes * c.persistent


@_add(Buffer.PARAM_SECONDARY, Place.HBM, _UNTIL_STEP)
def param_secondary(c: DeepSpeedRank) -> int:
    """A second part of every parameter, of a smaller group of ranks (zero_hpz_partition_size); the step drops it.

    Source: zero/partition_parameters.py, _partition_param_sec; stage3.py, invalidate_secondary_tensor
    """
    return c.param_bytes * c.secondary if c.param_device is OffloadDevice.NONE else 0


@_add(Buffer.PARAM_SECONDARY, params_on_host, _UNTIL_STEP)
def param_secondary_host(c: DeepSpeedRank) -> int:
    """The second parts of offloaded parameters, each in a block of its own.

    Source: zero/partition_parameters.py, _partition_param_sec
    """
    if c.param_device is not OffloadDevice.CPU:
        return 0
    return c.secondary_blocks if c.pin_param else c.param_bytes * c.secondary


@_add(Buffer.PARAM_FULL, Place.HBM, (Phase.FORWARD, Phase.BACKWARD))
def param_saved(c: DeepSpeedRank) -> int:
    """Gathered weights that autograd keeps until their backward, where torch's own linear function runs.

    Source: zero/linear.py and zero/partition_parameters.py, _enable_mem_efficient_linear (memory_efficient_linear)
    """
    return c.param_bytes * c.saved_weights


@_add(Buffer.PARAM_FULL, Place.HBM, (Phase.FORWARD, Phase.BACKWARD))
def param_of_graph(c: DeepSpeedRank) -> int:
    """Gathered weights of a quantised base, which its products keep in the graph until the loss goes; a loop that keeps its
    last loss holds those of two micro batches.

    Source: bitsandbytes 0.50, autograd/_functions.py, MatMul4Bit; saved_weights.py, Note [Weights of graphs]
    """
    return c.param_bytes * c.graph_weights


@_add(Buffer.PARAM_MASTER, Place.HBM, ALWAYS, state=True)
def param_master(c: DeepSpeedRank) -> int:
    """The optimizer's own copy of what this rank updates; stages 1 to 3 clone it even for an fp32 model.

    Source: stage_1_and_2.py, single_partition_of_fp32_groups; stage3.py, _create_fp32_partitions
    """
    return c.master_bytes * c.stepped_hbm if c.own_masters else 0


def _masters_place(c: DeepSpeedRank) -> Place:
    return c.pinned if c.does(Knob.MASTERS_PINNED_BY_KEY) else Place.PINNED


@_add(Buffer.PARAM_MASTER, _masters_place, ALWAYS, state=True)
def param_master_host(c: DeepSpeedRank) -> int:
    """The optimizer's own copy, offloaded (stages 1 and 2): one pinned block. Source: stage_1_and_2.py, weights_partition"""
    if c.stage not in (1, 2):
        return 0
    nbytes = c.master_bytes * c.stepped_host
    return host_block(c, nbytes) if c.does(Knob.MASTERS_PINNED_BY_KEY) else pow2(nbytes)


@_add(Buffer.PARAM_MASTER, Place.DRAM, ALWAYS, state=True)
def param_master_host_stage3(c: DeepSpeedRank) -> int:
    """The optimizer's own copy, offloaded (stage 3): pageable. Source: stage3.py, _create_fp32_partitions"""
    return c.master_bytes * c.stepped_host if c.stage == 3 else 0


@_add(Buffer.PARAM_MASTER, Place.NVME, ALWAYS, state=True)
def param_master_nvme(c: DeepSpeedRank) -> int:
    """The optimizer's own copy in files, one a sub-group. Source: swap_tensor/partitioned_optimizer_swapper.py"""
    return c.master_bytes * c.states_in_files


# --- gradients ----------------------------------------------------------------------------------------------------------


@_add(Buffer.GRAD_FULL, Place.HBM, _BACKWARD_TO_STEP, state=True)
def grad_full(c: DeepSpeedRank) -> int:
    """Whole gradients of all trainable parameters (stage 0). Source: engine.py, allreduce_gradients"""
    return c.param_bytes * c.trainable if c.stage == 0 else 0


@_add(Buffer.GRAD_FULL, Place.HBM, (Phase.BACKWARD,), state=True)
def grad_full_stage1(c: DeepSpeedRank) -> int:
    """Whole gradients, freed as they are reduced at the accumulation boundary (stage 1).

    Source: stage_1_and_2.py keeps .grad until the boundary when gradients are not partitioned
    """
    return c.param_bytes * c.trainable if c.stage == 1 and not c.uses_grad_accum_attribute else 0


@_add(Buffer.GRAD_ACCUM, Place.HBM, (Phase.BACKWARD,), state=True)
def grad_accum_stage1(c: DeepSpeedRank) -> int:
    """Whole gradients in the accumulation's dtype, in place of those of the model's (stage 1).

    Source: stage_1_and_2.py, fill_grad_accum_attribute
    """
    return c.accum_bytes * c.trainable if c.uses_grad_accum_attribute else 0


@_add(Buffer.GRAD_SHARD, Place.HBM, (Phase.STEP,))
def grad_shard_stage1(c: DeepSpeedRank) -> int:
    """The reduced gradients of this rank's partition, from the boundary to the step (stage 1).

    Source: stage_1_and_2.py, copy_grads_in_partition, _add_full_reduction_to_compact_grad_partition
    """
    return _kept_width(c) * c.stepped if c.stage == 1 else 0


@_add(Buffer.GRAD_ACCUM, Place.HBM, ALWAYS, state=True)
def grad_accum_fp32(c: DeepSpeedRank) -> int:
    """Gradients of the whole model in the accumulation's dtype, made at initialisation and never sharded (BF16_Optimizer).

    Source: bf16_optimizer.py, fp32_groups_gradients_flat
    """
    return c.accum_bytes * c.flat_group if c.full_fp32_grads else 0


@_add(Buffer.GRAD_SHARD, Place.HBM, _BACKWARD_TO_STEP, state=True)
def grad_shard(c: DeepSpeedRank) -> int:
    """Averaged gradients of this rank's partition, alive from the backward to the step (stage 2).

    Source: stage_1_and_2.py, copy_grads_in_partition, _add_full_reduction_to_compact_grad_partition
    """
    return _kept_width(c) * c.stepped if c.stage == 2 else 0


@_add(Buffer.GRAD_ACCUM, Place.HBM, ALWAYS, state=True)
def grad_accum(c: DeepSpeedRank) -> int:
    """Accumulated gradients of this rank's part: one flat buffer, never freed (stage 3).

    Source: stage3.py, grad_partitions_flat_buffer
    """
    return c.accum_bytes * c.sharded if c.stage == 3 and c.optimizer_device is OffloadDevice.NONE else 0


@_add(Buffer.GRAD_ACCUM, pinned, ALWAYS, state=True)
def grad_accum_host(c: DeepSpeedRank) -> int:
    """Accumulated gradients on the host (stage 3 with optimizer offload). Source: stage3.py, grad_partitions_flat_buffer"""
    if c.stage != 3 or c.optimizer_device is OffloadDevice.NONE:
        return 0
    return host_block(c, c.accum_bytes * c.sharded)


@_add(Buffer.GRAD_MASTER, pinned, ALWAYS, state=True)
def grad_master_host(c: DeepSpeedRank) -> int:
    """Gradients in the master's dtype, as the CPU optimizer reads them.

    Source: stage_1_and_2.py, single_partition_of_fp32_groups[i].grad; stage3.py, initialize_optimizer_states
    """
    if c.optimizer_device is not OffloadDevice.CPU:
        return 0
    if c.stage == 3:
        return c.pinned_grad_block if c.pin_optimizer else c.master_bytes * c.stepped_host
    return host_block(c, c.master_bytes * c.stepped_host)


@_add(Buffer.GRAD_MASTER, Place.HBM, ALWAYS, state=True)
def grad_master_kept(c: DeepSpeedRank) -> int:
    """Gradients in the master's dtype for the sub-groups that a partial offload keeps on the GPU.

    Source: stage3.py, initialize_optimizer_states
    """
    return c.master_bytes * c.stepped_hbm if c.stage == 3 and c.optimizer_device is OffloadDevice.CPU else 0


@_add(Buffer.GRAD_MASTER, Place.NVME, FROM_FIRST_STEP, state=True)
def grad_master_nvme(c: DeepSpeedRank) -> int:
    """Gradients in the master's dtype, one file a parameter, swapped out between backward and step.

    Source: swap_tensor/optimizer_utils.py, _swap_out_gradients, _adjust_for_misaligned_lengths
    """
    return c.master_bytes * c.grads_in_files


@_add(Buffer.GRAD_ACCUM, pinned, ALWAYS, state=True)
def grad_accum_host_stage2(c: DeepSpeedRank) -> int:
    """Gradients kept on the host across micro batches (stages 1 and 2, accumulation above 1).

    Source: stage_1_and_2.py, accumulated_grads_in_cpu (a buffer for every parameter, whole)
    """
    return c.accum_blocks


# --- optimizer states ---------------------------------------------------------------------------------------------------


def _on_gpu(c: DeepSpeedRank) -> bool:
    return c.optimizer_device is OffloadDevice.NONE


_add_states = partial(add_state_lines, _lines, matrix=None)  # muon_lines.py has those of matrices
_add_states(Place.HBM, lambda c: c.stepped_hbm, rest=lambda c: c.rest if _on_gpu(c) else 0)
_add_states(Place.DRAM, lambda c: c.stepped_host, rest=lambda c: 0 if _on_gpu(c) else c.rest_in_memory, suffix="_host")
_add_states(Place.NVME, lambda c: c.states_in_files, rest=lambda c: c.rest_in_files, suffix="_nvme")


@_add(Buffer.OPTIM_SUM, Place.HBM, ALWAYS, state=True)
def optim_sum_of_module(c: DeepSpeedRank) -> int:
    """States of the module's own parameters, which Adagrad's constructor makes before ZeRO gives it masters, and nobody steps.

    Source: engine.py, basic_optimizer; stage_1_and_2.py and stage3.py, initialize_optimizer_states
    """
    return c.param_bytes * c.built_numel


add_muon_lines(_lines)


@_add(Buffer.OPTIM_EXP_AVG_SQ, Place.DRAM, FROM_FIRST_STEP, state=True)
def cpu_lion_second_moment(c: DeepSpeedRank) -> int:
    """DeepSpeed's Lion for CPUs keeps a second moment, although Lion has none. Source: deepspeed/ops/lion/cpu_lion.py"""
    return c.state_bytes * c.stepped_host if c.second_moment_always else 0


@_add(Buffer.OPTIM_SERVER_ERROR, Place.HBM, FROM_FIRST_STEP, state=True)
def server_error(c: DeepSpeedRank) -> int:
    """The server's share of the error feedback (1-bit optimizers), kept by each rank for the chunk that it averages.

    Source: Tang et al. 2021, algorithm 1
    """
    return 4 * shard(c.stepped_hbm, c.ranks) if c.optimizer.compresses else 0


LEDGER = Ledger((*_lines.ledger(), *PASSING))
