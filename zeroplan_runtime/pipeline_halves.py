"""A micro batch's backward in two halves, as zero-bubble schedules run it, under the engine.

Note [Halves]
    torch's own functions run both: the first makes the gradients of a stage's input by ``torch.autograd.grad()`` and keeps what
    arrived at each weight's product, the second runs those products and sets ``weight.grad`` itself, so that no hook on a
    parameter runs. The engine gives them stand-ins for its parameters, whose ``grad`` goes to the flat buffers as it is set.

    The first half leaves no gradients: to the engine it is another's ``torch.autograd.grad()``, outside ``engine.backward()``.
    The second half is the micro batch's backward: it is counted, and its gradients are reduced as those of any. The pipeline's
    first stage receives no gradient of an input, and runs its whole backward in the second half.

    Parameters have to be there from the forward to the second half, which excludes stage 3. Products of linear layers do not
    write into the flat buffers, since one function of autograd's makes both gradients there. A recomputed block would be
    computed once for each of its weights. Sources: torch/distributed/pipelining/_backward.py, stage.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from zeroplan.core.buffers import Phase
from zeroplan.core.errors import BadInput
from zeroplan_runtime.compiled import is_compiled
from zeroplan_runtime.local_tensors import is_distributed
from zeroplan_runtime.schedule import Schedule
from zeroplan_runtime.unit_state import UnitState


class Halves:
    """Runs both halves of an engine's backwards.

    Raises:
        BadInput: where the engine's stage, its parameters or its blocks do not allow it.
    """

    def __init__(self, schedule: Schedule, module: nn.Module, where: str) -> None:
        _require_halvable(schedule, module, where)
        self._schedule = schedule
        schedule.halves = True
        self._weights: list[Any] = [
            StandIn(param, partial(self._keep, unit, position))
            for unit in schedule.model_states.units
            if unit.trainable is not None
            for position, param in enumerate(unit.trainable.params)
        ]

    def _keep(self, unit: UnitState, position: int, gradient: torch.Tensor) -> None:
        self._schedule.grads.accumulate(unit, position, gradient)

    def first(self, roots: tuple[torch.Tensor, ...], grads: Any, inputs: Any) -> Any:
        """Makes the gradients of a stage's inputs; returns them, and what the second half needs."""
        with self._parameters_readable():
            return stage_backward_input(list(roots), grads, inputs, iter(self._weights))

    def second(self, groups: Any) -> None:
        """Makes the gradients of weights, into the flat buffers. Call it within the engine's backward."""
        stage_backward_weight(iter(self._weights), groups)

    @contextmanager
    def _parameters_readable(self) -> Iterator[None]:
        schedule = self._schedule
        schedule.model_states.arena.phase = Phase.BACKWARD
        if not schedule.keeps_guard:
            for unit in schedule.model_states.units:
                schedule.guard.open(unit)
        try:
            yield
        finally:
            schedule.guard.close_all()


class StandIn:
    """Stands for a parameter whose gradient torch's functions set.

    Args:
        param: the parameter.
        take: takes the gradient.
    """

    grad_fn = None

    def __init__(self, param: torch.Tensor, take: Callable[[torch.Tensor], None]) -> None:
        self._param, self._take = param, take

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained now."""
        return self._param.requires_grad

    def view_as(self, _: object) -> torch.Tensor:
        """Return a view of the parameter, by which they find its node in the graph."""
        return self._param.view_as(self._param)

    @property
    def grad(self) -> None:
        """What earlier micro batches left: none, as it is elsewhere."""
        return None

    @grad.setter
    def grad(self, value: torch.Tensor) -> None:
        self._take(value)


def _require_halvable(schedule: Schedule, module: nn.Module, where: str) -> None:
    remedy = "use GPipe or 1F1B"
    if schedule.setup.shards_params:
        what = "parameters of stage 3 are not there from a forward to the second half of its backward"
        raise BadInput(what, where=where, remedy="use stage 2, or GPipe or 1F1B")
    if any(is_distributed(param) for param in module.parameters()):
        raise BadInput("a backward in two halves is not supported with parts of parameters", where=where, remedy=remedy)
    if is_compiled(module):
        what = "a graph of compiled blocks makes gradients of inputs and of weights at once"
        raise BadInput(what, where=where, remedy=f"{remedy}, or do not compile")
    if any(getattr(one, "gradient_checkpointing", False) for one in module.modules()):
        what = "the second half of a backward would compute a checkpointed block once for each of its weights"
        raise BadInput(what, where=where, remedy=f"{remedy}, or no gradient checkpointing")
