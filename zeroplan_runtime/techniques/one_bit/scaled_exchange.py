"""Averages the ranks' momentum in one bit an element for 1-bit LAMB (Li et al. 2021, section 3.2 and algorithm 1).

Before the first such step each tensor gets a *scale*: the mean of all tensors' magnitudes by its own, so that tensors that
share a block's scale in a message have values of one size. Momentum is exchanged in these units; so are both errors. At rest
it is in its own units. The gradient that the momentum's change stands for updates the fresh second moment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from zeroplan.core.buffers import Buffer
from zeroplan_runtime import kernels
from zeroplan_runtime.model_states import ModelStates
from zeroplan_runtime.techniques.one_bit.compression_schedule import CompressionStep, Exchanged
from zeroplan_runtime.techniques.one_bit.momentum_exchange import MomentumExchange
from zeroplan_runtime.unit_state import GroupSlice, UnitState


class ScaledExchange(MomentumExchange):
    """Exchanges the momentum of each unit, its tensors scaled.

    Args:
        model_states: the units; their optimizer compresses, and keeps a fresh second moment.
        slices: for each unit the work of its update.

    Attributes:
        scales: for each unit the scale of each trained tensor, in the order of its flat; 1 before the first exchange.
    """

    def __init__(self, model_states: ModelStates, slices: Sequence[Sequence[GroupSlice]]) -> None:
        super().__init__(model_states)
        self._slices = slices
        self._skip_and_factor: tuple[bool, float] | None = None  # of the present step
        self.scales = [[1.0] * len(u.trainable.params) if u.trainable is not None else [] for u in model_states.units]

    def begin(
        self, step: CompressionStep, number: int, groups: Sequence[Mapping[str, Any]], scalars: torch.Tensor | None
    ) -> None:
        """Prepares for the exchanges of a step; the first takes the scales, and begins the fresh second moment."""
        super().begin(step, number, groups, scalars)
        self._skip_and_factor = None
        if not step.begins:
            return
        sizes = [_magnitudes(unit) for unit in self._model_states.units]
        count = sum(map(len, sizes))
        mean = math.fsum(size for unit in sizes for size in unit) / count
        found = torch.tensor(
            [mean / size if size else 1.0 for unit in sizes for size in unit], dtype=torch.float64, device="cpu"
        )
        found = found.to(self._model_states.arena.device)
        self._comm.broadcast(found)
        scales = iter(found.tolist())
        self.scales = [[next(scales) for _ in unit] for unit in sizes]
        for unit in self._model_states.units:
            if unit.trainable is not None:
                unit.optim_states[Buffer.OPTIM_EXP_AVG_SQ_FRESH].copy_(unit.optim_states[Buffer.OPTIM_EXP_AVG_SQ])

    def exchange(self, unit: UnitState, what: Exchanged, betas: tuple[float, float], scalars: torch.Tensor | None) -> None:
        """Adds this rank's gradients to the unit's momentum, averages that over the ranks, and updates the fresh second moment.

        The host waits for the step's scalars, once a step.
        """
        if self._skip_and_factor is None:
            values = scalars.tolist() if scalars is not None else []
            self._skip_and_factor = (bool(values[kernels.SKIP]), values[kernels.FACTOR]) if values else (False, 1.0)
        skip, factor = self._skip_and_factor
        if skip:
            return
        assert unit.exchanged is not None
        assert unit.trainable is not None
        kept, scales = unit.exchanged, self.scales[unit.index]
        beta1 = betas[0]
        views = unit.trainable.views(kept.momentum)
        torch._foreach_mul_(views, [scale * beta1 for scale in scales])
        # The gradient goes to the error, so that the momentum of before stays, equal on all ranks.
        for error, grad, scale in zip(unit.trainable.views(kept.worker_error), unit.grads.views, scales, strict=True):
            error.add_(grad, alpha=scale * (1 - beta1) * factor)
        sent = self._mean_of_signs(unit, 1.0)
        kept.momentum.neg_()
        self._unpack(unit, sent, 0.5)  # half of what the gradient has added
        self._freshen(unit, betas)
        self._unpack(unit, sent)
        torch._foreach_div_(views, scales)

    def _freshen(self, unit: UnitState, betas: tuple[float, float]) -> None:
        """Adds the squares of gradients to the fresh second moment: of twice the momentum buffer / ((1 − β₁) · scale)."""
        share, fresh = unit.optim_states[Buffer.OPTIM_EXP_AVG], unit.optim_states[Buffer.OPTIM_EXP_AVG_SQ_FRESH]
        scales = iter(self.scales[unit.index])
        beta1, beta2 = betas
        for part in self._slices[unit.index]:
            assert part.tensors is not None
            for (begin, end), scale in zip(pairwise(part.tensors.bounds), scales, strict=False):
                where = slice(part.part.start + begin, part.part.start + end)
                gain = 2 / ((1 - beta1) * scale)
                fresh[where].mul_(beta2).addcmul_(share[where], share[where], value=(1 - beta2) * gain * gain)


def _magnitudes(unit: UnitState) -> list[float]:
    """The root mean square of each trained tensor's momentum, in the order of the unit's flat."""
    if unit.exchanged is None or unit.trainable is None:
        return []
    views = unit.trainable.views(unit.exchanged.momentum)
    norms = torch.stack([view.double().norm() for view in views]).tolist()
    return [norm / math.sqrt(view.numel()) if view.numel() else 0.0 for norm, view in zip(norms, views, strict=True)]
