"""Apex's fused norms and optimizers; unmeasured.

A norm keeps its input (its output instead, where it saves memory) and one or two fp32 numbers a row; its backward sums the
gradients of weight and bias up from 16 fp32 rows each. A mixed norm answers in its weight's dtype. FusedAdam keeps two fp32
states, FusedSGD one in the parameter's dtype, FusedLAMB as FusedAdam; all walk their tensors in place.

Source: NVIDIA/apex, ``apex/normalization/fused_layer_norm.py``, ``layer_norm_cuda_kernel.cu`` (``HostLayerNormGradient``,
``HostRMSNormGradient``: part_size), ``apex/optimizers/fused_adam.py``, ``fused_sgd.py``, ``fused_lamb.py``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from zeroplan.capturing.kernels.optimizers import InPlace
from zeroplan.trace.kernels import block

_PARTS = 16


class _Normed(torch.autograd.Function):
    """Normalised rows of [..., H]."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, norm: Any, rows: int
    ) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty_like(x, dtype=weight.dtype if norm.mixed and weight is not None else x.dtype)
        numbers = [block(4 * rows) for _ in range(1 if norm.root or norm.saves else 2)]
        ctx.save_for_backward(out if norm.saves else x, *numbers)
        ctx.like, ctx.weight, ctx.bias = x.dtype, weight, bias
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0].contiguous()
        found = torch.empty_like(grad, dtype=ctx.like)
        given = [None if one is None else torch.empty_like(one) for one in (ctx.weight, ctx.bias)]
        parts = [block(4 * _PARTS * one.numel()) for one in given if one is not None]
        del parts
        return found, *given, None, None


class _Norm(nn.Module):
    root = mixed = False

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, memory_efficient: bool = False
    ) -> None:
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.normalized_shape, self.eps, self.saves = shape, eps, memory_efficient
        self.weight = nn.Parameter(torch.ones(shape)) if elementwise_affine else None
        self.bias = nn.Parameter(torch.zeros(shape)) if elementwise_affine and not self.root else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., *normalized_shape]; returns the like."""
        found: torch.Tensor = _Normed.apply(x, self.weight, self.bias, self, x.numel() // math.prod(self.normalized_shape))
        return found


class FusedLayerNorm(_Norm):
    """LayerNorm."""


class FusedRMSNorm(_Norm):
    """RMSNorm, which has no bias."""

    root = True


class MixedFusedLayerNorm(FusedLayerNorm):
    """LayerNorm that answers in its weight's dtype."""

    mixed = True


class MixedFusedRMSNorm(FusedRMSNorm):
    """RMSNorm that answers in its weight's dtype."""

    mixed = True


class WideAdam(InPlace):
    """Two states in fp32."""

    states = ("exp_avg", "exp_avg_sq")


class FusedLAMB(WideAdam):
    """The same states; its norms are a number a tensor."""


class FusedSGD(InPlace):
    """A momentum in the parameter's dtype, where there is one."""

    states = ("momentum_buffer",)
    state_dtype = None

    def wanted(self, group: dict[str, Any]) -> bool:
        """Whether the group has states."""
        return bool(group.get("momentum"))


RULES = {
    one.__name__: one
    for one in (FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm, FusedLAMB, FusedSGD)
} | {"FusedAdam": type("FusedAdam", (WideAdam,), {})}  # fmt: skip
