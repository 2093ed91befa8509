"""Learning-rate schedules by DeepSpeed's names, with its values at every step (runtime/lr_schedules.py of 0.19.8).

Formulas keep DeepSpeed's order of operations, so that its rates come out to the last bit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch

from zeroplan.core.errors import BadInput

logger = logging.getLogger("zeroplan_runtime")

PerGroup = float | Sequence[float]
"""One number for all parameter groups, or one for each."""


class LrSchedule:
    """The base of all schedules: they count steps and set the groups' ``lr``. A subclass gives :meth:`get_lr`.

    Args:
        optimizer: its groups' ``lr`` is set at each step.
        last_batch_iteration: the number of steps taken, minus 1.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[Any] = [group["lr"] for group in optimizer.param_groups]

    def get_lr(self) -> list[Any]:
        """Returns the learning rate of each group for this step."""
        raise NotImplementedError

    def get_last_lr(self) -> list[Any]:
        """Returns the learning rate of each group as set last."""
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Goes to the next step, or to step `last_batch_iteration`, and sets the learning rates."""
        self.last_batch_iteration = self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        self._apply(self.get_lr())

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from :meth:`state_dict`."""
        self.last_batch_iteration = state["last_batch_iteration"]

    def _apply(self, rates: list[Any]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):  # whoever gave the tensor reads it
                group["lr"].fill_(rate.squeeze() if isinstance(rate, torch.Tensor) else rate)
            else:
                group["lr"] = rate
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]


class _Warmup(LrSchedule):
    """Counts the steps of a warm-up."""

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int, kind: str, last_batch_iteration: int) -> None:
        super().__init__(optimizer, last_batch_iteration)
        if not isinstance(steps, int) or steps <= 0:
            raise BadInput(f"{steps!r} is not a positive number of steps", where="scheduler.params.warmup_num_steps")
        if kind not in ("log", "linear"):
            logger.warning("scheduler.params.warmup_type: %r is neither log nor linear; log is used, as DeepSpeed does", kind)
            kind = "log"
        self.warmup_num_steps = max(2, steps)
        self.warmup_type = kind
        self._inverse_log = 1.0 / math.log(self.warmup_num_steps)

    @property
    def _warms_up(self) -> bool:
        return self.last_batch_iteration < self.warmup_num_steps

    def _warmed_up(self) -> float:
        """Returns the progress of the warm-up, from 0 to 1."""
        if self.warmup_type == "log":
            return self._inverse_log * math.log(self.last_batch_iteration + 1)
        return self.last_batch_iteration / self.warmup_num_steps


class WarmupLR(_Warmup):
    """Rises from `warmup_min_lr` to `warmup_max_lr` in `warmup_num_steps` steps, then stays constant.

    Args:
        optimizer: its groups' ``lr`` is set at each step.
        warmup_min_lr: the first learning rate, one number or one a group.
        warmup_max_lr: the last, one number or one a group; None takes each group's ``lr``.
        warmup_num_steps: the number of steps; 1 counts as 2.
        warmup_type: ``log`` or ``linear``; another warns and counts as ``log``.
        last_batch_iteration: the number of steps taken, minus 1.

    Raises:
        BadInput: for an argument of the wrong type or number.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        groups = optimizer.param_groups
        most = [group["lr"] for group in groups] if warmup_max_lr is None else warmup_max_lr
        self.min_lrs = per_group(warmup_min_lr, groups, "warmup_min_lr")
        self.max_lrs = per_group(most, groups, "warmup_max_lr")
        self._rises = [big - small for big, small in zip(self.max_lrs, self.min_lrs, strict=True)]
        if last_batch_iteration == -1:
            self._apply(self.get_lr())

    def get_lr(self) -> list[Any]:
        """Returns the learning rate of each group for this step."""
        if self.last_batch_iteration < 0:
            return list(self.min_lrs)
        gamma = self._gamma()
        return [least + rise * gamma for least, rise in zip(self.min_lrs, self._rises, strict=True)]

    def _gamma(self) -> float:
        return self._warmed_up() if self._warms_up else 1.0


class WarmupDecayLR(WarmupLR):
    """A warm-up as :class:`WarmupLR`'s, then a linear fall to 0 at step `total_num_steps`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _gamma(self) -> float:
        if self._warms_up:
            return self._warmed_up()
        left = self.total_num_steps - self.last_batch_iteration
        return max(0.0, left / max(1.0, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(_Warmup):
    """Rises from `warmup_min_ratio` to 1 times each group's ``lr``, then falls along a cosine to `cos_min_ratio` times.

    As in DeepSpeed, the rate before the first step is 0 whatever `warmup_min_ratio` is.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        rates = [group["lr"] for group in optimizer.param_groups]
        self.org_lrs = [rate.clone() if isinstance(rate, torch.Tensor) else rate for rate in rates]
        if last_batch_iteration == -1:
            self._apply(self.get_lr())

    def get_lr_ratio(self) -> float:
        """Returns the factor on each group's own ``lr``."""
        if self.last_batch_iteration < 0:
            return 0.0
        if self._warms_up:
            return self.warmup_min_ratio + self._warmed_up() * (1.0 - self.warmup_min_ratio)
        done = self.last_batch_iteration - self.warmup_num_steps + 1
        progress = min(1.0, done / max(1, self.total_num_steps - self.warmup_num_steps))
        ratio = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * ratio)

    def get_lr(self) -> list[Any]:
        """Returns the learning rate of each group for this step."""
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs] if self.last_batch_iteration >= 0 else [0.0] * len(self.org_lrs)


class LRRangeTest(LrSchedule):
    """Rises from `lr_range_test_min_lr` without end, to find the largest rate that trains (Smith, 2018, arXiv 1803.09820).

    Args:
        optimizer: its groups' ``lr`` is set at each step.
        lr_range_test_min_lr: the first learning rate, one number or one a group.
        lr_range_test_step_size: the steps in which it rises once.
        lr_range_test_step_rate: by how much it rises, as a part of the first.
        lr_range_test_staircase: rise at once at the end of each such stretch.
        last_batch_iteration: the number of steps taken, minus 1.

    Raises:
        BadInput: for an argument of the wrong type or number.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        if not isinstance(lr_range_test_step_size, int) or lr_range_test_step_size <= 0:
            where = "scheduler.params.lr_range_test_step_size"
            raise BadInput(f"{lr_range_test_step_size!r} is not a positive number of steps", where=where)
        self.min_lr = per_group(lr_range_test_min_lr, optimizer.param_groups, "lr_range_test_min_lr")
        self.step_size, self.step_rate = lr_range_test_step_size, lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        if last_batch_iteration == -1:
            self._apply(list(self.min_lr))

    def get_lr(self) -> list[Any]:
        """Returns the learning rate of each group for this step."""
        rises = float(self.last_batch_iteration + 1) / self.step_size
        factor = 1 + self.step_rate * (math.floor(rises) if self.staircase else rises)
        return [rate * factor for rate in self.min_lr]


def per_group(value: Any, groups: list[dict[str, Any]], name: str) -> list[Any]:
    """`value` for each group: one number is repeated, a list must have as many numbers as there are groups.

    Raises:
        BadInput: for a list of another length; `name` is the argument's.
    """
    if not isinstance(value, list | tuple):
        return [value] * len(groups)
    if len(value) != len(groups):
        raise BadInput(f"{len(value)} values for {len(groups)} parameter groups", where=f"scheduler.params.{name}")
    return list(value)
