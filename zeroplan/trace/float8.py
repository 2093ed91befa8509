"""Linear layers that multiply in 8-bit floats, as torchao's float8 training runs them without ``torch.compile``.

Each operand of the three products is cast when it is needed and dropped after: its absolute values, twice its size in fp32, and
the 8 bits themselves. Where a product is scaled by rows and may not accumulate fast, torchao multiplies its result by a matrix
of scales in fp32. What stays for the backward is the input as it came, and the weight.

Source: torchao 0.18 ``float8/float8_linear.py`` (``matmul_with_hp_or_float8_args``), ``float8/float8_utils.py``
(``tensor_to_scale``, ``to_fp8_saturated``), ``float8/float8_training_tensor.py`` (``_ToFloat8ConstrFunc``),
``float8/float8_ops.py`` (``preprocess_addmm``, ``addmm_float8_unwrapped``); accelerate 1.15 ``utils/ao.py``
(``convert_model_to_fp8_ao``), ``utils/dataclasses.py`` (``AORecipeKwargs``, which pads).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from zeroplan.core.float8 import Float8Recipe

_FORWARD, _GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
_LEAST = 1e-12
#: Sides of a matrix that tensor cores take are multiples of this.
_ALIGNED = 16


@dataclass(frozen=True, slots=True)
class _Narrow:
    """A matrix in 8 bits, and its scales: one number, or one for each row or column."""

    bits: torch.Tensor
    scale: torch.Tensor

    def t(self) -> _Narrow:
        return _Narrow(self.bits.t(), self.scale.t() if self.scale.dim() else self.scale)

    def flat(self) -> _Narrow:
        """The rows of all samples as one matrix."""
        scale = self.scale.reshape(-1, 1) if self.scale.dim() else self.scale
        return _Narrow(self.bits.reshape(-1, self.bits.shape[-1]), scale)


def _scale_of(x: torch.Tensor, dtype: torch.dtype, dim: int | None) -> torch.Tensor:
    largest = torch.max(torch.abs(x)) if dim is None else torch.amax(torch.abs(x), dim=dim, keepdim=True)
    wide = largest.to(torch.float64)
    return (torch.finfo(dtype).max / torch.clamp(wide, min=_LEAST)).to(torch.float32)


def _saturated(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    most = torch.finfo(dtype).max
    x = x.clamp(min=-most, max=most)
    return x.to(dtype)


def _narrow(x: torch.Tensor, dtype: torch.dtype, dim: int | None, *, rounds: bool) -> _Narrow:
    """x in 8 bits, scaled as a whole (`dim` None) or along `dim`; `rounds`: the scales are powers of two."""
    scale = _scale_of(x, dtype, dim)
    if rounds:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    scaled = x.to(torch.float32) * scale
    return _Narrow(_saturated(scaled, dtype), scale)


def _by_rows(stride: tuple[int, ...]) -> bool:
    return stride[0] > stride[1] == 1


def _aligned(bits: torch.Tensor, dim: int) -> torch.Tensor:
    """A copy whose size along `dim` is padded; a copy, too, where there is nothing to pad."""
    missing = -bits.shape[dim] % _ALIGNED
    return pad(bits, (0, missing, 0, 0) if dim else (0, 0, 0, missing))


def _product(a: _Narrow, b: _Narrow, dtype: torch.dtype, *, fast: bool) -> torch.Tensor:
    """a @ b in `dtype`; `fast`: sums may lose precision."""
    left, right = _aligned(a.bits, 1), _aligned(b.bits, 0)
    if not _by_rows(left.stride()):
        left = left.contiguous()
    if _by_rows(right.stride()):
        right = right.t().contiguous().t()
    left_scale, right_scale = a.scale, b.scale
    if not left_scale.dim() and right_scale.dim():
        left_scale = left_scale.repeat(left.shape[0]).reshape(-1, 1)
    elif left_scale.dim() and not right_scale.dim():
        right_scale = right_scale.repeat(right.shape[1]).reshape(1, -1)
    return _scaled(left, left_scale, right, right_scale, dtype, fast)


def _scaled(
    left: torch.Tensor,
    left_scale: torch.Tensor,
    right: torch.Tensor,
    right_scale: torch.Tensor,
    dtype: torch.dtype,
    fast: bool,
) -> torch.Tensor:
    inverse = left_scale.reciprocal(), right_scale.reciprocal()
    after = inverse[0] * inverse[1] if left_scale.dim() and not fast else None
    out = left.new_empty((left.shape[0], right.shape[1]), dtype=dtype)
    if after is not None:
        out *= after
    return out


class _Float8Product(torch.autograd.Function):
    """y = x·W in 8 bits, and both gradients; the weight comes transposed, ``[in, out]``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, recipe: Float8Recipe) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe = recipe
        rows = recipe is not Float8Recipe.TENSORWISE
        narrow = _narrow(x, _FORWARD, -1 if rows else None, rounds=rows)
        columns = _narrow(weight, _FORWARD, 0 if rows else None, rounds=rows)
        flat = narrow.flat()
        out = _product(flat, columns, x.dtype, fast=True)
        return out.reshape(*x.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        recipe: Float8Recipe = ctx.recipe
        rows, whole = recipe is not Float8Recipe.TENSORWISE, recipe is not Float8Recipe.ROWWISE
        kind = _FORWARD if rows else _GRADIENT
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        narrow = _narrow(grad, kind, -1 if rows else None, rounds=rows)
        columns = _narrow(weight, _FORWARD, None if whole else -1, rounds=rows)
        grad_x = _product(narrow, columns.t(), grad.dtype, fast=False).reshape(x.shape)
        flat = x.reshape(-1, x.shape[-1])
        if recipe is Float8Recipe.ROWWISE_WITH_GW_HP:
            return grad_x, torch.mm(grad.t(), flat).t(), None
        left = _narrow(grad, kind, 0 if rows else None, rounds=rows)
        right = _narrow(flat, _FORWARD, 0 if rows else None, rounds=rows)
        return grad_x, _product(left.t(), right, grad.dtype, fast=False).t(), None


class Float8Linear(nn.Linear):
    """A linear layer that multiplies in 8-bit floats by `recipe`; `autocasts`: it runs under autocast to bf16."""

    recipe: Float8Recipe
    autocasts: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in]; returns [..., out]."""
        if self.autocasts:
            x = x.to(torch.bfloat16)
        out: torch.Tensor = _Float8Product.apply(x, self.weight.t(), self.recipe)
        return out if self.bias is None else out + self.bias.to(out.dtype)


def convert(model: nn.Module, recipe: Float8Recipe, *, autocasts: bool) -> None:
    """Let the linear layers multiply in 8-bit floats, but for the first and the last, and for those of other than whole 16s."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for module in linear[1:-1]:
        if type(module) is nn.Linear and module.in_features % _ALIGNED == module.out_features % _ALIGNED == 0:
            module.__class__ = Float8Linear
            module.recipe, module.autocasts = recipe, autocasts  # type: ignore[assignment]
