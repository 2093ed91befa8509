"""Counts of micro batches and steps, the loss scale, and where an accumulation ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from zeroplan_runtime.optim.scaler import LossScaler

logger = logging.getLogger("zeroplan_runtime")

#: Skipped steps in a row at which a warning is given: the first of them, and then at each power of ten.
_FIRST = 3


class SkippedSteps:
    """Steps that gradients which are not finite prevented."""

    def __init__(self) -> None:
        self.total = 0
        self._in_a_row = 0

    def applied(self) -> None:
        """A step was applied."""
        self._in_a_row = 0

    def skipped(
        self, step: int, scale: float, rank: int, names: Sequence[str], squares: torch.Tensor, *, searching: bool
    ) -> None:
        """Step number `step` was skipped.

        Args:
            step: the step.
            scale: the loss scale from here on.
            rank: this rank.
            names: the units' names.
            squares: [units] sums of the squares of this rank's gradients in that step; read only for a warning.
            searching: a loss scale is being searched for, so that skipped steps are to be expected.
        """
        self.total += 1
        self._in_a_row += 1
        logger.info("step %d skipped: the gradients are not finite; loss scale is %g", step, scale)
        is_power_of_ten = self._in_a_row > 1 and str(self._in_a_row).strip("0") == "1"
        if searching or not (self._in_a_row == _FIRST or is_power_of_ten):
            return
        found = [name for name, value in zip(names, squares.tolist(), strict=True) if value - value != 0]
        if not found and rank:
            return
        where = f"in {', '.join(found[:4])}{' and more' if found[4:] else ''} on rank {rank}" if found else "on another rank"
        logger.warning(
            "%d steps in a row were skipped, up to step %d: gradients are infinite or NaN %s; look at the batches' losses, "
            "lower the learning rate, or train from an earlier checkpoint",
            self._in_a_row,
            step,
            where,
        )


class TrainingProgress:
    """The counts of a training: micro batches, steps and samples so far.

    Attributes:
        scaler: the loss scale.
        grad_accum: micro batches in a step.
        global_steps: steps, those that were skipped included.
        micro_steps: micro batches.
        applied: steps that were not skipped.
        boundary: whether the coming micro batches end an accumulation; None to count them.
    """

    def __init__(self, scaler: LossScaler, grad_accum: int) -> None:
        self.scaler, self.grad_accum = scaler, grad_accum
        self.global_steps = self.micro_steps = self.applied = 0
        self.boundary: bool | None = None
        self._skipped = SkippedSteps()

    @property
    def skipped_steps(self) -> int:
        """Steps that were skipped because gradients were not finite."""
        return self._skipped.total

    def ends_accumulation(self) -> bool:
        """Returns whether the present micro batch is the last before the parameters are updated."""
        if self.boundary is not None:
            return self.boundary
        return (self.micro_steps + 1) % self.grad_accum == 0

    def step_was_applied(self) -> None:
        """Counts a step that updated the parameters."""
        self.scaler.update(False)
        self._skipped.applied()
        self.applied += 1

    def step_was_skipped(self, rank: int, names: Callable[[], list[str]], squares: torch.Tensor) -> None:
        """Counts a step whose gradients were not finite.

        Args:
            rank: this rank.
            names: gives the units' names.
            squares: [units] sums of the squares of this rank's gradients in that step.

        Raises:
            BadInput: when gradients overflow at the least loss scale.
        """
        searching = self.scaler.can_fall
        self.scaler.update(True)
        self._skipped.skipped(self.global_steps, self.scaler.scale, rank, names(), squares, searching=searching)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {
            "global_steps": self.global_steps,
            "micro_steps": self.micro_steps,
            "applied": self.applied,
            "skipped": self._skipped.total,
            "loss_scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], *, optimizer: bool) -> None:
        """Continues from :meth:`state_dict`. Counting of micro batches begins at the start of an accumulation.

        Args:
            state: of the checkpoint.
            optimizer: the optimizer's states are the checkpoint's, too; else the applied steps stay those of the present ones.
        """
        self.global_steps = state["global_steps"]
        self.micro_steps = self.global_steps * self.grad_accum
        if optimizer:
            self.applied = state["applied"]
        self._skipped.total = state["skipped"]
        self.scaler.load_state_dict(state["loss_scaler"])
