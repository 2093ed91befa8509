"""What Megatron-LM's process groups take outside torch's allocator: Note [Measured, not derived] in ``engines/process.py``."""

from __future__ import annotations

from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.process import FURTHER_ALONE, FURTHER_COMMUNICATOR, ONE_COMMUNICATOR, PAIRS


def nccl_bytes(zero: ZeroConfig, layout: ParallelLayout) -> int:
    """Return the bytes of NCCL's communicators on the last stage's ranks, beyond a first communicator of one rank.

    Torch makes a group's communicator when the first collective asks for it, also a group's of one rank. Checkpoint keys are
    gathered over all ranks; the loss is added up over the tensor-parallel ranks, gradients over the data-parallel ones, and
    their norm over all that share the optimizer's states. Stages send in pairs, experts' tokens go all to all. With
    context parallelism, whose ring sends in pairs as well, and more than two stages it was not measured.

    Sources: Megatron-LM core_v0.16.1, ``megatron/core/parallel_state.py``, ``megatron/core/tensor_parallel/cross_entropy.py``,
    ``megatron/core/distributed/param_and_grad_buffer.py``, ``megatron/core/optimizer/clip_grads.py``,
    ``megatron/core/transformer/moe/token_dispatcher.py``; what each takes: ``benchmarks/mesh/communicators.py``.
    """
    if layout.world_size == 1:
        return 2 * FURTHER_ALONE  # the loss' and the gradients' beside the one of all ranks
    norm = layout.world_size if zero.stage else layout.tp * layout.pp
    total = ONE_COMMUNICATOR + sum(_further(size) for size in (layout.tp, layout.shard_group, norm))
    if layout.pp > 1:
        total += PAIRS * min(layout.pp - 1, 2)
    if layout.cp > 1:
        total += PAIRS
    if layout.ep > 1:
        total += FURTHER_COMMUNICATOR + PAIRS + _further(layout.expert_shard_group)
    return total


def _further(ranks: int) -> int:
    return FURTHER_COMMUNICATOR if ranks > 1 else FURTHER_ALONE
