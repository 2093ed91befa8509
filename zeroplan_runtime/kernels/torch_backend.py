"""The updates in plain torch operations, for any device: the formulas in their shortest form, and the last resort.

Keeps Note [Arithmetic] of :mod:`.step`: no operation here multiplies and adds at once (``alpha=``, ``addcmul_`` and ``lerp_``
do, or not, by device), so the bits are the kernels'. Works chunk by chunk, which bounds the temporaries.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

from zeroplan_runtime.kernels.segments import Segments
from zeroplan_runtime.kernels.update import FACTOR, NORM, SKIP, SQUARES, Step

#: Elements updated at a time: 16 MiB a temporary.
CHUNK = 1 << 22


def _chunks(step: Step) -> Iterator[tuple[slice, torch.Tensor]]:
    """Slices of the buffers, each with its scaled fp32 gradient; none where the step is skipped (which a GPU waits for)."""
    if step.scalars is not None and bool(step.scalars[SKIP]):
        return
    for part in _slices(step.param.numel()):
        assert step.grad is not None
        grad = step.grad[part].float()
        yield part, grad if step.scalars is None else grad * step.scalars[FACTOR]


def _slices(numel: int) -> Iterator[slice]:
    for begin in range(0, numel, CHUNK):
        yield slice(begin, min(begin + CHUNK, numel))


def _emit(step: Step, part: slice) -> None:
    if step.out is not None:
        step.out[part].copy_(step.param[part])


def adam(step: Step) -> None:
    """Adam and AdamW; see ``csrc/cuda/adam.cu``."""
    assert step.first is not None
    assert step.second is not None
    for part, scaled in _chunks(step):
        p, m, v = step.param[part], step.first[part], step.second[part]
        grad = scaled + p * step.l2
        m.mul_(step.beta1).add_(grad * step.one_minus_beta1)
        v.mul_(step.beta2).add_((grad * step.one_minus_beta2).mul_(grad))
        p.mul_(step.keep).sub_((m / _root(v).mul_(step.root2).add_(step.eps)).mul_(step.rate))
        _emit(step, part)


def lion(step: Step) -> None:
    """Lion; see ``csrc/cuda/lion.cu``."""
    assert step.first is not None
    for part, grad in _chunks(step):
        p, m = step.param[part], step.first[part]
        direction = (m * step.beta1).add_(grad * step.one_minus_beta1)
        # torch.sign takes NaN to 0; it must reach the parameter.
        sign = torch.where(direction.isnan(), direction, direction.sign())
        p.mul_(step.keep).sub_(sign.mul_(step.rate))
        m.mul_(step.beta2).add_(grad * step.one_minus_beta2)
        _emit(step, part)


def sgd(step: Step) -> None:
    """SGD with `beta1` as momentum and `one_minus_beta1` as what the gradient adds to it; see ``csrc/cuda/sgd.cu``."""
    for part, scaled in _chunks(step):
        p = step.param[part]
        grad = scaled + p * step.l2
        if step.first is not None:
            buffer = step.first[part]
            buffer.mul_(step.beta1).add_(grad * step.one_minus_beta1)
            grad = grad + buffer * step.beta1 if step.nesterov else buffer
        p.sub_(grad * step.rate)
        _emit(step, part)


def lamb_moments(step: Step, segments: Segments) -> None:
    """LAMB's first pass: the moments, and each segment's squared norms; see ``csrc/cuda/lamb.cu``."""
    assert step.first is not None
    assert step.second is not None
    for part, grad in _chunks(step):
        step.first[part].mul_(step.beta1).add_(grad * step.one_minus_beta1)
        step.second[part].mul_(step.beta2).add_((grad * step.one_minus_beta2).mul_(grad))
    segments.norms.zero_()
    for i, (begin, end) in enumerate(pairwise(segments.bounds)):
        for part in _slices(end - begin):
            within = slice(begin + part.start, begin + part.stop)
            segments.norms[i, 0] += _squares(step.param[within])
            segments.norms[i, 1] += _squares(_direction(step, within))


def lamb_apply(step: Step, segments: Segments, min_trust: float, max_trust: float) -> None:
    """LAMB's second pass, with the norms of whole tensors in ``segments.norms``; see ``csrc/cuda/lamb.cu``."""
    if step.scalars is not None and bool(step.scalars[SKIP]):
        return
    weight, update = segments.norms.sqrt().unbind(1)
    trust = (weight / update).clamp(min_trust, max_trust)
    rates = (torch.where((weight != 0) & (update != 0), trust, 1.0) * step.rate).float()
    for i, (begin, end) in enumerate(pairwise(segments.bounds)):
        for part in _slices(end - begin):
            within = slice(begin + part.start, begin + part.stop)
            step.param[within].sub_(_direction(step, within).mul_(rates[i]))
    for part in _slices(step.param.numel()):
        _emit(step, part)


