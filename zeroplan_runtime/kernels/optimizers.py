"""The optimizers' updates in one form, by the names that rows of the optimizer table have for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from zeroplan_runtime.kernels.functional import adamw, lamb, lion, sgd
from zeroplan_runtime.kernels.segments import Segments

#: Adds up the ranks' parts of a tensor in place.
Reduce = Callable[[torch.Tensor], None]


class Update(Protocol):
    """Updates a flat `master` [n] by `grad` [n] as applied step `step` (from 1); `states` are fp32 [n], in the row's order.

    `segments` bound the whole tensors within, for a kernel that takes their norms, and `reduce` adds the norms of other ranks;
    both None otherwise. `keywords` are the hyperparameters, ``param_out`` and ``scalars``.
    """

    def __call__(
        self,
        master: torch.Tensor,
        grad: torch.Tensor,
        states: Sequence[torch.Tensor],
        segments: Segments | None,
        reduce: Reduce | None,
        *,
        step: int,
        **keywords: Any,
    ) -> None:
        """Writes the master, the states and ``param_out``."""
        ...


def _adamw(
    master: torch.Tensor,
    grad: torch.Tensor,
    states: Sequence[torch.Tensor],
    segments: Segments | None,
    reduce: Reduce | None,
    *,
    step: int,
    **keywords: Any,
) -> None:
    adamw(master, grad, states[0], states[1], step=step, **keywords)


def _lion(
    master: torch.Tensor,
    grad: torch.Tensor,
    states: Sequence[torch.Tensor],
    segments: Segments | None,
    reduce: Reduce | None,
    *,
    step: int,
    **keywords: Any,
) -> None:
    lion(master, grad, states[0], **keywords)


def _sgd(
    master: torch.Tensor,
    grad: torch.Tensor,
    states: Sequence[torch.Tensor],
    segments: Segments | None,
    reduce: Reduce | None,
    *,
    step: int,
    **keywords: Any,
) -> None:
    sgd(master, grad, states[0] if states else None, step=step, **keywords)


def _lamb(
    master: torch.Tensor,
    grad: torch.Tensor,
    states: Sequence[torch.Tensor],
    segments: Segments | None,
    reduce: Reduce | None,
    *,
    step: int,
    **keywords: Any,
) -> None:
    assert segments is not None
    if master.numel():
        lamb(master, grad, states[0], states[1], segments, step=step, reduce=reduce, **keywords)
    elif reduce is not None:  # a rank with nothing of a run takes part in its sums
        reduce(segments.norms.zero_())


#: The updates by the kernel's name.
UPDATES: dict[str, Update] = {"adamw": _adamw, "lamb": _lamb, "lion": _lion, "sgd": _sgd}
