"""Writes a checkpoint of another engine, whose tensors are whole, into an engine of any stage and number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from zeroplan.core.errors import BadInput
from zeroplan_runtime.checkpoint.agreement import on_all_ranks
from zeroplan_runtime.engine_parts import EngineParts
from zeroplan_runtime.optim.lr_schedules import LrSchedule
from zeroplan_runtime.parameter_states import MASTER, ParameterStates
from zeroplan_runtime.parameter_values import write_value
from zeroplan_runtime.units import plain_named


class WholeTensors(Protocol):
    """A checkpoint's tensors, whole, each in its parameter's shape."""

    def state(self, name: str, key: str) -> torch.Tensor:
        """Return a trained parameter (``master``) or a state of it, such as ``exp_avg``."""

    def frozen(self, name: str) -> torch.Tensor | None:
        """Return a parameter that is not trained; None to keep the present one."""

    def buffer(self, name: str) -> torch.Tensor | None:
        """Return a buffer; None where the checkpoint has none of that name."""


@dataclass(frozen=True, slots=True)
class WantedTensors:
    """What an engine loads of a checkpoint of another engine.

    Attributes:
        names: all parameters.
        trained, frozen: parameters by name, but for frozen ones without elements.
        keys: ``master``, and the optimizer's states.
    """

    names: frozenset[str]
    trained: Mapping[str, nn.Parameter]
    frozen: Mapping[str, nn.Parameter]
    keys: Sequence[str]

    @classmethod
    def of(cls, engine: EngineParts, where: str, *, optimizer_states: bool) -> WantedTensors:
        """Return what an engine wants.

        Raises:
            BadInput: its ranks hold parts of the model.
        """
        if engine.ranks.degrees:
            raise BadInput(
                "an engine whose ranks hold parts of the model loads no checkpoint of whole tensors",
                where=where,
                remedy="load it before initialize(), into the whole model",
            )
        states, every = ParameterStates(engine), dict(plain_named(engine.module.named_parameters()))
        trained = {name: param for name, param in every.items() if states.trains(param)}
        frozen = {name: param for name, param in every.items() if name not in trained and param.numel()}
        return cls(frozenset(every), trained, frozen, [MASTER, *(states.keys() if optimizer_states else ())])


def _write(engine: EngineParts, wanted: WantedTensors, tensors: WholeTensors, *, doing: str) -> None:
    """Write all that is wanted; `doing` is what the watchdog says of it."""
    states = ParameterStates(engine)
    for name, param in wanted.trained.items():
        for key in wanted.keys:
            engine.activity.piece(doing)
            states.set_whole(param, tensors.state(name, key), key)
    engine.model_states.forget_errors()
    for name, param in wanted.frozen.items():
        value = tensors.frozen(name)
        if value is not None:
            write_value(engine, param, value)
    with torch.no_grad():
        for name, buffer in plain_named(engine.module.named_buffers()):
            value = tensors.buffer(name)
            if value is not None:
                buffer.copy_(value)


@dataclass(frozen=True, slots=True)
class TrainingCounts:
    """Where a checkpoint's training stood.

    Attributes:
        applied: steps that the optimizer has taken.
        global_steps: those that it was asked for, the skipped ones included.
        skipped: steps whose gradients were not finite.
        missed: by name the applied steps that a parameter has missed while it was frozen.
    """

    applied: int
    global_steps: int
    skipped: int = 0
    missed: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, steps: Mapping[str, int], global_steps: int | None = None, skipped: int = 0) -> TrainingCounts:
        """Makes them from the steps that each parameter has taken."""
        applied = max(steps.values(), default=0)
        missed = {name: applied - taken for name, taken in steps.items() if taken < applied}
        return cls(applied, applied if global_steps is None else global_steps, skipped, missed)


T = TypeVar("T", bound=WholeTensors)


def load_whole(
    engine: EngineParts,
    wanted: WantedTensors,
    find: Callable[[], T],
    counts: Callable[[T], TrainingCounts | None],
    *,
    where: str,
    name: str,
) -> T:
    """Load a checkpoint of whole tensors. Every rank must call it.

    Args:
        engine: the engine.
        wanted: what it loads.
        find: checks that everything is there and gives it; the engine is as it was before when that fails on any rank.
        counts: gives where the training stood, from which techniques begin anew; None to count on as before.
        where: what to name in an error.
        name: what to call the checkpoint.

    Raises:
        BadInput: on every rank, what `find` raised on one.
    """
    found: list[T] = []
    with engine.activity.inside(f"verifying {name}"):
        on_all_ranks(engine, lambda: found.append(find()), where)
        engine.drain()
        engine.schedule.grads.drop(anyway=True)
        engine.checks.grads_were_dropped()
        with engine.checks.during_load():
            _write(engine, wanted, found[0], doing=f"loading {name}")
            stood = counts(found[0])
            if stood is not None:
                state = {**asdict(stood), "loss_scaler": engine.progress.scaler.state_dict()}
                engine.progress.load_state_dict(state, optimizer=len(wanted.keys) > 1)
                engine.techniques.load_state_dict({})
                if engine.optimizer_step is not None and len(wanted.keys) > 1:
                    engine.optimizer_step.load_missed_steps(stood.missed)
    return found[0]


def resume_schedule(engine: EngineParts, state: Any) -> None:
    """Go on with a learning-rate schedule; `state` is None where the checkpoint has none. Rates are those of its step."""
    if engine.lr_scheduler is None or state is None:
        return
    engine.lr_scheduler.load_state_dict(state)
    groups = engine.optimizer.param_groups if engine.optimizer is not None else []
    own = isinstance(engine.lr_scheduler, LrSchedule)
    for group, rate in zip(groups, engine.lr_scheduler.get_lr() if own else engine.lr_scheduler.get_last_lr(), strict=True):
        group["lr"] = rate
