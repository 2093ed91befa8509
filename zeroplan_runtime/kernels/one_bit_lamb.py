"""1-bit LAMB (Li et al. 2021, algorithm 1, arXiv 2104.06069): LAMB that remembers its trust ratios, and its step after the
freeze, which scales them.

After the freeze the second moment v stays, as the momentum's bits allow no other, and with it the trust ratio would lose its
meaning. So each tensor keeps the mean c of its ratios of the warm-up, times a factor that says how far v has become wrong: the
largest ratio of √v to the root of a *fresh* second moment, which is made of gradients that are read back from the momentum.
The passes over the tensors are LAMB's own kernels, with moments that stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from zeroplan_runtime.kernels.backends import backend
from zeroplan_runtime.kernels.functional import lamb
from zeroplan_runtime.kernels.segments import TensorSegments
from zeroplan_runtime.kernels.update import SKIP, Reduce, UpdateArgs, bias_corrections

#: Trust ratios below it are none: the kernels take a norm of zero for "no ratio".
_LEAST_RATIO = 1e-100
_BOUNDS = ("min_trust", "max_trust")
_OF_LAMB = ("lr", "betas", "eps", "weight_decay", "bias_correction", *_BOUNDS, "param_out", "scalars")


@dataclass(frozen=True, slots=True)
class FactorLimits:
    """What bounds the factor on a tensor's mean trust ratio, by DeepSpeed's names.

    Attributes:
        factor_min, factor_max: its least and greatest value.
        factor_threshold: the share by which it changes in one step, at most.
    """

    factor_min: float
    factor_max: float
    factor_threshold: float


@torch.no_grad()
def onebit_lamb(
    master: torch.Tensor,
    grad: torch.Tensor,
    states: Sequence[torch.Tensor],
    segments: TensorSegments | None,
    reduce: Reduce | None,
    *,
    step: int,
    **keywords: Any,
) -> None:
    """Steps the warm-up, which is LAMB, and takes each tensor's trust ratio into its mean (algorithm 1, line 5).

    Args:
        master, grad, states, segments, reduce, step: as :class:`~zeroplan_runtime.kernels.update_protocol.Update` has them.
        keywords: those of LAMB; ``coefficients``, fp32 [2, tensors], whose first row is the means, c ← β₃c + (1−β₃)·ratio;
            ``coeff_beta``, β₃. Those of the frozen step are not read.
    """
    assert segments is not None
    coefficients, kept = keywords["coefficients"], keywords["coeff_beta"]
    scalars: torch.Tensor | None = keywords.get("scalars")
    own = {name: keywords[name] for name in _OF_LAMB if name in keywords}
    lamb(master, grad, states[0], states[1], segments, step=step, reduce=reduce, **own)
    weight, update = segments.norms.sqrt().unbind(1)
    ratio = torch.where((weight != 0) & (update != 0), (weight / update).clamp(*(keywords[name] for name in _BOUNDS)), 1.0)
    mean = coefficients[0].double() * kept + ratio * (1 - kept)
    if scalars is not None:
        mean = torch.where(scalars[SKIP] != 0, coefficients[0].double(), mean)
    coefficients[0].copy_(mean)


@torch.no_grad()
def frozen_lamb(
    master: torch.Tensor,
    states: Sequence[torch.Tensor],
    segments: TensorSegments,
    coefficients: torch.Tensor,
    limits: FactorLimits,
    workspace: torch.Tensor,
    *,
    add: Reduce | None,
    largest: Reduce | None,
    step: int,
    second_step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    bias_correction: bool,
    param_out: torch.Tensor | None,
    scalars: torch.Tensor | None,
) -> None:
    """Steps with moments that are given (algorithm 1, lines 14 to 18, as DeepSpeed's OnebitLamb has them).

    With d = m / (√v + ε), 0 where v is, and u = d + λp: p ← p − η √(1−β₂ˢ)/(1−β₁ᵗ) · c · f · u, where f is, within its limits,
    the greatest (√v + ε) / (√v' + ε) of the tensor's elements, of which weight decay's share of u takes none: r·that + (1 − r)
    with r = min(1, ‖d‖/‖u‖). t is `step` and s `second_step`.

    Args:
        master: fp32 [n], updated in place.
        states: fp32 [n] each: m, v and v', none of which is changed.
        segments: the bounds of the tensors.
        coefficients: fp32 [2, tensors]: c, and f of the last step, which is updated.
        limits: of f.
        workspace: fp32, in which the greatest ratios are found.
        add, largest: add up the other ranks' parts in place, or take their greatest; None for one rank's whole tensors.
        step, second_step: numbers of the applied step and of the last that updated v, from 1.
        lr, betas, eps, weight_decay, bias_correction, param_out: as in LAMB.
        scalars: the step's; where SKIP is set, nothing changes.
    """
    if scalars is not None and bool(scalars[SKIP]):
        return
    exp_avg, exp_avg_sq, fresh = states
    correction1 = bias_corrections(step, *betas, wanted=bias_correction)[0]
    correction2 = bias_corrections(second_step, *betas, wanted=bias_correction)[1]
    # Moments that stay: both keep all of themselves, and nothing of a gradient, for which the master stands.
    args = UpdateArgs(
        param=master,
        grad=master,
        first=exp_avg,
        second=exp_avg_sq,
        out=param_out,
        beta1=1.0,
        beta2=1.0,
        eps=eps,
        l2=weight_decay,
        rate=lr * math.sqrt(correction2) / correction1,
    )
    impl = backend(master.device)
    squares, ratios = segments.norms.new_zeros(segments.count, 2), coefficients.new_zeros(segments.count)
    # One bit has no zero: where the warm-up saw no gradient the momentum is noise, and its quotient without bound.
    unseen = exp_avg_sq == 0
    if master.numel():
        _greatest_ratios(exp_avg_sq, fresh, segments, eps, workspace, ratios)
        exp_avg_sq.masked_fill_(unseen, math.inf)  # the quotient is 0
        impl.lamb_moments(args, segments)
        squares.copy_(segments.norms[:, 1:])
        if weight_decay:
            impl.lamb_moments(replace(args, l2=0.0), segments)
            squares[:, 0] = segments.norms[:, 1]
    if add is not None and weight_decay:
        add(squares)
    if largest is not None:
        largest(ratios)
    direction, update = squares.sqrt().unbind(1)
    share = torch.where(update > 0, direction / update, 1.0).clamp_(max=1.0)
    factor = (ratios.double() * share + (1 - share)).clamp_(limits.factor_min, limits.factor_max)
    last, most = coefficients[1].double(), limits.factor_threshold
    factor = torch.maximum(torch.minimum(factor, last * (1 + most)), last * (1 - most))
    coefficients[1].copy_(factor)
    if master.numel():
        segments.norms[:, 0] = (coefficients[0].double() * factor).clamp_(min=_LEAST_RATIO).square_()
        segments.norms[:, 1] = 1.0
        impl.lamb_apply(args, segments, 0.0, math.inf)
        exp_avg_sq.masked_fill_(unseen, 0.0)


def _greatest_ratios(
    old: torch.Tensor, fresh: torch.Tensor, segments: TensorSegments, eps: float, workspace: torch.Tensor, out: torch.Tensor
) -> None:
    """Writes each tensor's greatest (√old + ε) / (√fresh + ε) to `out`, fp32 [tensors], which holds zeros.

    Elements without any gradient in the warm-up, and padding, say nothing of the others, and are left out.
    """
    above, below = workspace.chunk(2)
    size = len(below)
    for tensor, (begin, end) in enumerate(pairwise(segments.bounds)):
        for first in range(begin, end, size):
            part = slice(first, min(first + size, end))
            length = part.stop - part.start
            ratio = torch.sqrt(old[part], out=above[:length]).add_(eps)
            ratio.mul_(torch.sign(old[part], out=below[:length]))
            ratio.div_(torch.sqrt(fresh[part], out=below[:length]).add_(eps))
            if eps == 0:
                ratio.nan_to_num_(nan=0.0)  # no gradient at all
            torch.maximum(out[tensor], ratio.amax(), out=out[tensor])
