"""Momentum in one bit an element: packed, averaged and unpacked, and Adam's step with a second moment that stays.

The public functions; the messages are those of :mod:`zeroplan.core.one_bit`. All backends give the same bits. Where the step's
SKIP is set, nothing changes but the messages.
"""

from __future__ import annotations

import math

import torch

from zeroplan.core.one_bit import message_words
from zeroplan_runtime.kernels.backends import backend
from zeroplan_runtime.kernels.functional import Betas, checked
from zeroplan_runtime.kernels.update import SignArgs, bias_corrections, check_elements


def _checked(messages: torch.Tensor, ranks: int, shard: int, scalars: torch.Tensor | None, **fp32: torch.Tensor) -> SignArgs:
    if shard % 64 or messages.numel() != ranks * message_words(shard) or messages.dtype != torch.float32:
        raise ValueError(
            f"expected {ranks} messages of {message_words(shard)} fp32 words for chunks of {shard} elements, a multiple of 64, "
            f"but got {messages.numel()} words of {messages.dtype}"
        )
    for name, tensor in fp32.items():
        check_elements(tensor, name, messages.device)
        if tensor.dtype != torch.float32 and name != "gradient":
            raise ValueError(f"expected {name} in fp32 but got {tensor.dtype}")
    return SignArgs(messages, ranks, shard, scalars)


@torch.no_grad()
def sign_pack(
    momentum: torch.Tensor,
    grad: torch.Tensor,
    error: torch.Tensor,
    messages: torch.Tensor,
    *,
    ranks: int,
    beta1: float,
    scalars: torch.Tensor | None = None,
) -> None:
    """Compresses a rank's momentum for all ranks: c = β₁m + (1−β₁)·factor·g + e; the message of c; e ← c − message.

    Tang et al. 2021, algorithm 1, lines 7 and 8.

    Args:
        momentum: fp32 [ranks × shard], that of all ranks.
        grad: [ranks × shard] this rank's gradient, fp32 or 16-bit.
        error: fp32 [ranks × shard], the worker's error.
        messages: fp32 words, a message for each rank.
        ranks: chunks of the flat.
        beta1: β₁.
        scalars: the step's.

    Raises:
        ValueError: for tensors that do not fit together.
    """
    args = _checked(messages, ranks, error.numel() // ranks, scalars, momentum=momentum, gradient=grad, error=error)
    if not momentum.numel() == grad.numel() == error.numel():
        raise ValueError(f"expected {error.numel()} elements but got {momentum.numel()} and {grad.numel()}")
    backend(messages.device).sign_pack(args, momentum, grad, error, beta1)


@torch.no_grad()
def sign_average(
    received: torch.Tensor,
    error: torch.Tensor,
    message: torch.Tensor,
    *,
    ranks: int,
    scalars: torch.Tensor | None = None,
) -> None:
    """Averages the ranks' messages for this rank's chunk and compresses the mean: c = mean + e; its message; e ← c − message.

    Tang et al. 2021, algorithm 1, lines 9 and 10.

    Args:
        received: fp32 words, each rank's message.
        error: fp32 [shard], the server's error.
        message: fp32 words, receives one message.
        ranks: messages in `received`.
        scalars: the step's.

    Raises:
        ValueError: for tensors that do not fit together.
    """
    args = _checked(received, ranks, error.numel(), scalars, error=error)
    if message.numel() != args.words or message.dtype != torch.float32:
        raise ValueError(f"expected a message of {args.words} words but got {message.numel()}")
    backend(received.device).sign_average(args, error, message)


@torch.no_grad()
def sign_unpack(
    messages: torch.Tensor, values: torch.Tensor, *, ranks: int, decay: float = 0.0, scalars: torch.Tensor | None = None
) -> None:
    """Writes what one message a rank says to `values`, fp32 [ranks × shard]; with `decay` β, values ← β·values + (1−β)·that.

    Raises:
        ValueError: for tensors that do not fit together.
    """
    args = _checked(messages, ranks, values.numel() // ranks, scalars, values=values)
    backend(messages.device).sign_unpack(args, values, decay)


@torch.no_grad()
def frozen_adam(
    param: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    lr: float,
    step: int,
    second_step: int,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    bias_correction: bool = True,
    param_out: torch.Tensor | None = None,
    scalars: torch.Tensor | None = None,
) -> None:
    """Steps AdamW with moments that are given.

    p ← (1 − ηλ)p − η/(1−β₁ᵗ) · m / (√v / √(1−β₂ˢ) + ε) with t = `step` and s = `second_step`, the number of steps that have
    updated v. Where v is 0, m counts as 0.

    Args:
        param: fp32 [n], updated in place.
        exp_avg, exp_avg_sq: fp32 [n].
        param_out: [n], 16-bit, receives the updated parameters.
        scalars: the step's; only SKIP counts.

    Raises:
        ValueError: for tensors that do not fit together, and steps below 1.
    """
    correction1 = bias_corrections(step, *betas, wanted=bias_correction)[0]
    correction2 = bias_corrections(second_step, *betas, wanted=bias_correction)[1]
    args = checked(
        param,
        scalars,
        betas,
        grad=None,
        first=exp_avg,
        second=exp_avg_sq,
        out=param_out,
        root2=1 / math.sqrt(correction2),
        eps=eps,
        keep=1 - lr * weight_decay,
        rate=lr / correction1,
    )
    backend(param.device).frozen_adam(args)
