"""FSDP 1's ledger: flat parameters, mixed precision, torch's optimizers on this rank's parts.

Sources without a folder are files of torch/distributed/fsdp/ of torch 2.11.
"""

from __future__ import annotations

from zeroplan.core.buffers import ALWAYS, FROM_FIRST_STEP, Buffer, Phase, Place
from zeroplan.engines.fsdp.rank import FsdpRank
from zeroplan.ledger.line import LedgerBuilder
from zeroplan.ledger.optimizer_lines import add_quant_states_line, add_state_lines, add_workspace_line

_lines = LedgerBuilder()
_add = _lines.add
_COMPUTING = (Phase.FORWARD, Phase.BACKWARD)


@_add(Buffer.PARAM_SHARD, Place.HBM, ALWAYS, state=True)
def param_shard(c: FsdpRank) -> int:
    """This rank's parts, the masters themselves. Source: _flat_param.py, FlatParamHandle.shard"""
    return 0 if c.offload else c.original_bytes * c.part_trained + c.frozen_bytes * c.part_frozen


@_add(Buffer.PARAM_SHARD, Place.PINNED, ALWAYS, state=True)
def param_shard_host(c: FsdpRank) -> int:
    """This rank's parts on the host, each pinned. See Note [CPUOffload of FSDP 1].

    Source: _flat_param.py, init_flat_param_attributes
    """
    return c.host_blocks


@_add(Buffer.GRAD_SHARD, Place.PINNED, FROM_FIRST_STEP, state=True)
def grad_shard_host(c: FsdpRank) -> int:
    """A gradient on the host for each part, frozen ones included.

    Source: _flat_param.py, init_flat_param_attributes (_cpu_grad)
    """
    return c.host_blocks


@_add(Buffer.GRAD_SHARD, Place.HBM, (Phase.BACKWARD,), state=True)
def grad_shard_backward(c: FsdpRank) -> int:
    """Reduced gradients on the GPU until the backward's end, where they are copied to the host.

    Source: _runtime_utils.py, _accumulate_sharded_grad
    """
    return c.original_bytes * c.part_trained if c.offload else 0


@_add(Buffer.STAGE_H2D, Place.HBM, _COMPUTING)
def part_from_host(c: FsdpRank) -> int:
    """A part's copy from the host: of the largest unit.

    Source: _flat_param.py, pre_unshard
    """
    return c.largest_part if c.offload else 0


add_quant_states_line(_lines, Buffer.PARAM_FULL)


@_add(Buffer.GRAD_SHARD, Place.HBM, FROM_FIRST_STEP, state=True)
def grad_shard(c: FsdpRank) -> int:
    """Reduced gradients in the parameters' own dtype, until the next forward begins.

    Source: _runtime_utils.py, _cast_grad_to_param_dtype and _root_pre_forward
    """
    return 0 if c.offload else c.original_bytes * c.part_trained


@_add(Buffer.GRAD_FULL, Place.HBM, _COMPUTING)
def grad_accumulated(c: FsdpRank) -> int:
    """Whole gradients of the micro batches before the last, which ``no_sync`` leaves unreduced.

    Source: _runtime_utils.py, _post_backward_hook
    """
    return c.param_bytes * c.trained_whole if c.leaves_whole_gradients else 0


add_state_lines(_lines, Place.HBM, lambda c: 0 if c.offload else c.stepped_part)
add_state_lines(_lines, Place.DRAM, lambda c: c.stepped_part if c.offload else 0, suffix="_host")


@_add(Buffer.PARAM_FULL, Place.HBM, _COMPUTING)
def root_full(c: FsdpRank) -> int:
    """The root's flat parameter, which stays from the forward's begin to the end of its backward.

    Source: _runtime_utils.py, _post_forward_reshard
    """
    return c.param_bytes * c.root_unit if c.sharded or c.casts_root else 0


@_add(Buffer.PARAM_FULL, Place.HBM, _COMPUTING)
def blocks_full(c: FsdpRank) -> int:
    """Two blocks in flight, the one that runs and the one that is gathered ahead; without resharding, all.

    Source: _runtime_utils.py, _prefetch_handle; _flat_param.py, _alloc_padded_unsharded_flat_param
    """
    if not c.sharded:
        return c.param_bytes * c.largest_unit if c.casts_blocks else 0
    return 2 * c.param_bytes * c.largest_unit if c.reshard else c.param_bytes * c.gathered_blocks


@_add(Buffer.COMM_REDUCE_SCATTER, Place.HBM, (Phase.BACKWARD,))
def flat_gradient(c: FsdpRank) -> int:
    """The largest block's gradient: one tensor a parameter, and the flat one that they are joined into.

    Source: the backward of torch.split over the flat parameter, SplitWithSizesBackward
    """
    return 2 * c.param_bytes * c.largest_trained_unit


add_workspace_line(_lines)


LEDGER = _lines.ledger()
