"""The optimizers' updates with one signature, by the kernel names in the rows of the optimizer table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zeroplan.core.optimizer_row import SCALED_BLOCK, SCALED_BLOCK_4BIT
from zeroplan_runtime.kernels.block_quantisation import block_format
from zeroplan_runtime.kernels.elementwise import adadelta, adagrad, adamax, amsgrad, asgd, nadam, radam, rmsprop, rprop
from zeroplan_runtime.kernels.functional import adamw, adamw_blockwise, lamb, lion, sgd
from zeroplan_runtime.kernels.one_bit_lamb import onebit_lamb
from zeroplan_runtime.kernels.update_protocol import Update


def _plain(function: Callable[..., None], *more: Any) -> Update:
    """The update by a function of master, gradient, states and what stands in `more`."""
    return lambda master, grad, states, segments, reduce, **keywords: function(master, grad, *states, *more, **keywords)


def _lion(master: Any, grad: Any, states: Any, segments: Any, reduce: Any, *, step: int, **keywords: Any) -> None:
    lion(master, grad, states[0], **keywords)


def _sgd(master: Any, grad: Any, states: Any, segments: Any, reduce: Any, *, momentum: float = 0.0, **keywords: Any) -> None:
    sgd(master, grad, states[0] if momentum else None, momentum=momentum, **keywords)  # it may come and go


def _lamb(master: Any, grad: Any, states: Any, segments: Any, reduce: Any, **keywords: Any) -> None:
    lamb(master, grad, states[0], states[1], segments, reduce=reduce, **keywords)


#: The updates by the kernel's name.
UPDATES: dict[str, Update] = {
    "adadelta": adadelta,
    "adagrad": adagrad,
    "adamax": adamax,
    "adamw": _plain(adamw),
    "adamw4bit": _plain(adamw_blockwise, block_format(4, SCALED_BLOCK_4BIT)),
    "adamw8bit": _plain(adamw_blockwise, block_format(8, SCALED_BLOCK)),
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
