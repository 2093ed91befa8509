"""The optimizers' updates with one signature, by the kernel names in the rows of the optimizer table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zeroplan.core.optimizer_row import SCALED_BLOCK, SCALED_BLOCK_4BIT
from zeroplan_runtime.kernels.block_quantisation import block_format
from zeroplan_runtime.kernels.blockwise import blockwise_update
from zeroplan_runtime.kernels.elementwise import adadelta, adagrad, adamax, amsgrad, asgd, nadam, radam, rmsprop, rprop
from zeroplan_runtime.kernels.functional import adamw, lamb, lion, sgd
from zeroplan_runtime.kernels.one_bit_lamb import onebit_lamb
from zeroplan_runtime.kernels.segments import TensorSegments
from zeroplan_runtime.kernels.update import Reduce
from zeroplan_runtime.kernels.update_protocol import Update


def _adamw(
    master: torch.Tensor,
    grad: torch.Tensor,
    states: Sequence[torch.Tensor],
    segments: TensorSegments | None,
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
    segments: TensorSegments | None,
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
    segments: TensorSegments | None,
    reduce: Reduce | None,
    *,
    step: int,
    momentum: float = 0.0,
    **keywords: Any,
) -> None:
    sgd(master, grad, states[0] if momentum else None, step=step, momentum=momentum, **keywords)  # it may come and go


def _lamb(
    master: torch.Tensor,
    grad: torch.Tensor,
    states: Sequence[torch.Tensor],
    segments: TensorSegments | None,
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
    "adamw4bit": blockwise_update(block_format(4, SCALED_BLOCK_4BIT)),
    "adamw8bit": blockwise_update(block_format(8, SCALED_BLOCK)),
    "amsgrad": amsgrad,
    "asgd": asgd,
    "lamb": _lamb,
    "lion": _lion,
    "nadam": nadam,
    "onebit_lamb": onebit_lamb,
    "radam": radam,
    "rmsprop": rmsprop,
    "rprop": rprop,
    "sgd": _sgd,
}
