"""The K-constant formula of the ZeRO paper: model states alone, no engine's buffers.

With Ψ parameters, 16-bit parameters and gradients of 2 bytes each and K bytes of optimizer state a parameter (12 for
Adam: fp32 master, mean and mean square), a rank of N holds, by stage 0 to 3: (2 + 2 + K)Ψ, 2Ψ + 2Ψ + KΨ/N,
2Ψ + (2 + K)Ψ/N and (2 + 2 + K)Ψ/N.
Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", figure 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroplan.core.buffers import ALWAYS, Buffer, Phase, Place
from zeroplan.ledger.derive import shard
from zeroplan.ledger.line import LedgerBuilder, evaluate

_lines = LedgerBuilder()

#: Adam's K: fp32 master, first and second moment.
K_ADAM = 12


@dataclass(frozen=True, slots=True)
class StateFacts:
    """Ψ, N, the stage, and the widths in bytes a parameter."""

    params: int
    ranks: int
    stage: int
    param_bytes: int = 2
    grad_bytes: int = 2
    k: int = K_ADAM


@_lines.add(Buffer.PARAM_FULL, Place.HBM, ALWAYS, state=True)
def parameters(c: StateFacts) -> int:
    """Parameters: sharded from stage 3 on (P_os+g+p)."""
    return c.param_bytes * (shard(c.params, c.ranks) if c.stage >= 3 else c.params)


@_lines.add(Buffer.GRAD_FULL, Place.HBM, (Phase.BACKWARD, Phase.STEP), state=True)
def gradients(c: StateFacts) -> int:
    """Gradients: sharded from stage 2 on (P_os+g)."""
    return c.grad_bytes * (shard(c.params, c.ranks) if c.stage >= 2 else c.params)


@_lines.add(Buffer.PARAM_MASTER, Place.HBM, ALWAYS, state=True)
def optimizer(c: StateFacts) -> int:
    """Optimizer states and masters, K bytes a parameter: sharded from stage 1 on (P_os)."""
    return c.k * (shard(c.params, c.ranks) if c.stage >= 1 else c.params)


LEDGER = _lines.ledger()


def model_states(
    params: int, *, ranks: int = 1, stage: int = 0, k: int = K_ADAM, param_bytes: int = 2, grad_bytes: int = 2
) -> int:
    """Bytes of model states on one rank.

    Args:
        params: Ψ, elements.
        ranks: N, data-parallel ranks.
        stage: 0 to 3.
        k: bytes of optimizer state and master a parameter.
        param_bytes: bytes of one parameter.
        grad_bytes: bytes of one gradient element.
    """
    return sum(item.bytes for item in evaluate(LEDGER, StateFacts(params, ranks, stage, param_bytes, grad_bytes, k)))
