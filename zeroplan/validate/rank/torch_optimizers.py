"""torch's optimizers as a program of FSDP2 or DDP makes them: one, or two where the first takes matrices alone (Muon)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from zeroplan.core.errors import BadInput
from zeroplan.core.optimizers import OPTIMIZERS, find_optimizer
from zeroplan.engines.torch_optimizer import muon_takes

#: Small enough that no optimizer leaves the loss's range within the few steps of a run.
_LEARNING_RATE = 1e-5


def make_optimizers(name: str, parameters: Iterable[tuple[str, Any]]) -> list[torch.optim.Optimizer]:
    """The optimizers that step together, fused where torch's class can be.

    Args:
        name: a row of the optimizer table.
        parameters: trainable parameters with their full names.

    Raises:
        BadInput: for an optimizer that ``torch.optim`` lacks.
    """
    row, named = find_optimizer(name), list(parameters)
    if not row.rest:
        return [_made(row.name, [p for _, p in named])]
    matrices = [p for full, p in named if muon_takes(full, p.dim())]
    others = [p for full, p in named if not muon_takes(full, p.dim())]
    return [_made(kind, params) for kind, params in ((row.name, matrices), (row.rest, others)) if params]


def _made(name: str, parameters: list[Any]) -> torch.optim.Optimizer:
    kind = OPTIMIZERS[name].torch
    if kind is None or not hasattr(torch.optim, kind.name):
        raise BadInput(f"torch has no optimizer {name!r}", where="--optimizer", remedy="verify runs torch.optim's")
    fused = {"fused": True} if kind.fused else {}
    optimizer = getattr(torch.optim, kind.name)(parameters, lr=_LEARNING_RATE, **fused, **kind.params)
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer
