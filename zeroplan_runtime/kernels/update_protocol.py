"""The signature that every optimizer's update has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from zeroplan_runtime.kernels.segments import TensorSegments
from zeroplan_runtime.kernels.update import Reduce


class Update(Protocol):
    """Updates `master` by one step of the optimizer.

    Args:
        master: fp32 [n], updated in place.
        grad: [n], fp32 or 16-bit.
        states: fp32 [n] each, updated in place, in the order of the optimizer's row.
        segments: the bounds of the tensors in `master`, for a kernel that needs their norms; None for others.
        reduce: adds the other ranks' norms in place; None for one rank.
        step: the number of the applied step, from 1.
        keywords: the hyperparameters, ``param_out`` and ``scalars``; ``workspace``, fp32, for one that needs temporaries.
    """

    def __call__(
        self,
        master: torch.Tensor,
        grad: torch.Tensor,
        states: Sequence[torch.Tensor],
        segments: TensorSegments | None,
        reduce: Reduce | None,
        *,
        step: int,
        **keywords: Any,
    ) -> None:
        """Writes the master, the states and ``param_out``."""
        ...
