"""Attention's kernels within compiled graphs: one operator forward, one backward, which inductor does not look into.

While a graph is traced, the operators stand in it with the shapes of what the kernels make. When its code runs on the meta
device, the classes of :mod:`zeroplan.trace.attention` allocate in their place.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from zeroplan.trace import attention
from zeroplan.trace.compiled_float8 import allocate_blockwise
from zeroplan_runtime.techniques.float8 import empty_turned

#: The kernels by name, each with the order in which its backward finds query, key, value and mask.
_KERNELS: dict[str, tuple[Any, Callable[..., tuple[Any, ...]]]] = {
    "FusedAttention": (attention.FusedAttention, lambda q, k, v, bias: (bias, k, q, v)),
    "EfficientAttention": (attention.EfficientAttention, lambda q, k, v, bias: (q, k, v, bias, None, None, None, None)),
    "FlashAttention2": (attention.FlashAttention2, lambda q, k, v, bias: (q, k, v)),
}

_library = torch.library.Library("zeroplan", "DEF")
_library.define("attention_forward(str kernel, Tensor query, Tensor key, Tensor value, Tensor? bias) -> Tensor[]")
_library.define(
    "attention_backward(str kernel, Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor[] kept, "
    "bool bias_grad) -> Tensor[]"
)


def allocate_forward(
    kernel: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None
) -> list[torch.Tensor]:
    """Allocate as a kernel's forward does; returns its output, and what else it makes for the backward."""
    saved: list[torch.Tensor | None] = []
    context = SimpleNamespace(save_for_backward=lambda *tensors: saved.extend(tensors), needs_input_grad=[False] * 4)
    operands = (query, key, value) if kernel == "FlashAttention2" else (query, key, value, bias)
    with attention.kernel():
        out: torch.Tensor = _KERNELS[kernel][0].forward(context, *operands)
    known = [id(tensor) for tensor in (query, key, value, bias, out)]
    return [out, *(tensor for tensor in saved if tensor is not None and id(tensor) not in known)]


def allocate_backward(
    kernel: str,
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    kept: list[torch.Tensor],
    bias_grad: bool,
) -> list[torch.Tensor]:
    """Allocate as a kernel's backward does; returns the gradients of query, key, value, and of the mask if asked for."""
    made, order = _KERNELS[kernel]
    context = SimpleNamespace(saved_tensors=order(query, key, value, bias), bias_grad=bias_grad, cudnn=None)
    with attention.kernel():
        found = made.backward(context, grad)
    return [gradient for gradient in found if gradient is not None]


def _shapes(function: Callable[..., list[torch.Tensor]]) -> Callable[..., list[torch.Tensor]]:
    """The function for fake tensors, on whose device all it makes lies."""

    def fake(kernel: str, first: torch.Tensor, *others: Any) -> list[torch.Tensor]:
        found = function(kernel, first, *others)
        return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=first.device) for t in found]

    return fake


torch.library.register_fake("zeroplan::attention_forward", _shapes(allocate_forward), lib=_library)
torch.library.register_fake("zeroplan::attention_backward", _shapes(allocate_backward), lib=_library)


class OpaqueAttention(torch.autograd.Function):
    """Attention as a compiled graph holds it."""

    @staticmethod
    def forward(
        ctx: Any, kernel: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """The operator's output; see :func:`allocate_forward`."""
        out, *kept = torch.ops.zeroplan.attention_forward(kernel, query, key, value, bias)
        ctx.save_for_backward(query, key, value, bias, out, *kept)
        ctx.kernel, ctx.bias_grad = kernel, bias is not None and ctx.needs_input_grad[4]
        made: torch.Tensor = out
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """The gradients; see :func:`allocate_backward`."""
        query, key, value, bias, *kept = ctx.saved_tensors
        arguments = (query, key, value, bias, kept, ctx.bias_grad)
        found = torch.ops.zeroplan.attention_backward(ctx.kernel, grads[0], *arguments)
        return None, *found[:3], found[3] if ctx.bias_grad else None


#: What generated code calls under the name ``torch.ops.zeroplan``.
ALLOCATING = SimpleNamespace(
    blockwise_product=SimpleNamespace(default=allocate_blockwise),
    turned_float8=SimpleNamespace(default=empty_turned),
    attention_forward=SimpleNamespace(default=allocate_forward),
    attention_backward=SimpleNamespace(default=allocate_backward),
)
