"""Updates, by torch's operations, of optimizers of ``torch.optim`` that have no kernel: those that treat each element alone.

They work on a part of the flat buffers at a time, in a workspace of the Arena's, and allocate nothing. Where a step may be
skipped they wait for the device to know it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from zeroplan.core.arena.layout import UPDATE_CHUNK
from zeroplan_runtime.kernels.segments import TensorSegments
from zeroplan_runtime.kernels.update import FACTOR, SKIP, Reduce, bias_corrections
from zeroplan_runtime.kernels.update_protocol import Update

#: Parameters, gradients and a scratch tensor, fp32 and 1-D, then the states.
_Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]


def _parts(
    master: torch.Tensor,
    grad: torch.Tensor,
    states: Sequence[torch.Tensor],
    *,
    lr: float,
    workspace: torch.Tensor,
    param_out: torch.Tensor | None,
    scalars: torch.Tensor | None,
    weight_decay: float = 0.0,
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
        segments: TensorSegments | None,
        reduce: Reduce | None,
        *,
        step: int,
        **keywords: Any,
    ) -> None:
        common = {_COMMON[key]: keywords.pop(key) for key in tuple(keywords) if key in _COMMON}
        rule(_parts(master, grad, states, lr=keywords["lr"], **common), step, **keywords)

    return update


#: The keywords that are not a rule's own, with the argument of :func:`_parts`.
_COMMON = {
    "weight_decay": "weight_decay",
    "decoupled_weight_decay": "decoupled_weight_decay",
    "decoupled": "decoupled_weight_decay",
    "workspace": "workspace",
    "param_out": "param_out",
    "scalars": "scalars",
}


@_update
def rmsprop(
    parts: Iterator[_Part],
    step: int,
    *,
    lr: float,
    alpha: float,
    eps: float,
    momentum: float = 0.0,
    centered: bool = False,
) -> None:
    """Steps RMSprop (Hinton 2012, lecture 6e) as ``torch.optim.RMSprop``: v ← αv + (1−α)g², p ← p − ηg / (√v + ε).

    With momentum, b ← μb + g / (√v + ε), p ← p − ηb. Centered (Graves 2013, equations 38 to 45), a ← αa + (1−α)g, and v − a²
    stands for v. The states are v, then b, then a, as far as any group needs them.
    """
    for p, g, scratch, (v, *others) in parts:
        v.mul_(alpha).addcmul_(g, g, value=1 - alpha)
        if centered:
            mean = others[-1].lerp_(g, 1 - alpha)
            torch.addcmul(v, mean, mean, value=-1, out=scratch).sqrt_().add_(eps)
        else:
            torch.sqrt(v, out=scratch).add_(eps)
        if momentum:
            p.add_(others[0].mul_(momentum).addcdiv_(g, scratch), alpha=-lr)
        else:
            p.addcdiv_(g, scratch, value=-lr)


@_update
def amsgrad(
    parts: Iterator[_Part],
    step: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    bias_correction: bool = True,
    amsgrad: bool = True,
) -> None:
    """Steps Adam with the largest second moment so far (Reddi et al. 2018, algorithm 2) as ``torch.optim.Adam`` does:
    v̂ ← max(v̂, v), p ← p − η/(1−β₁ᵗ) · m / (√v̂ / √(1−β₂ᵗ) + ε); with v for v̂ in a group without `amsgrad`.
    """
    correction1, correction2 = bias_corrections(step, *betas, wanted=bias_correction)
    for p, g, scratch, (m, v, largest) in parts:
        m.lerp_(g, 1 - betas[0])
        v.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
        second = torch.maximum(largest, v, out=largest) if amsgrad else v
        torch.sqrt(second, out=scratch).div_(math.sqrt(correction2)).add_(eps)
        p.addcdiv_(m, scratch, value=-lr / correction1)


@_update
def asgd(
    parts: Iterator[_Part],
    step: int,
    *,
    lr: float,
    lambd: float,
    alpha: float,
    t0: float,
    eta: float | None,
) -> None:
    """Steps averaged SGD (Polyak & Juditsky 1992) as ``torch.optim.ASGD``: p ← (1 − λη)p − ηg, a ← a + μ(p − a).

    Args:
        parts: the state is a, the mean of the parameters from step `t0` on.
        step: t, from 1; μ = 1 / max(1, t − 1 − t₀).
        lr, lambd, alpha, t0: of the group.
        eta: η, which the step before has left (:func:`_next_eta`); None in the first step, whose η is `lr`, and where it is
            not known, as in a checkpoint of another program's.
    """
    known = lr if step == 1 else _next_eta(step - 1, {"lr": lr, "lambd": lambd, "alpha": alpha})
    rate, share = known if eta is None else eta, 1 / max(1, step - 1 - t0)
    for p, g, scratch, (mean,) in parts:
        p.mul_(1 - lambd * rate).add_(g, alpha=-rate)
        if share == 1:
            mean.copy_(p)
        else:
            mean.add_(torch.sub(p, mean, out=scratch).mul_(share))


def _next_eta(step: int, hyper: Mapping[str, Any]) -> float:
    """η of the step after `step`: lr / (1 + λ · lr · t)^α."""
    rate: float = hyper["lr"] / (1 + hyper["lambd"] * hyper["lr"] * step) ** hyper["alpha"]
    return rate


@_update
def rprop(
    parts: Iterator[_Part],
    step: int,
    *,
    lr: float,
    etas: tuple[float, float],
    step_sizes: tuple[float, float],
) -> None:
    """Steps Rprop (Riedmiller & Braun 1993) as ``torch.optim.Rprop``: p ← p − sign(g)s, where each element's s, `lr` at first,
    is multiplied by η⁺ if g has the sign of the gradient before, and by η⁻ if it has the other, when g becomes 0.
    """
    for p, g, scratch, (before, sizes) in parts:
        if step == 1:
            sizes.fill_(lr)
        torch.mul(g, before, out=scratch)
        masks = before.view(torch.bool)  # it is written anew below, so its memory serves
        same, turned, zero = (masks[i * len(g) : (i + 1) * len(g)] for i in range(3))
        torch.gt(scratch, 0, out=same)
        torch.lt(scratch, 0, out=turned)
        torch.eq(scratch, 0, out=zero)
        scratch.masked_fill_(same, etas[1]).masked_fill_(turned, etas[0]).masked_fill_(zero, 1.0)
        sizes.mul_(scratch).clamp_(*step_sizes)
        g.masked_fill_(turned, 0.0)
        before.copy_(g)
        p.addcmul_(g.sign_(), sizes, value=-1)


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
    parts: Iterator[_Part],
    step: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    momentum_decay: float,
    mu_product: float | None,
) -> None:
    """Steps NAdam (Dozat 2016) as ``torch.optim.NAdam``: Adam with p ← p − η[(1−μₜ)/(1−Πμ) · g + μₜ₊₁/(1−Πμ·μₜ₊₁) · m] /
    (√(v/(1−β₂ᵗ)) + ε).

    μₜ = β₁(1 − 0.96^(tψ)/2), and Πμ is the product of μ₁ to μₜ; `mu_product` is that of the steps before, None where it is not
    known, as in a checkpoint of another program's.
    """
    now, following = (_momentum(number, betas[0], momentum_decay) for number in (step, step + 1))
    product = _product(step, betas[0], momentum_decay, mu_product)
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


def _momentum(step: int, beta: float, decay: float) -> float:
    """μₜ of :func:`nadam`."""
    return beta * (1 - 0.5 * math.pow(0.96, step * decay))


def _product(step: int, beta: float, decay: float, before: float | None) -> float:
    """Πμ of :func:`nadam`, from the product `before` this step, or else as if β were always this; it ends where 1 − Πμ is 1."""
    if before is not None:
        return before * _momentum(step, beta, decay)
    product = 1.0
    for number in range(1, step + 1):
        product *= _momentum(number, beta, decay)
        if product < 1e-30:
            break
    return product


def _next_product(step: int, hyper: Mapping[str, Any]) -> float:
    return _product(step, hyper["betas"][0], hyper["momentum_decay"], hyper["mu_product"])


#: By the name of what a parameter group carries from step to step: its value after step number t with these hyperparameters.
CARRIED: dict[str, Callable[[int, Mapping[str, Any]], float]] = {"eta": _next_eta, "mu_product": _next_product}
