"""FSDP2's ledger: `fully_shard` on each block and the root, mixed precision, fused AdamW.

Each parameter is split along its first dimension in equal, padded chunks; the sharded fp32 parameter is the master.
Sources without a folder are files of torch/distributed/fsdp/_fully_shard/ of torch 2.11.
"""

from __future__ import annotations

from zeroplan.core.buffers import ALWAYS, FROM_FIRST_STEP, Buffer, Phase, Place
from zeroplan.engines.fsdp2.rank import Fsdp2Rank
from zeroplan.ledger.line import LedgerBuilder
from zeroplan.ledger.optimizer_lines import add_quant_states_line, add_state_lines, add_workspace_line

_lines = LedgerBuilder()
_add = _lines.add


@_add(Buffer.PARAM_SHARD, Place.HBM, ALWAYS, state=True)
def param_shard(c: Fsdp2Rank) -> int:
    """This rank's chunks, the masters themselves: in fp32 unless the program shards a 16-bit model.

    Source: _fsdp_param.py, _init_sharded_param
    """
    return 0 if c.offload else c.original_bytes * c.sharded_trainable + c.frozen_bytes * c.sharded_frozen


@_add(Buffer.PARAM_SHARD, Place.PINNED, ALWAYS, state=True)
def param_shard_host(c: Fsdp2Rank) -> int:
    """This rank's chunks on the host (CPUOffloadPolicy), each in a pinned block of its own.

    Source: _fsdp_param.py, reset_sharded_param
    """
    return c.param_blocks


add_quant_states_line(_lines, Buffer.PARAM_FULL)


@_add(Buffer.GRAD_SHARD, Place.HBM, (Phase.BACKWARD, Phase.STEP), state=True)
def grad_shard(c: Fsdp2Rank) -> int:
    """Reduced gradients in the original dtype, until zero_grad. Source: _fsdp_collectives.py, foreach_reduce"""
    return 0 if c.offload else c.original_bytes * c.sharded_graded


@_add(Buffer.GRAD_FULL, Place.HBM, (Phase.FORWARD, Phase.BACKWARD))
def grad_accumulated(c: Fsdp2Rank) -> int:
    """Whole gradients of the micro batches before the last, in the reduction's dtype: only the last one's backward reduces.

    Source: _fsdp_param.py, to_accumulated_grad_if_needed (unsharded_accumulated_grad)
    """
    if not c.accumulates:
        return 0
    return c.reduce_bytes * (c.accumulated if c.shares_matrices else c.graded)


@_add(Buffer.GRAD_SHARD, Place.PINNED, (Phase.BACKWARD, Phase.STEP), state=True)
def grad_shard_host(c: Fsdp2Rank) -> int:
    """Reduced gradients copied to the host as they are made: a copy that does not block gets pinned memory.

    Source: _fsdp_collectives.py, foreach_reduce
    """
    return c.grad_blocks


add_state_lines(
    _lines,
    Place.HBM,
    lambda c: 0 if c.offload else c.sharded_graded,
    rest=lambda c: 0 if c.offload else c.rest,
    matrix=lambda c: 0 if c.offload else c.matrix,
)
add_state_lines(
    _lines,
    Place.DRAM,
    lambda c: c.sharded_graded if c.offload else 0,
    rest=lambda c: c.rest if c.offload else 0,
    matrix=lambda c: c.matrix if c.offload else 0,
    suffix="_host",
)


@_add(Buffer.STAGE_H2D, Place.HBM, (Phase.FORWARD, Phase.BACKWARD))
def chunk_from_host(c: Fsdp2Rank) -> int:
    """A chunk's copy from the host before it is cast: of the largest parameter. Source: _fsdp_param.py, all_gather_inputs"""
    return c.original_bytes * c.largest_chunk if c.offload else 0


@_add(Buffer.PARAM_FULL, Place.HBM, (Phase.FORWARD, Phase.BACKWARD))
def root_full(c: Fsdp2Rank) -> int:
    """The root's parameters (embedding, final norm, head), gathered from the forward to the end of the backward.

    Source: _fsdp_state.py, _lazy_init (the root is not resharded after its forward)
    """
    return c.param_bytes * c.root_unit if c.ranks > 1 or c.param_bytes != c.original_bytes else 0


@_add(Buffer.PARAM_FULL, Place.HBM, (Phase.FORWARD, Phase.BACKWARD))
def blocks_full(c: Fsdp2Rank) -> int:
    """Every block's gathered parameters, where they are not resharded after the forward.

    Source: _fsdp_param_group.py, post_forward
    """
    return 0 if c.reshard else c.param_bytes * (c.params - c.root_unit)


@_add(Buffer.COMM_ALL_GATHER, Place.HBM, (Phase.FORWARD, Phase.BACKWARD))
def gathers(c: Fsdp2Rank) -> int:
    """Three blocks in flight: the previous gather's output, the current one and the unsharded parameters.

    Source: _fsdp_param_group.py, unshard and wait_for_unshard; _fsdp_collectives.py, foreach_all_gather
    """
    return 3 * c.param_bytes * c.largest_unit if c.reshard else 2 * c.param_bytes * c.largest_unit


@_add(Buffer.COMM_REDUCE_SCATTER, Place.HBM, (Phase.BACKWARD,))
def reduce_input(c: Fsdp2Rank) -> int:
    """The reduce-scatter's input for one block, in the reduction's dtype. Source: _fsdp_collectives.py, foreach_reduce"""
    return c.reduce_bytes * c.largest_unit


@_add(Buffer.COMM_PIPELINE, Place.HBM, FROM_FIRST_STEP)
def pipeline_buffers(c: Fsdp2Rank) -> int:
    """A pipeline stage's buffers for inputs and for gradients of outputs, of every micro batch of a step.

    Source: torch/distributed/pipelining/stage.py, _RecvInfo
    """
    return c.hidden_bytes * c.received * c.grad_accum


add_workspace_line(_lines)


LEDGER = _lines.ledger()
