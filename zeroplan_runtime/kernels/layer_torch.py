"""The transformer layer's operations by torch, in fp32 inside: what the CUDA kernels are held against, and what a CPU runs.

Arguments are those of :mod:`zeroplan_runtime.kernels.layer`, which has allocated the results.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from zeroplan_runtime.kernels.philox import Dropout, kept


def drop(x: torch.Tensor, dropout: Dropout, out: torch.Tensor) -> None:
    """Writes `x` with some elements dropped to `out`."""
    out.copy_(_dropped(x.float(), dropout))


def _dropped(x: torch.Tensor, dropout: Dropout | None) -> torch.Tensor:
    return x if dropout is None else torch.where(kept(dropout, x.shape), x * dropout.scale, 0.0)


def add_norm(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    dropout: Dropout | None,
    norm: tuple[torch.Tensor, torch.Tensor, float] | None,
    summed: torch.Tensor | None,
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
) -> None:
    """Writes the sum, and its norm, mean and reciprocal deviation."""
    value = x.float() if bias is None else x.float() + bias.float()
    value = _dropped(value, dropout)
    value = (value if residual is None else value + residual.float()).to(x.dtype)
    if norm is not None and results is not None:
        weight, shift, eps = norm
        out, mean, rstd = results
        wide = value.float()
        mean.copy_(wide.mean(1))
        centred = wide - mean[:, None]
        rstd.copy_(torch.rsqrt(centred.square().mean(1) + eps))
        out.copy_(centred * rstd[:, None] * weight.float() + shift.float())
    if summed is not None:
        summed.copy_(value)


def norm_backward(
    grad: torch.Tensor,
    extra: torch.Tensor | None,
    saved: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    norm: tuple[torch.Tensor, torch.Tensor | None],
    dropout: Dropout | None,
    grads: tuple[torch.Tensor, torch.Tensor | None],
    sums: tuple[torch.Tensor, ...],
    partial: torch.Tensor | None,
) -> None:
    """Writes the gradients of the sum and of what was dropped, and the sums over rows: of weight, shift and bias."""
    weight, shift = norm
    if mean is not None:
        normed = (saved.float() - mean[:, None]) * rstd[:, None]
    else:
        assert shift is not None
        normed = (saved.float() - shift.float()) / weight.float()
    wide = grad.float()
    scaled = wide * weight.float()
    sums[0].copy_((wide * normed).sum(0))
    sums[1].copy_(wide.sum(0))
    means = scaled.mean(1, keepdim=True), (scaled * normed).mean(1, keepdim=True)
    found = rstd[:, None] * (scaled - means[0] - normed * means[1])
    found = (found if extra is None else found + extra.float()).to(grad.dtype)
    _input_grads(found, dropout, grads[1], sums[2:])
    grads[0].copy_(found)


def add_backward(
    grad: torch.Tensor,
    dropout: Dropout | None,
    grad_x: torch.Tensor | None,
    sums: tuple[torch.Tensor, ...],
    partial: torch.Tensor | None,
) -> None:
    """Writes the gradient of what was dropped, and that of the bias."""
    _input_grads(grad, dropout, grad_x, sums)


def _input_grads(
    found: torch.Tensor, dropout: Dropout | None, grad_x: torch.Tensor | None, sums: tuple[torch.Tensor, ...]
) -> None:
    dropped = _dropped(found.float(), dropout).to(found.dtype)
    if grad_x is not None:
        grad_x.copy_(dropped)
    for each in sums:
        each.copy_(dropped.float().sum(0))


def bias_gelu(x: torch.Tensor, bias: torch.Tensor, approximate: str, out: torch.Tensor) -> None:
    """Writes GELU of `x` + `bias` to `out`."""
    out.copy_(functional.gelu(x.float() + bias.float(), approximate=approximate))


def bias_gelu_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor,
    approximate: str,
    grad_bias: torch.Tensor,
    partial: torch.Tensor | None,
) -> None:
    """Writes the gradient of `x` over `grad`, and that of the bias."""
    wide = torch.ops.aten.gelu_backward(grad.float(), x.float() + bias.float(), approximate=approximate)
    grad.copy_(wide)
    grad_bias.copy_(grad.float().sum(0))
