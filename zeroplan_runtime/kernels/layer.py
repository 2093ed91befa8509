"""A transformer layer's operations between its products, each in one pass over memory: bias, dropout, residual and norm; bias
and GELU; and their backwards, which add up the gradients of biases and norms on the way.

Tensors are [rows, columns], contiguous, in bf16, fp16 or fp32; arithmetic is fp32 and rounds once. Results are allocated here,
the same for every backend and on the meta device, so a plan that traces these functions sees what a GPU allocates.
"""

from __future__ import annotations

from types import ModuleType

import torch

from zeroplan_runtime.kernels import cuda_backend, layer_cuda, layer_torch
from zeroplan_runtime.kernels.backends import backend
from zeroplan_runtime.kernels.philox import GROUP, Dropout

Norm = tuple[torch.Tensor, torch.Tensor, float]
_WIDEST = layer_cuda.MOST_COLUMNS


def _impl(*tensors: torch.Tensor | None, most: int | None = None) -> ModuleType | None:
    """The backend of these tensors, whose rows have up to `most` columns; None on the meta device, which has sizes alone."""
    given = [each for each in tensors if each is not None]
    first = given[0]
    if first.device.type == "meta":
        return None
    columns = first.shape[-1]
    fits = columns % GROUP == 0 and (most is None or columns <= most)
    if first.is_cuda and fits and all(each.data_ptr() % 16 == 0 for each in given) and backend(first.device) is cuda_backend:
        return layer_cuda
    return layer_torch


def _partial(grad: torch.Tensor, parts: int, sums: int) -> torch.Tensor | None:
    """Room for the sums of each part of the rows on CUDA; where torch runs, it takes its own."""
    if grad.device.type == "cpu":
        return None
    return grad.new_empty((parts, sums * grad.shape[1]), dtype=torch.float32)


@torch.no_grad()
def drop(x: torch.Tensor, dropout: Dropout, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Returns `x`, contiguous and of any shape, with some elements dropped; `out` may be `x`."""
    made = torch.empty_like(x) if out is None else out
    width = GROUP if x.numel() % GROUP == 0 else 1
    impl = _impl(x.view(-1, width), made.view(-1, width))
    if impl is not None:
        impl.drop(x, dropout, made)
    return made


@torch.no_grad()
def norm(x: torch.Tensor, how: Norm) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the layer norm of each row, and the rows' means and reciprocal deviations, fp32 [rows].

    Args:
        x: [rows, columns].
        how: weight [columns], shift [columns] and epsilon.
    """
    results = _norm_results(x, torch.empty_like(x))
    impl = _impl(x, *how[:2], most=_WIDEST)
    if impl is not None:
        impl.add_norm(x, None, None, None, how, None, results)
    return results


def _norm_results(x: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mean, rstd = (x.new_empty(x.shape[0], dtype=torch.float32) for _ in range(2))
    return out, mean, rstd


@torch.no_grad()
def add_norm(
    x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, dropout: Dropout | None, how: Norm, *, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Computes the layer norm of ``residual + dropout(x + bias)``.

    Args:
        x: [rows, columns], a product. Its memory holds the sum afterwards, or the result where the sum is not kept.
        bias: [columns].
        residual: [rows, columns].
        dropout: what is dropped; None for nothing.
        how: weight, shift and epsilon of the norm.
        keep: keep the sum.

    Returns:
        The result, the sum or None, and the sum's means and reciprocal deviations, fp32 [rows].
    """
    out, mean, rstd = results = _norm_results(x, torch.empty_like(x) if keep else x)
    summed = x if keep else None
    impl = _impl(x, bias, residual, *how[:2], most=_WIDEST)
    if impl is not None:
        impl.add_norm(x, bias, residual, dropout, how, summed, results)
    return out, summed, mean, rstd


@torch.no_grad()
def add(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, dropout: Dropout | None) -> torch.Tensor:
    """Returns ``residual + dropout(x + bias)`` in the memory of `x`."""
    impl = _impl(x, bias, residual, most=_WIDEST)
    if impl is not None:
        impl.add_norm(x, bias, residual, dropout, None, x, None)
    return x


@torch.no_grad()
def norm_backward(
    grad: torch.Tensor,
    saved: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    shift: torch.Tensor | None,
    *,
    extra: torch.Tensor | None = None,
    dropout: Dropout | None = None,
    bias: bool = True,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Computes the gradients of :func:`add_norm`, or of :func:`norm` where `bias` is not set.

    With the norm's input, x̂ = (input − mean) · rstd; without, it follows from the output: x̂ = (output − shift) / weight.

    Args:
        grad: [rows, columns], the result's gradient.
        saved: the norm's input, or its output where `mean` is None.
        mean: [rows].
        rstd: [rows].
        weight: [columns]; a zero in it makes the gradients NaN where `mean` is None.
        shift: [columns]; needed where `mean` is None.
        extra: added to the gradient of the sum: that of its other use.
        dropout: that of the forward.
        bias: compute the gradients of `x` and its bias, too.
        out: where the sum's gradient is written; it may be `grad`.

    Returns:
        The gradients of the sum, of the weight and of the shift; and with `bias` those of `x` (without dropout, the sum's very
        tensor) and of its bias.
    """
    grad_sum = torch.empty_like(grad) if out is None else out
    grad_x = torch.empty_like(grad) if dropout is not None else None
    sums = tuple(torch.empty_like(weight) for _ in range(3 if bias else 2))
    partial = _partial(grad, layer_cuda.norm_parts(grad.shape[0]), len(sums))
    impl = _impl(grad, extra, saved, weight, shift, grad_sum, most=_WIDEST)
    if impl is not None:
        grads, given = (grad_sum, grad_x), (weight, shift)
        impl.norm_backward(grad, extra, saved, mean, rstd, given, dropout, grads, sums, partial)
    if not bias:
        return grad_sum, *sums
    return grad_sum, sums[0], sums[1], grad_sum if grad_x is None else grad_x, sums[2]


@torch.no_grad()
def add_backward(grad: torch.Tensor, dropout: Dropout | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradients of `x` (without dropout, `grad` itself) and of its bias of :func:`add`, given the result's."""
    grad_x = torch.empty_like(grad) if dropout is not None else None
    grad_bias = grad.new_empty(grad.shape[1])
    partial = _partial(grad, layer_cuda.norm_parts(grad.shape[0]), 1)
    impl = _impl(grad, most=_WIDEST)
    if impl is not None:
        impl.add_backward(grad, dropout, grad_x, (grad_bias,), partial)
    return grad if grad_x is None else grad_x, grad_bias


@torch.no_grad()
def bias_gelu(x: torch.Tensor, bias: torch.Tensor, approximate: str) -> torch.Tensor:
    """Returns GELU of `x` + `bias`: exact for `approximate` ``"none"``, as DeepSpeed's for ``"tanh"``."""
    out = torch.empty_like(x)
    impl = _impl(bias, x, out)
    if impl is not None:
        impl.bias_gelu(x, bias, approximate, out)
    return out


@torch.no_grad()
def bias_gelu_backward(grad: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, approximate: str) -> torch.Tensor:
    """Writes the gradient of `x` over `grad`, that of the result, and returns the bias's."""
    grad_bias = torch.empty_like(bias)
    partial = _partial(grad, layer_cuda.gelu_parts(*grad.shape), 1)
    impl = _impl(grad, x, bias)
    if impl is not None:
        impl.bias_gelu_backward(grad, x, bias, approximate, grad_bias, partial)
    return grad_bias
