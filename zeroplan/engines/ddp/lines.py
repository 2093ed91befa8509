"""DDP's ledger: everything whole on every rank, and the reduction's buckets.

Source: torch/csrc/distributed/c10d/reducer.cpp (buckets hold all gradients; gradient_as_bucket_view is off by default).
"""

from __future__ import annotations

from zeroplan.core.buffers import ALWAYS, Buffer, Phase, Place
from zeroplan.engines.ddp.rank import DdpRank
from zeroplan.ledger.line import LedgerBuilder
from zeroplan.ledger.optimizer_lines import add_state_lines, add_workspace_line

_lines = LedgerBuilder()
_add = _lines.add


@_add(Buffer.PARAM_FULL, Place.HBM, ALWAYS, state=True)
def param_full(c: DdpRank) -> int:
    """The whole model, in fp32 unless its program loads it in 16 bits; a quantised base's linear layers in 4 or 8.

    Source: torch/nn/parallel/distributed.py, DistributedDataParallel (it wraps the module as it is)
    """
    if not c.quantized:
        return c.original_bytes * c.trainable + c.frozen_bytes * c.frozen
    return c.original_bytes * c.trainable + c.frozen_bytes * c.frozen_whole + c.quantized_bytes


@_add(Buffer.PARAM_REFERENCE, Place.HBM, ALWAYS, state=True)
def param_reference(c: DdpRank) -> int:
    """A frozen reference model of the same size, in the dtype in which the trained one was loaded.

    Source: TRL 1.16, trainer/dpo_trainer.py, ref_model_init_kwargs
    """
    return c.original_bytes * c.reference


@_add(Buffer.GRAD_FULL, Place.HBM, (Phase.BACKWARD, Phase.STEP), state=True)
def grad_full(c: DdpRank) -> int:
    """Gradients, until zero_grad. Source: torch/csrc/autograd/functions/accumulate_grad.h"""
    return c.original_bytes * c.graded


@_add(Buffer.GRAD_FULL, Place.HBM, (Phase.FORWARD,), state=True)
def grad_between_steps(c: DdpRank) -> int:
    """Gradients that the last step left, where ``zero_grad`` does not free them. Source: torch/optim/optimizer.py, zero_grad"""
    return c.original_bytes * c.kept_gradients


@_add(Buffer.COMM_ALL_REDUCE, Place.HBM, ALWAYS)
def buckets(c: DdpRank) -> int:
    """The reducer's buckets: a second copy of all gradients, where there is more than one rank.

    Source: torch/csrc/distributed/c10d/reducer.cpp, initialize_buckets
    """
    return c.original_bytes * c.trainable if c.ranks > 1 else 0


add_state_lines(_lines, Place.HBM, lambda c: c.graded)


add_workspace_line(_lines)


LEDGER = _lines.ledger()
