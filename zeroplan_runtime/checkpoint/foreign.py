"""Writes a checkpoint of another engine, whose tensors are whole, into an engine of any stage and number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from zeroplan.core.errors import BadInput
from zeroplan_runtime.engine_parts import EngineParts
from zeroplan_runtime.parameter_states import MASTER, ParameterStates
from zeroplan_runtime.parameter_values import write_value
from zeroplan_runtime.units import plain_named


class WholeTensors(Protocol):
    """A checkpoint's tensors, whole, each in its parameter's shape."""

    def state(self, name: str, key: str) -> torch.Tensor:
        """Return a trained parameter (``master``) or a state of it, such as ``exp_avg``."""

    def frozen(self, name: str) -> torch.Tensor:
        """Return a parameter that is not trained."""

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


def write_whole(engine: EngineParts, wanted: WantedTensors, tensors: WholeTensors, *, doing: str) -> None:
    """Write all that is wanted. Every rank must call it, once all have found that everything is there.

    Args:
        doing: what the watchdog says of it.
    """
    states = ParameterStates(engine)
    for name, param in wanted.trained.items():
        for key in wanted.keys:
            engine.activity.piece(doing)
            states.set_whole(param, tensors.state(name, key), key)
    engine.model_states.forget_errors()
    for name, param in wanted.frozen.items():
        write_value(engine, param, tensors.frozen(name))
    with torch.no_grad():
        for name, buffer in plain_named(engine.module.named_buffers()):
            value = tensors.buffer(name)
            if value is not None:
                buffer.copy_(value)


def go_on_from(engine: EngineParts, wanted: WantedTensors, *, applied: int, global_steps: int) -> None:
    """Count on from a number of steps; techniques begin anew.

    Args:
        applied: steps that the optimizer has taken.
        global_steps: those that it was asked for, the skipped ones included.
    """
    if len(wanted.keys) > 1:
        engine.progress.applied = applied
    engine.progress.global_steps = global_steps
    engine.progress.micro_steps = global_steps * engine.progress.grad_accum
    engine.techniques.load_state_dict({})
