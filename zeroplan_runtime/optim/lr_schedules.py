"""Learning-rate schedules by DeepSpeed's names and definitions (runtime/lr_schedules.py of 0.19.8)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from zeroplan.core.errors import BadInput, did_you_mean


class WarmupLR:
    """Rises from `warmup_min_lr` to `warmup_max_lr` in `warmup_num_steps` steps, then stays constant.

    Args:
        optimizer: its groups' ``lr`` is set at each step.
        warmup_min_lr: the first learning rate, one number or one a group.
        warmup_max_lr: the last, one number or one a group; None takes each group's ``lr``.
        warmup_num_steps: the number of steps; 1 counts as 2.
        warmup_type: ``log`` or ``linear``.
        last_batch_iteration: the number of steps taken, minus 1.

    Raises:
        BadInput: for an argument of the wrong type or number.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.optimizer = optimizer
        groups = optimizer.param_groups
        most = [group["lr"] for group in groups] if warmup_max_lr is None else _per_group(warmup_max_lr, groups)
        self.min_lrs, self.max_lrs = _per_group(warmup_min_lr, groups), most
        self.warmup_num_steps = _steps(warmup_num_steps)
        self.warmup_type = _warmup_type(warmup_type)
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[float] = [group["lr"] for group in groups]
        if last_batch_iteration == -1:
            self._apply()

    def get_lr(self) -> list[float]:
        """The learning rate of each group for this step."""
        if self.last_batch_iteration < 0:
            return list(self.min_lrs)
        gamma = self._gamma()
        return [least + (most - least) * gamma for least, most in zip(self.min_lrs, self.max_lrs, strict=True)]

    def get_last_lr(self) -> list[float]:
        """The learning rate of each group as set last."""
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Goes to the next step, or to step `last_batch_iteration`, and sets the learning rates."""
        self.last_batch_iteration = self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        self._apply()

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from :meth:`state_dict`."""
        self.last_batch_iteration = state["last_batch_iteration"]

    def _apply(self) -> None:
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = lr

    def _gamma(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return _warmup(self.last_batch_iteration, self.warmup_num_steps, self.warmup_type)
        return 1.0


class WarmupDecayLR(WarmupLR):
    """As :class:`WarmupLR`, then falls linearly to 0 at step `total_num_steps`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _gamma(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return super()._gamma()
        left = self.total_num_steps - self.last_batch_iteration
        return max(0.0, left / max(1.0, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(WarmupLR):
    """Rises from `warmup_min_ratio` to 1 times each group's ``lr``, then falls along a cosine to `cos_min_ratio` times."""

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
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        super().__init__(optimizer, 0.0, None, warmup_num_steps, warmup_type, last_batch_iteration)

    def _gamma(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            ratio = _warmup(self.last_batch_iteration, self.warmup_num_steps, self.warmup_type)
            return self.warmup_min_ratio + ratio * (1.0 - self.warmup_min_ratio)
        done = self.last_batch_iteration - self.warmup_num_steps + 1
        progress = min(1.0, done / max(1, self.total_num_steps - self.warmup_num_steps))
        ratio = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * ratio)


SCHEDULES: dict[str, type[WarmupLR]] = {c.__name__: c for c in (WarmupLR, WarmupDecayLR, WarmupCosineLR)}


def make_schedule(kind: str, params: dict[str, Any], optimizer: torch.optim.Optimizer) -> WarmupLR:
    """The schedule of a config's ``scheduler`` section.

    Args:
        kind: the section's ``type``.
        params: the section's ``params``.
        optimizer: the optimizer whose learning rates it sets.

    Raises:
        BadInput: for an unknown type or parameter, or a bad value.
    """
    if kind not in SCHEDULES:
        remedy = did_you_mean(kind, SCHEDULES) or f"use one of {', '.join(SCHEDULES)}"
        raise BadInput(f"unknown schedule {kind!r}", where="scheduler.type", remedy=remedy)
    try:
        return SCHEDULES[kind](optimizer, **params)
    except TypeError as fault:
        raise BadInput(str(fault).replace("__init__() ", ""), where=f"scheduler.params of {kind}") from None


def _per_group(value: float | Sequence[float], groups: list[dict[str, Any]]) -> list[float]:
    if isinstance(value, int | float):
        return [float(value)] * len(groups)
    if len(value) != len(groups):
        raise BadInput(f"{len(value)} rates for {len(groups)} groups", where="scheduler.params")
    return [float(v) for v in value]


def _steps(value: int) -> int:
    if not isinstance(value, int) or value <= 0:
        raise BadInput(f"{value!r} is not a positive number of steps", where="scheduler.params.warmup_num_steps")
    return max(2, value)


def _warmup_type(value: str) -> str:
    if value not in ("log", "linear"):
        raise BadInput(f"unknown warm-up {value!r}", where="scheduler.params.warmup_type", remedy="use log or linear")
    return value


def _warmup(step: int, steps: int, kind: str) -> float:
    return math.log(step + 1) / math.log(steps) if kind == "log" else step / steps
