"""Hooks that put gradients into the flat buffers: linear layers multiply into them, all other gradients are copied once.

Autograd allocates each gradient and adds it to ``param.grad``. Here no parameter keeps a ``grad``: a hook copies each complete
gradient to its view of the flat buffer and frees the original. The weight gradient of ``nn.Linear``, a matrix product, is
written to (or accumulated in) the view by the product itself, so most of a transformer's gradients are neither allocated nor
copied.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn import functional

from zeroplan.core.errors import BadInput
from zeroplan_runtime import function_transforms
from zeroplan_runtime.checks import refuse_copy
from zeroplan_runtime.compiled import is_graph, may_compile
from zeroplan_runtime.gradient_reduction import note_arrival
from zeroplan_runtime.local_tensors import is_distributed, is_local_product, local_grad, local_part
from zeroplan_runtime.schedule import Schedule
from zeroplan_runtime.unit_state import UnitState

_Place = tuple[UnitState, int]


def attach_gradient_hooks(schedule: Schedule, *, direct: bool = True) -> Callable[[], None]:
    """Makes all gradients of the schedule's parameters arrive in the units' ``grads.full``.

    Args:
        schedule: the schedule whose units get the hooks.
        direct: let plain ``nn.Linear`` layers write their weight gradients in place.

    Returns:
        A function that removes the hooks.
    """
    places: dict[int, _Place] = {}
    handles: list[Any] = []
    for unit in schedule.model_states.units:
        if unit.trainable is not None:
            for i, param in enumerate(unit.trainable.params):
                places[id(param)] = (unit, i)
                # C++ holds the hook, where the garbage collector does not look: a strong reference would leak the engine.
                hook = partial(_take_grad, weakref.ref(schedule), unit.index, i)
                handles.append(param.register_post_accumulate_grad_hook(hook))
    changed: list[nn.Module] = []
    if direct:
        for unit in schedule.model_states.units:
            for module in unit.module.modules():
                if not is_plain_linear(module) or "forward" in vars(module):
                    continue
                place = places.get(id(module._parameters.get("weight")))
                if place is None:
                    continue
                if schedule.model_states.grad_scale(place[0]) != 1.0:
                    continue
                target = GradientTarget(schedule, place, module.weight, module.bias)
                vars(module)["_gradient_target"] = target
                # One function, or graphs could not serve several blocks.
                module.forward = MethodType(_forward, module)  # type: ignore[method-assign]
                changed.append(module)

    def detach() -> None:
        for handle in handles:
            handle.remove()
        for module in changed:
            del module.forward, vars(module)["_gradient_target"]

    return detach


def _take_grad(engine: weakref.ref[Schedule], unit: int, position: int, param: torch.Tensor) -> None:
    schedule = engine()
    if schedule is None:
        return
    after = param._post_accumulate_grad_hooks
    if after is not None and len(after) > 1 and getattr(next(reversed(after.values())), "func", None) is not _take_grad:
        raise BadInput(
            f"{schedule.model_states.units[unit].name_of(position)!r} has a hook by register_post_accumulate_grad_hook(), "
            "which finds no gradient, as they are taken to flat buffers",
            where="backward",
            remedy="use register_hook(), which is given the gradient, or register it before initialize()",
        )
    grad, param.grad = param.grad, None
    if grad is None:
        return
    if not schedule.in_engine_backward:
        name = schedule.model_states.units[unit].name_of(position)
        raise BadInput(
            f"a gradient of {name!r} came by another backward than the engine's",
            where="backward",
            remedy="call engine.backward(loss), not loss.backward(); for other gradients torch.autograd.grad()",
        )
    state = schedule.model_states.units[unit]
    of_graph = may_compile() and not schedule.keeps_guard and is_graph(state.module)  # what is guarded runs uncompiled
    schedule.grads.accumulate(state, position, local_grad(param, grad), of_graph=of_graph)


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Returns whether `module` computes ``x Wᵀ + b`` and nothing else."""
    return type(module) is nn.Linear and not hasattr(module, "parametrizations")


