"""Counts steps that were skipped, and says so when that goes on: a run that trains nothing must not look like one that does."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

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
