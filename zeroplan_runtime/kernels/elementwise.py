"""Updates, by torch's operations, of optimizers of ``torch.optim`` that have no kernel: those that treat each element alone.

They work on a part of the flat buffers at a time, in a workspace of the Arena's, and allocate nothing. Where a step may be
skipped they wait for the device to know it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from zeroplan.core.layout import UPDATE_CHUNK
from zeroplan_runtime.kernels.segments import Segments
from zeroplan_runtime.kernels.update import FACTOR, SKIP, Reduce
from zeroplan_runtime.kernels.update_protocol import Update

#: Parameters, gradients and a scratch tensor, fp32 and 1-D, then the states.
_Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]


def _parts(
    master: torch.Tensor,
    grad: torch.Tensor,
    states: Sequence[torch.Tensor],
    *,
    lr: float,
    weight_decay: float,
    workspace: torch.Tensor,
    param_out: torch.Tensor | None,
    scalars: torch.Tensor | None,
    decoupled_weight_decay: bool = False,
) -> Iterator[_Part]:
    """Parts of the buffers, the gradients scaled and with weight decay; when a part is done ``param_out`` gets its values.

    There are none where the step is skipped.
    """
    if scalars is not None and bool(scalars[SKIP]):
        return
    numel = master.numel()
    size = min(UPDATE_CHUNK, workspace.numel() // 2)
    for begin in range(0, numel, size):
        part = slice(begin, min(begin + size, numel))
        p, length = master[part], part.stop - begin
        g = workspace[:length].copy_(grad[part])
        if scalars is not None:
            g.mul_(scalars[FACTOR])
        if decoupled_weight_decay:
            p.mul_(1 - lr * weight_decay)
        elif weight_decay:
            g.add_(p, alpha=weight_decay)
        yield p, g, workspace[size : size + length], [state[part] for state in states]
        if param_out is not None:
            param_out[part].copy_(p)


def _update(rule: Callable[..., None]) -> Update:
    """The update of an optimizer from its `rule`, which is given the parts of the buffers, the step and the hyperparameters."""

    def update(
        master: torch.Tensor,
        grad: torch.Tensor,
        states: Sequence[torch.Tensor],
        segments: Segments | None,
        reduce: Reduce | None,
        *,
        step: int,
        **keywords: Any,
    ) -> None:
        common = {key: keywords.pop(key) for key in _COMMON if key in keywords}
        rule(_parts(master, grad, states, lr=keywords["lr"], **common), step, **keywords)

    return update


#: The keywords that are not a rule's own.
_COMMON = ("weight_decay", "decoupled_weight_decay", "workspace", "param_out", "scalars")


@_update
def rmsprop(parts: Iterator[_Part], step: int, *, lr: float, alpha: float, eps: float) -> None:
    """Steps RMSprop (Hinton 2012, lecture 6e) as ``torch.optim.RMSprop``: v ← αv + (1−α)g², p ← p − ηg / (√v + ε)."""
    for p, g, scratch, (v,) in parts:
        v.mul_(alpha).addcmul_(g, g, value=1 - alpha)
        p.addcdiv_(g, torch.sqrt(v, out=scratch).add_(eps), value=-lr)


@_update
def adagrad(
    parts: Iterator[_Part], step: int, *, lr: float, lr_decay: float, initial_accumulator_value: float, eps: float
) -> None:
    """Steps Adagrad (Duchi et al. 2011) as ``torch.optim.Adagrad``: s ← s + g², p ← p − η/(1 + (t−1)δ) · g / (√s + ε)."""
    for p, g, scratch, (s,) in parts:
        if step == 1:
            s.fill_(initial_accumulator_value)
        s.addcmul_(g, g)
        p.addcdiv_(g, torch.sqrt(s, out=scratch).add_(eps), value=-lr / (1 + (step - 1) * lr_decay))


@_update
def adadelta(parts: Iterator[_Part], step: int, *, lr: float, rho: float, eps: float) -> None:
    """Steps Adadelta (Zeiler 2012): v ← ρv + (1−ρ)g², d = g √(u + ε) / √(v + ε), u ← ρu + (1−ρ)d², p ← p − ηd."""
    for p, g, scratch, (v, u) in parts:
        v.mul_(rho).addcmul_(g, g, value=1 - rho)
        g.mul_(torch.add(u, eps, out=scratch).sqrt_()).div_(torch.add(v, eps, out=scratch).sqrt_())
        u.mul_(rho).addcmul_(g, g, value=1 - rho)
        p.sub_(g, alpha=lr)


@_update
def adamax(parts: Iterator[_Part], step: int, *, lr: float, betas: tuple[float, float], eps: float) -> None:
    """Steps Adamax (Kingma & Ba 2015, algorithm 2): m ← β₁m + (1−β₁)g, u ← max(β₂u, |g| + ε), p ← p − η/(1−β₁ᵗ) · m / u."""
    for p, g, _, (m, u) in parts:
        m.lerp_(g, 1 - betas[0])
        torch.maximum(u.mul_(betas[1]), g.abs_().add_(eps), out=u)
        p.addcdiv_(m, u, value=-lr / (1 - betas[0] ** step))


@_update
def nadam(
    parts: Iterator[_Part], step: int, *, lr: float, betas: tuple[float, float], eps: float, momentum_decay: float
) -> None:
    """Steps NAdam (Dozat 2016) as ``torch.optim.NAdam``: Adam with p ← p − η[(1−μₜ)/(1−Πμ) · g + μₜ₊₁/(1−Πμ·μₜ₊₁) · m] /
    (√(v/(1−β₂ᵗ)) + ε).

    μₜ = β₁(1 − 0.96^(tψ)/2), and Πμ is the product of μ₁ to μₜ.
    """
    product, now, following = _momenta(step, betas[0], momentum_decay)
    root = 1 / math.sqrt(1 - betas[1] ** step)
    for p, g, scratch, (m, v) in parts:
        m.lerp_(g, 1 - betas[0])
        v.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
        torch.sqrt(v, out=scratch).mul_(root).add_(eps)
        p.addcdiv_(g, scratch, value=-lr * (1 - now) / (1 - product))
        p.addcdiv_(m, scratch, value=-lr * following / (1 - product * following))


@_update
def radam(parts: Iterator[_Part], step: int, *, lr: float, betas: tuple[float, float], eps: float) -> None:
    """Steps RAdam (Liu et al. 2020, algorithm 2) as ``torch.optim.RAdam``: Adam with the rate r while ρₜ > 5, before that
    momentum alone.
    """
    correction1, correction2 = 1 - betas[0] ** step, 1 - betas[1] ** step
    longest = 2 / (1 - betas[1]) - 1
    length = longest - 2 * step * betas[1] ** step / correction2
    for p, g, scratch, (m, v) in parts:
        m.lerp_(g, 1 - betas[0])
        v.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
        if length > 5:
            r = math.sqrt((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length))
            p.addcdiv_(m, torch.sqrt(v, out=scratch).add_(eps), value=-lr * r * math.sqrt(correction2) / correction1)
        else:
            p.sub_(m, alpha=lr / correction1)


def _momenta(step: int, beta: float, decay: float) -> tuple[float, float, float]:
    """Πμ, μₜ and μₜ₊₁ of :func:`nadam`; the product ends where 1 − Πμ is 1."""
    product = 1.0
    for number in range(1, step + 1):
        product *= beta * (1 - 0.5 * 0.96 ** (number * decay))
        if product < 1e-30:
            break
    now, following = (beta * (1 - 0.5 * 0.96 ** (number * decay)) for number in (step, step + 1))
    return product, now, following
