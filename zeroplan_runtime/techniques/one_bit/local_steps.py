"""0/1 Adam's local steps (Lu et al. 2022, algorithm 1): after the freeze ranks step alone, and average now and then.

Note [Local steps]
    Each rank adds its own gradients to its own momentum and steps its own masters, so these differ between the ranks. A step
    that synchronises takes what the masters have changed since the *anchor*, the masters of the last such step, times Adam's
    denominator, which is frozen: that is minus the sum of the momenta times their rates. Its mean over the ranks is exchanged
    in one bit an element, with both errors, and gives the masters, from the anchor, and the momentum, by the sum of rates.
    So after it all ranks have the same bits. DeepSpeed sums the changes instead and takes them back, which rounds.
    Decoupled weight decay waits for the synchronising step, where all of it since the anchor is applied: no part of it is
    compressed, or becomes momentum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zeroplan.core.buffers import Buffer
from zeroplan_runtime import kernels
from zeroplan_runtime.model_states import ModelStates
from zeroplan_runtime.techniques.one_bit.compression_schedule import LOCAL, CompressionStep, Exchanged
from zeroplan_runtime.techniques.one_bit.momentum_exchange import MomentumExchange
from zeroplan_runtime.unit_state import GroupSlice, UnitState

_Groups = Sequence[Mapping[str, Any]]


class LocalSteps(MomentumExchange):
    """Lets each rank step alone, and averages what its masters have changed.

    Args:
        model_states: the units, at stage 0; each has an anchor.

    Attributes:
        in_step: all ranks have the same masters.
    """

    def __init__(self, model_states: ModelStates) -> None:
        super().__init__(model_states)
        self.in_step = True
        self._anchored = False  # the anchors are the masters of the last step that synchronised
        self._skips, self._factor = False, 1.0  # of the present step
        self._rates: list[float] = []  # each group's sum since the anchor
        self._kept: list[float] = []  # and what weight decay leaves of it

    def begin(self, step: CompressionStep, number: int, groups: _Groups, scalars: torch.Tensor | None) -> None:
        """Prepares for the units of a step; one in which ranks step alone adds its rates to those since the anchor."""
        if step.exchanged not in LOCAL:
            super().begin(step, number, groups, scalars)
            return
        if step.begins:
            self._model_states.forget_errors()
        if not self._anchored:
            for unit in self._model_states.units:
                if unit.exchanged is not None and unit.exchanged.anchor is not None and unit.master is not None:
                    unit.exchanged.anchor.copy_(unit.master)
            self._rates, self._kept, self._anchored = [0.0] * len(groups), [1.0] * len(groups), True
        values = scalars.tolist() if scalars is not None else []
        self._skips, self._factor = (bool(values[kernels.SKIP]), values[kernels.FACTOR]) if values else (False, 1.0)
        if self._skips:
            return
        for index, group in enumerate(groups):
            corrected = 1 - group["betas"][0] ** number if group.get("bias_correction", True) else 1.0
            self._rates[index] += group["lr"] / corrected
            self._kept[index] *= 1 - group["lr"] * group.get("weight_decay", 0.0)

    def was_written(self) -> None:
        """Notes that masters or states were loaded, alike on all ranks, or that a step of another kind has written them."""
        super().was_written()
        self._anchored, self.in_step = False, True

    def exchange(self, unit: UnitState, what: Exchanged, betas: tuple[float, float], scalars: torch.Tensor | None) -> None:
        """Adds this rank's gradients to its own momentum, in a step in which ranks step alone."""
        if what not in LOCAL:
            super().exchange(unit, what, betas, scalars)
            return
        assert unit.exchanged is not None
        assert unit.grads.full is not None
        if not self._skips:
            unit.exchanged.momentum.mul_(betas[0]).add_(unit.grads.full, alpha=(1 - betas[0]) * self._factor)

    def updated(self, unit: UnitState, step: CompressionStep, slices: Sequence[GroupSlice], groups: _Groups) -> None:
        """Averages what the update and those before it have changed, in a step that synchronises."""
        if step.exchanged not in LOCAL or self._skips:
            return
        self.in_step = step.exchanged is Exchanged.SIGNS_OF_CHANGE
        if not self.in_step:
            return
        assert unit.exchanged is not None
        assert unit.exchanged.anchor is not None
        assert unit.trainable is not None
        assert unit.grads.full is not None
        kept, anchor = unit.exchanged, unit.exchanged.anchor
        second = unit.optim_states[Buffer.OPTIM_EXP_AVG_SQ]
        for part in slices:
            where = part.part
            change = _denominator(kept.momentum[where], second[where], groups[part.group], step.second_step)
            change.mul_(part.master.sub_(anchor[where]))
            part.master.copy_(anchor[where])
        self._average(unit, beta1=1.0, decay=0.0, scalars=None)
        kept.momentum.masked_fill_(second == 0, 0.0)  # one bit has no zero
        for part in slices:
            where = part.part
            below = _denominator(anchor[where], second[where], groups[part.group], step.second_step)
            part.master.mul_(self._kept[part.group]).addcdiv_(kept.momentum[where], below)
            below.copy_(part.master)
            kept.momentum[where].mul_(-1 / self._rates[part.group] if self._rates[part.group] else 0.0)
            if part.param is not None:
                part.param.copy_(part.master)

    def end(self) -> None:
        """Begins new sums once all units are synchronised."""
        if self.in_step:
            self._rates, self._kept = [0.0] * len(self._rates), [1.0] * len(self._kept)


def _denominator(out: torch.Tensor, second: torch.Tensor, group: Mapping[str, Any], steps: int) -> torch.Tensor:
    """Writes √v / √(1−β₂ˢ) + ε to `out`, as the frozen step divides by it; s is how many `steps` have updated v."""
    corrected = 1 - group["betas"][1] ** steps if group.get("bias_correction", True) else 1.0
    return out.copy_(second).sqrt_().mul_(1 / math.sqrt(corrected)).add_(group.get("eps", 1e-8))
