"""``loss.backward()`` in place of ``engine.backward(loss)``.

Note [Outputs' hooks]
    A gradient that reaches an output of the forward begins the engine's backward, and a callback of autograd's engine ends
    it. Whether gradients of parameters are asked for, as ``backward()`` does and ``torch.autograd.grad()`` does not, autograd
    says of the nodes that would accumulate them. With accumulation steps each gradient that comes from outside is divided by
    them, as DeepSpeed does. Where there are several outputs the hooks are on aliases of them: one may be computed from another,
    as a loss from logits, and what flows between them must not be divided again. Else they are on the output itself, before
    the units' hooks, so that it may be changed in place.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack, suppress
from typing import Any

import torch

from zeroplan_runtime.compat.deepspeed.refusals import Refusal, refusing
from zeroplan_runtime.engine import Engine
from zeroplan_runtime.pytree import map_tensors, tensors_of

_REMEDY = "use engine.backward(loss)"


class LossBackward:
    """Runs the backwards that the user begins by ``loss.backward()``.

    Args:
        engine: the engine, which must call :meth:`settle` before it uses gradients.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self._open: ExitStack | None = None
        self._is_scaled = False
        self._nodes: list[Any] | None = None

    def watch(self, output: Any) -> Any:
        """Return the output of a forward, whose gradients then begin the engine's backward."""
        engine = self._engine()
        found = {id(one): one for one in tensors_of(output) if one.requires_grad and one.grad_fn is not None}
        if engine is None or engine.optimizer is None or not found:
            return output
        settings = engine.settings
        parts = settings.grad_accum if settings.counts_micro_batches else 1
        if parts > 1 and len(found) > 1:
            found = {key: one.view_as(one) for key, one in found.items()}
            output = map_tensors(output, lambda tensor: found.get(id(tensor), tensor))

        def hook(grad: torch.Tensor) -> torch.Tensor | None:
            return grad / parts if self._begin() and parts > 1 else None

        for one in found.values():
            handle = one.register_hook(hook)
            hooks: Any = one._backward_hooks
            hooks.move_to_end(handle.id, last=False)
        return output

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss, multiplied by the loss scale, whose ``backward()`` is then taken."""
        engine = self._engine()
        if engine is None:
            return loss
        engine.finish_step()
        self._is_scaled = True
        return loss * engine.scaler.scale if engine.scaler.scale != 1.0 else loss

    def settle(self) -> None:
        """End a backward that raised, so that what it left is known to be incomplete."""
        stack, self._open = self._open, None
        if stack is not None:
            fault = RuntimeError("loss.backward() raised")
            with suppress(RuntimeError):
                stack.__exit__(RuntimeError, fault, None)

    def _begin(self) -> bool:
        """Begin the engine's backward, unless it runs already; return whether it is one that this class has begun."""
        engine = self._engine()
        if engine is None or engine.checks.is_destroyed:
            return False
        if self._open is not None:
            return True
        if engine.schedule.in_engine_backward or not self._accumulates(engine):
            return False
        if torch.is_grad_enabled():
            raise Refusal("create_graph=True is not supported", where="loss.backward", remedy="use torch.autograd.grad()")
        if engine.scaler.scale != 1.0 and not self._is_scaled:
            what = f"the loss scale is {engine.scaler.scale:g}, and the loss was not multiplied by it"
            raise Refusal(what, where="loss.backward", remedy=f"use engine.scale(loss).backward(), or {_REMEDY[4:]}")
        self._is_scaled = False
        stack = ExitStack()
        stack.enter_context(refusing())
        boundary = engine.is_gradient_accumulation_boundary()
        stack.enter_context(engine.during_backward(boundary=boundary, in_hook=True))
        self._open = stack
        torch.autograd.Variable._execution_engine.queue_callback(self._end)
        return True

    def _end(self) -> None:
        stack, self._open = self._open, None
        if stack is not None:
            stack.close()

    def _accumulates(self, engine: Engine) -> bool:
        """Return whether the backward that runs accumulates gradients of parameters."""
        if self._nodes is None:
            trained = [param for unit in engine.model_states.units if unit.trainable for param in unit.trainable.params]
            with torch._C.DisableTorchFunctionSubclass():
                self._nodes = [torch.autograd.graph.get_gradient_edge(param).node for param in trained]
        try:
            return any(torch._C._will_engine_execute_node(node) for node in self._nodes)
        except RuntimeError:  # torch.autograd.grad() with respect to a parameter
            return False