class GradientTarget:
    """The place of a linear layer's weight gradient: unit and position in its trainable flat; and the layer's parameters."""

    __slots__ = ("bias", "place", "schedule", "weight")
    __reduce_ex__ = refuse_copy

    def __init__(self, schedule: Schedule, place: _Place, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.schedule, self.place, self.weight, self.bias = schedule, place, weight, bias

    def is_due(self, node: Any) -> bool:
        """Returns whether the backward that runs accumulates the weight's gradient; `node` has the weight as second input.

        ``engine.backward()`` does, but not a ``torch.autograd.grad()`` within it, as hooks of implicit layers call it.
        """
        if not self.schedule.in_engine_backward:
            return False
        try:
            return torch._C._will_engine_execute_node(node.next_functions[1][0])
        except RuntimeError:  # torch.autograd.grad() with respect to the weight
            return False

    def accumulate_weight_grad(self, grad: torch.Tensor, x: torch.Tensor) -> None:
        """Adds gradᵀ · x to the weight's gradient in the flat buffer, or writes it there if it is the first.

        Args:
            grad: [tokens, out], the gradient of the layer's output; of a DTensor this rank's part.
            x: [tokens, in], the layer's input; likewise.
        """
        if not self.weight.requires_grad:  # frozen since the forward, as autograd's own accumulation asks, too
            return
        unit, position = self.place
        self.schedule.grads.acquire(unit)
        view = unit.grads.views[position]
        if view.dtype != grad.dtype and not (grad.is_cuda and view.dtype == torch.float32):
            self.schedule.grads.accumulate(unit, position, torch.mm(grad.t(), x))
            return
        # Where gradients are reduced in fp32, the fp32 sums of the 16-bit factors' product are kept unrounded.
        wider: dict[str, Any] = {} if view.dtype == grad.dtype else {"out_dtype": view.dtype}
        if unit.grads.received[position]:
            torch.addmm(view, grad.t(), x, out=view, **wider)
        else:
            torch.mm(grad.t(), x, out=view, **wider)
        note_arrival(unit, position)


def _forward(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    if type(module) is not nn.Linear:  # its class was changed since
        other: torch.Tensor = type(module).forward(module, x)
        return other
    target = direct_target(module, x)
    if target is None:
        return functional.linear(x, module.weight, module.bias)
    found: torch.Tensor = DirectLinear.apply(x, module.weight, module.bias, target)
    return found


def direct_target(module: nn.Linear, x: torch.Tensor) -> GradientTarget | None:
    """Returns where the gradient of the weight can be written for the input `x`; None where autograd has to return it."""
    target: GradientTarget | None = vars(module).get("_gradient_target")
    if target is None:
        return None
    weight, bias = module.weight, module.bias
    if (
        weight is not target.weight  # tied, replaced or parametrized since
        or bias is not target.bias
        or torch.compiler.is_compiling()  # a graph's own backward gives whole gradients
        or not torch.is_grad_enabled()
        or torch.is_autocast_enabled(x.device.type)
        or x.dtype != weight.dtype
        or is_distributed(x) is not is_distributed(weight)
        or not x.numel()
        or not _has_no_other_hooks(weight)
        or function_transforms.are_active()  # which need rules of their own
        or target.schedule.halves
    ):
        return None
    return target


def _has_no_other_hooks(weight: torch.Tensor) -> bool:
    """Returns whether the weight is trained and has no hook of the user's, which would have to see the gradient."""
    after = weight._post_accumulate_grad_hooks  # one of them is ours
    return weight.requires_grad and not weight._backward_hooks and (after is None or len(after) <= 1)


class DirectLinear(torch.autograd.Function):
    """``x Wᵀ + b`` whose weight gradient goes to a :class:`GradientTarget` in ``engine.backward()``, else to autograd.

    The context refers to the parameter instead of saving it: its address is constant (Note [Addresses] in model_states).
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: GradientTarget
    ) -> torch.Tensor:
        """Returns [..., out] for `x` [..., in]."""
        ctx.save_for_backward(x)
        ctx.version = weight._version
        ctx.weight, ctx.target, ctx.needs_bias = weight, target, bias is not None and bias.requires_grad
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None]:
        """Returns the gradients of `x`, of the weight (None where it went to the target) and of the bias."""
        (x,) = ctx.saved_tensors
        if ctx.weight._version != ctx.version:  # in the words of autograd, which checks what it saves itself
            raise RuntimeError("a weight needed for gradient computation has been modified by an inplace operation")
        rows, columns = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        grad_x = grad.matmul(ctx.weight) if ctx.needs_input_grad[0] else None
        grad_weight = None
        direct = ctx.target.is_due(ctx) and not torch.is_grad_enabled()
        if direct and is_local_product(grad, x, ctx.weight):
            ctx.target.accumulate_weight_grad(local_part(rows), local_part(columns))
        else:
            grad_weight = rows.t() @ columns
        return grad_x, grad_weight, rows.sum(0) if ctx.needs_bias else None, None
