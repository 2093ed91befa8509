"""DeepSpeed's one-cycle schedule (runtime/lr_schedules.py of 0.19.8)."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch

from zeroplan.core.errors import BadInput
from zeroplan_runtime.optim.lr_schedules import LrSchedule, PerGroup, per_group

logger = logging.getLogger("zeroplan_runtime")

#: Adam's second beta while momentum is cycled, whatever the optimizer was given: DeepSpeed's constant.
_BETA2 = 0.99


class OneCycle(LrSchedule):
    """The rate rises to `cycle_max_lr` and falls back, then decays; momentum does the reverse (Smith, 2018, arXiv 1803.09820).

    Args:
        optimizer: its groups' ``lr``, and ``betas`` where it has them, are set at each step.
        cycle_min_lr, cycle_max_lr: bounds of the rate, one number or one a group.
        decay_lr_rate: after the cycle the rate is `cycle_min_lr` / (1 + this × decay steps).
        cycle_first_step_size: steps of the rising half.
        cycle_second_step_size: steps of the falling half; None for as many.
        cycle_first_stair_count: levels of the rising half; 0 for a straight line.
        cycle_second_stair_count: levels of the falling half; None for as many.
        decay_step_size: steps after the cycle that count as one decay step; 0 for no decay.
        cycle_momentum: cycle the first beta too, and set the second to 0.99, as DeepSpeed does.
        cycle_min_mom, cycle_max_mom: bounds of the first beta, one number or one a group.
        decay_mom_rate: after the cycle the first beta is `cycle_max_mom` × (1 + this × decay steps).
        last_batch_iteration: the number of steps taken, minus 1.

    Raises:
        BadInput: for an argument of the wrong type or number.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: float = 2000,
        cycle_second_step_size: float | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: float = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        groups = optimizer.param_groups
        first = float(cycle_first_step_size)
        second = float(cycle_second_step_size) if cycle_second_step_size is not None else first
        if first <= 0 or second < 0:
            raise BadInput(f"a cycle of {first:g} and {second:g} steps has no rise", where="scheduler.params")
        self.first_step_size, self.second_step_size, self.total_size = first, second, first + second
        self.step_ratio = first / self.total_size
        self.first_stair_count = cycle_first_stair_count
        self.second_stair_count = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.decay_step_size = decay_step_size
        self.min_lrs = per_group(cycle_min_lr, groups, "cycle_min_lr")
        self.max_lrs = per_group(cycle_max_lr, groups, "cycle_max_lr")
        self.decay_lr_rate, self.decay_mom_rate = decay_lr_rate, decay_mom_rate
        self.min_moms = [(mom, _BETA2) for mom in per_group(cycle_min_mom, groups, "cycle_min_mom")]
        self.max_moms = [(mom, _BETA2) for mom in per_group(cycle_max_mom, groups, "cycle_max_mom")]
        self.cycle_momentum = cycle_momentum and "betas" in optimizer.defaults
        if cycle_momentum and not self.cycle_momentum:
            logger.warning("scheduler.params.cycle_momentum: the optimizer has no betas, so only its learning rate is cycled")
        if last_batch_iteration == -1:
            self._apply(list(self.min_lrs))
            if self.cycle_momentum:
                self._set_betas(self.min_moms)

    def get_lr(self) -> list[Any]:
        """Returns the learning rate of each group for this step."""
        if self.last_batch_iteration < self.total_size:
            part = self._part_of_cycle()
            return [least + (most - least) * part for least, most in zip(self.min_lrs, self.max_lrs, strict=True)]
        if not self.decay_step_size or math.isclose(self.decay_lr_rate, 0):
            return list(self.min_lrs)
        factor = 1 + self.decay_lr_rate * self._decay_steps()
        return [rate / factor for rate in self.min_lrs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of each group for this step; None where they are not cycled."""
        if not self.cycle_momentum:
            return None
        if self.last_batch_iteration < self.total_size:
            part = self._part_of_cycle()
            bounds = zip(self.min_moms, self.max_moms, strict=True)
            return [(most - (most - least) * part, beta2) for (least, beta2), (most, _) in bounds]
        if not self.decay_step_size or math.isclose(self.decay_mom_rate, 0):
            return list(self.max_moms)
        factor = 1 + self.decay_mom_rate * self._decay_steps()
        return [(beta1 * factor, beta2) for beta1, beta2 in self.max_moms]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Goes to the next step, or to step `last_batch_iteration`, and sets learning rates and betas."""
        super().step(last_batch_iteration)
        betas = self.get_mom()
        if betas is not None:
            self._set_betas(betas)

    def _set_betas(self, betas: list[tuple[float, float]]) -> None:
        for group, values in zip(self.optimizer.param_groups, betas, strict=True):
            group["betas"] = values

    def _decay_steps(self) -> float:
        return (self.last_batch_iteration - self.total_size + 1) / self.decay_step_size

    def _part_of_cycle(self) -> float:
        """Returns 0 at either end of the cycle, rising to 1 at its peak."""
        done = self.last_batch_iteration + 1
        cycle = math.floor(1 + done / self.total_size)
        x = 1.0 + done / self.total_size - cycle
        rising = x <= self.step_ratio
        part = x / self.step_ratio if rising else (x - 1) / (self.step_ratio - 1)
        stairs = self.first_stair_count if rising else self.second_stair_count
        if stairs <= 0:
            return part
        within = done % self.total_size  # whole steps: `part` may lie just below a stair, by rounding
        if within <= self.first_step_size:
            level = within * stairs / self.first_step_size
        else:
            level = (self.total_size - within) * stairs / self.second_step_size
        return math.floor(level) / stairs
