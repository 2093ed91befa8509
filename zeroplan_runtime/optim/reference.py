"""The optimizers' formulas in plain torch operations, on flat fp32 tensors. The kernels are held against these.

Every function updates `master` and its states in place from `grad`, which may be of 16 bits. `factor` (a scalar on the
device, or None for 1) multiplies the gradient first: it undoes the loss scale and clips. Adam and SGD follow
``torch.optim`` operation by operation, so that fp32 training comes out bitwise as torch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

#: Elements updated at a time, which bounds the temporaries of this path (fp32: 64 MiB each).
CHUNK = 1 << 24


@dataclass(frozen=True, slots=True)
class Hyper:
    """One step's hyperparameters. `step` counts applied steps from 1. Fields that an optimizer lacks are ignored by it."""

    lr: float
    step: int = 1
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = True
    bias_correction: bool = True
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    min_coeff: float = 0.01
    max_coeff: float = 10.0


def _scaled(grad: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    grad = grad.float()
    return grad if factor is None else grad * factor


def adam(
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    hyper: Hyper,
    factor: torch.Tensor | None = None,
) -> None:
    """Adam (Kingma and Ba 2015, algorithm 1) or, `decoupled`, AdamW (Loshchilov and Hutter 2019, algorithm 2)."""
    grad = _scaled(grad, factor)
    if hyper.weight_decay:
        if hyper.decoupled:
            master.mul_(1 - hyper.lr * hyper.weight_decay)
        else:
            grad = grad.add(master, alpha=hyper.weight_decay)
    exp_avg.lerp_(grad, 1 - hyper.beta1)
    exp_avg_sq.mul_(hyper.beta2).addcmul_(grad, grad, value=1 - hyper.beta2)
    correction1 = 1 - hyper.beta1**hyper.step if hyper.bias_correction else 1.0
    correction2 = 1 - hyper.beta2**hyper.step if hyper.bias_correction else 1.0
    denominator = (exp_avg_sq.sqrt() / math.sqrt(correction2)).add_(hyper.eps)
    master.addcdiv_(exp_avg, denominator, value=-(hyper.lr / correction1))


def lion(
    master: torch.Tensor, exp_avg: torch.Tensor, grad: torch.Tensor, hyper: Hyper, factor: torch.Tensor | None = None
) -> None:
    """Lion (Chen et al. 2023, algorithm 2)."""
    grad = _scaled(grad, factor)
    master.mul_(1 - hyper.lr * hyper.weight_decay)
    master.add_(torch.sign(exp_avg * hyper.beta1 + grad * (1 - hyper.beta1)), alpha=-hyper.lr)
    exp_avg.mul_(hyper.beta2).add_(grad, alpha=1 - hyper.beta2)


def sgd(
    master: torch.Tensor,
    momentum: torch.Tensor | None,
    grad: torch.Tensor,
    hyper: Hyper,
    factor: torch.Tensor | None = None,
) -> None:
    """SGD with momentum, dampening and Nesterov's variant, as ``torch.optim.SGD``."""
    grad = _scaled(grad, factor)
    if hyper.weight_decay:
        grad = grad.add(master, alpha=hyper.weight_decay)
    if momentum is not None:
        if hyper.step == 1:
            momentum.copy_(grad)
        else:
            momentum.mul_(hyper.momentum).add_(grad, alpha=1 - hyper.dampening)
        grad = grad.add(momentum, alpha=hyper.momentum) if hyper.nesterov else momentum
    master.add_(grad, alpha=-hyper.lr)


def lamb_moments(
    exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, grad: torch.Tensor, hyper: Hyper, factor: torch.Tensor | None = None
) -> None:
    """LAMB's first pass (You et al. 2020, algorithm 2): the moments, as Adam's."""
    grad = _scaled(grad, factor)
    exp_avg.mul_(hyper.beta1).add_(grad, alpha=1 - hyper.beta1)
    exp_avg_sq.mul_(hyper.beta2).addcmul_(grad, grad, value=1 - hyper.beta2)


def lamb_direction(master: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, hyper: Hyper) -> torch.Tensor:
    """LAMB's update before the trust ratio, as DeepSpeed's FusedLamb: ``m / (√v + ε) + λ w``, uncorrected moments."""
    return (exp_avg / exp_avg_sq.sqrt().add_(hyper.eps)).add_(master, alpha=hyper.weight_decay)


def lamb_apply(
    master: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, hyper: Hyper, norms: torch.Tensor
) -> None:
    """LAMB's second pass. `norms` [2]: squared norms of the whole parameter and of its direction."""
    weight_norm, direction_norm = norms.sqrt().unbind()
    trust = (weight_norm / direction_norm).clamp(hyper.min_coeff, hyper.max_coeff)
    trust = torch.where((weight_norm > 0) & (direction_norm > 0), trust, torch.ones_like(trust))
    rate = hyper.lr
    if hyper.bias_correction:
        rate *= math.sqrt(1 - hyper.beta2**hyper.step) / (1 - hyper.beta1**hyper.step)
    for part in chunks(master.numel()):
        direction = lamb_direction(master[part], exp_avg[part], exp_avg_sq[part], hyper)
        master[part].sub_(direction.mul_(trust * rate))


def square_sum(values: torch.Tensor) -> torch.Tensor:
    """The sum of squares in fp32, as a scalar on the device."""
    total: torch.Tensor = torch.linalg.vector_norm(values, dtype=torch.float32).square()
    return total


def chunks(numel: int) -> Iterator[slice]:
    """Slices of at most :data:`CHUNK` elements."""
    for begin in range(0, numel, CHUNK):
        yield slice(begin, min(begin + CHUNK, numel))


def in_chunks(update: Callable[..., None], tensors: list[torch.Tensor], *args: object) -> None:
    """Calls `update` with the same chunk of all `tensors` in turn."""
    for part in chunks(tensors[0].numel()):
        update(*(tensor[part] for tensor in tensors), *args)