def _root(x: torch.Tensor) -> torch.Tensor:
    """√x rounded as IEEE asks. On CPUs torch's fp32 root comes from a vector library that is off by one now and then."""
    return x.sqrt() if x.is_cuda else x.double().sqrt_().float()


def _direction(step: Step, part: slice) -> torch.Tensor:
    assert step.first is not None
    assert step.second is not None
    return (step.first[part] / _root(step.second[part]).add_(step.eps)).add_(step.param[part] * step.l2)


def _squares(values: torch.Tensor) -> torch.Tensor:
    wide = values.float()
    return (wide * wide).sum(dtype=torch.float64)


def sum_of_squares(grad: torch.Tensor, scalars: torch.Tensor, *, accumulate: bool) -> None:
    """``scalars[SQUARES]`` = (itself, if `accumulate`) + the sum of the gradient's squares, added in fp64."""
    total = scalars[SQUARES].double() if accumulate else torch.zeros((), dtype=torch.float64, device=grad.device)
    for part in _slices(grad.numel()):
        total = total + _squares(grad[part])
    scalars[SQUARES].copy_(total)


def finalize(scalars: torch.Tensor, max_norm: float, loss_scale: float, *, may_skip: bool) -> None:
    """Norm, factor and skip from the sum of squares, in fp64 and without waiting; see ``csrc/cuda/norm.cu``."""
    squares = scalars[SQUARES].double()
    norm = squares.sqrt() / torch.tensor(loss_scale, dtype=torch.float64)
    clip = (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm > 0 else torch.ones_like(norm)
    scalars[NORM].copy_(norm)
    scalars[FACTOR].copy_(clip / torch.tensor(loss_scale, dtype=torch.float64))
    if may_skip:
        scalars[SKIP].copy_(~torch.isfinite(squares))
    else:
        scalars[SKIP].zero_()


def cast(source: torch.Tensor, out: torch.Tensor, scale: float) -> None:
    """``out = source * scale`` through fp32."""
    for part in _slices(source.numel()):
        out[part].copy_(source[part].float() * scale)


def _rows(logits: torch.Tensor) -> Iterator[slice]:
    step = max(1, CHUNK // max(1, logits.shape[1]))
    for begin in range(0, logits.shape[0], step):
        yield slice(begin, min(begin + step, logits.shape[0]))


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, ignore: int, lse: torch.Tensor, losses: torch.Tensor) -> None:
    """Each row's log-sum-exp and loss."""
    for part in _rows(logits):
        wide, label = logits[part].float(), labels[part]
        counts = label != ignore
        torch.logsumexp(wide, 1, out=lse[part])
        chosen = wide.gather(1, label.where(counts, 0).unsqueeze(1)).squeeze(1)
        losses[part] = torch.where(counts, lse[part] - chosen, 0.0)


def cross_entropy_grad(
    logits: torch.Tensor, labels: torch.Tensor, ignore: int, lse: torch.Tensor, scale: torch.Tensor, grad: torch.Tensor
) -> None:
    """The gradient of `scale` × the sum of the rows' losses."""
    for part in _rows(logits):
        wide, label = logits[part].float(), labels[part]
        counts = (label != ignore).unsqueeze(1)
        wide.sub_(lse[part].unsqueeze(1)).exp_()
        wide.scatter_add_(1, label.unsqueeze(1).where(counts, 0), wide.new_full((len(label), 1), -1.0))
        grad[part] = torch.where(counts, wide.mul_(scale), 0.0)
