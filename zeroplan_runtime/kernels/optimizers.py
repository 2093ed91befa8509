"""The optimizers' updates with one signature, by the kernel names in the rows of the optimizer table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from zeroplan_runtime.kernels.elementwise import adadelta, adagrad, adamax, nadam, radam, rmsprop
from zeroplan_runtime.kernels.functional import adamw, lamb, lion, sgd
from zeroplan_runtime.kernels.segments import Segments
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
    elif reduce is not None:  # a rank that owns nothing of the group takes part in the sums
        reduce(segments.norms.zero_())


#: The updates by the kernel's name.
UPDATES: dict[str, Update] = {
    "adadelta": adadelta,
    "adagrad": adagrad,
    "adamax": adamax,
    "adamw": _adamw,
    "lamb": _lamb,
    "lion": _lion,
    "nadam": nadam,
    "radam": radam,
    "rmsprop": rmsprop,
    "sgd": _sgd,
}
