"""Shapes of the commonest pointwise operators, without the meta device's own (and much slower) derivation of them.

Where every operand is contiguous, so is the result; other cases are left to torch.
"""

from __future__ import annotations

from typing import Any

import torch

_aten = torch.ops.aten
#: Operators of one or two operands whose result has their common dtype, if that is a floating one.
_COMMON = {
    getattr(getattr(_aten, name), overload)
    for name, overload in (
        ("mul", "Tensor"),
        ("mul", "Scalar"),
        ("add", "Tensor"),
        ("sub", "Tensor"),
        ("div", "Tensor"),
        ("div", "Scalar"),
        ("pow", "Tensor_Scalar"),
        ("neg", "default"),
        ("rsqrt", "default"),
        ("sqrt", "default"),
        ("tanh", "default"),
        ("sigmoid", "default"),
        ("silu", "default"),
        ("gelu", "default"),
        ("relu", "default"),
        ("silu_backward", "default"),
        ("gelu_backward", "default"),
        ("tanh_backward", "default"),
        ("cos", "default"),
        ("sin", "default"),
    )
}


def result(func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
    """The operator's result, or None where torch has to say."""
    if func not in _COMMON or (kwargs and "out" in kwargs):
        return None
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    first = tensors[0]
    if not first.dtype.is_floating_point or first.dim() == 0:
        return None
    shape, dtype = first.shape, first.dtype
    for tensor in tensors:
        if tensor.device.type != "meta" or tensor.dtype is not dtype or not tensor.is_contiguous():
            return None
        if tensor.shape != shape:
            shape = torch.broadcast_shapes(shape, tensor.shape)
    return torch.empty(shape, dtype=dtype, device="meta")
