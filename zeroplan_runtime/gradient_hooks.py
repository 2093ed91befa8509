"""How gradients reach the flat buffers: linear layers multiply straight into them, everything else is copied once.

Autograd would make each gradient in memory of its own and add it to ``param.grad``. Here no parameter has a ``grad``:
a hook moves each complete gradient into its view of the flat buffer and lets the original go. For ``nn.Linear`` the
weight's gradient, a matrix product, is written to the view itself (or accumulated there by the product), so that the most
of a transformer's gradients are neither allocated nor copied.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from zeroplan_runtime.checks import refuse_copy
from zeroplan_runtime.schedule import RECEIVED_NOW, Schedule
from zeroplan_runtime.unit_state import UnitState

_Place = tuple[UnitState, int]


def attach_gradient_hooks(schedule: Schedule, *, direct: bool = True) -> Callable[[], None]:
    """Sends all gradients of the store's parameters to the schedule.

    Args:
        direct: let plain linear layers write their weights' gradients in place.

    Returns:
        A function that undoes it.
    """
    places: dict[int, _Place] = {}
    handles: list[Any] = []
    for unit in schedule.model_states.units:
        if unit.trainable is not None:
            for i, param in enumerate(unit.trainable.params):
                places[id(param)] = (unit, i)
                # Held by C++, where the garbage collector does not look: a strong reference would keep the engine for ever.
                hook = partial(_take_grad, weakref.ref(schedule), unit.index, i)
                handles.append(param.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
    changed: list[nn.Module] = []
    if direct:
        for unit in schedule.model_states.units:
            for module in unit.module.modules():
                if _is_plain_linear(module) and id(module.weight) in places and "forward" not in vars(module):
                    target = GradientTarget(schedule, places[id(module.weight)], places.get(id(module.bias)))
                    module.forward = MethodType(partial(_forward, target), module)
                    changed.append(module)

    def detach() -> None:
        for handle in handles:
            handle.remove()
        for module in changed:
            del module.forward

    return detach


def _take_grad(engine: weakref.ref[Schedule], unit: int, position: int, param: torch.Tensor) -> None:
    schedule = engine()
    if schedule is None:
        return
    grad, param.grad = param.grad, None
    if grad is not None:
        schedule.accumulate_grad(schedule.model_states.units[unit], position, grad)


def _is_plain_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear and not hasattr(module, "parametrizations")


class GradientTarget:
    """Where one linear layer's gradients go."""

    __slots__ = ("bias", "schedule", "weight")
    __reduce_ex__ = refuse_copy

    def __init__(self, schedule: Schedule, weight: _Place, bias: _Place | None) -> None:
        self.schedule, self.weight, self.bias = schedule, weight, bias

    def accumulate_weight_grad(self, grad: torch.Tensor, x: torch.Tensor) -> None:
        """``weight.grad += gradᵀ x`` for `grad` [tokens, out] and `x` [tokens, in], in the flat buffer."""
        unit, position = self.weight
        self.schedule.acquire_full_grad(unit)
        view = unit.grad_views[position]
        if view.dtype != grad.dtype and not (grad.is_cuda and view.dtype == torch.float32):
            self.schedule.accumulate_grad(unit, position, torch.mm(grad.t(), x))
            return
        # Where gradients are reduced in fp32, the product of 16-bit factors is kept as the GPU summed it, in fp32.
        wider: dict[str, Any] = {} if view.dtype == grad.dtype else {"out_dtype": view.dtype}
        if unit.grad_received[position]:
            torch.addmm(view, grad.t(), x, out=view, **wider)
        else:
            torch.mm(grad.t(), x, out=view, **wider)
        unit.grad_received[position] = RECEIVED_NOW


def _forward(target: GradientTarget, module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    weight, bias = module.weight, module.bias
    if (
        not torch.is_grad_enabled()
        or torch.is_autocast_enabled(x.device.type)
        or x.dtype != weight.dtype
        or not x.numel()
        or not _has_no_other_hooks(weight)
    ):
        return functional.linear(x, weight, bias)
    return DirectLinear.apply(x, weight, bias, target)  # type: ignore[no-any-return, no-untyped-call]


def _has_no_other_hooks(weight: torch.Tensor) -> bool:
    """Whether a gradient is wanted, and by nobody else: hooks of the user's must see it."""
    after = weight._post_accumulate_grad_hooks  # ours is one
    return weight.requires_grad and not weight._backward_hooks and (after is None or len(after) <= 1)


class DirectLinear(torch.autograd.Function):
    """``x Wᵀ + b`` whose weight gradient goes to a :class:`GradientTarget` in engine.backward(), and to autograd in any other.

    The weight is remembered as the parameter itself, not saved: its address is constant (Note [Addresses] in model_states).
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: GradientTarget
    ) -> torch.Tensor:
        """`x` [..., in] to [..., out]."""
        ctx.save_for_backward(x)
        ctx.weight, ctx.target, ctx.needs_bias = weight, target, bias is not None and bias.requires_grad
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None]:
        """The gradient of `x`, and of the bias, which is small and takes autograd's way."""
        (x,) = ctx.saved_tensors
        rows, columns = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        grad_x = grad.matmul(ctx.weight) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.target.schedule.in_backward and not torch.is_grad_enabled():
            ctx.target.accumulate_weight_grad(rows, columns)
        else:
            grad_weight = rows.t() @ columns
        return grad_x, grad_weight, rows.sum(0) if ctx.needs_bias else None, None
