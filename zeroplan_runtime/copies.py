"""Copies of a model under an engine: plain models with the values of now, as averages of weights and frozen references are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from zeroplan_runtime.checks import refuse_copy
from zeroplan_runtime.model_states import ModelStates


def allow_copies(model: nn.Module, model_states: ModelStates, handles: Iterable[Any]) -> Callable[[], None]:
    """Lets ``copy.deepcopy(model)`` make a model without an engine, up to stage 2.

    Args:
        model: the whole model; copies of its modules alone are refused.
        model_states: its parameters.
        handles: of the engine's hooks on modules, which a copy does not have.

    Returns:
        A function that undoes it.
    """
    handles = list(handles)

    def deepcopy(memo: dict[int, Any]) -> nn.Module:
        if model_states.setup.shards_params:
            refuse_copy()
        for handle in handles:
            if (hooks := handle.hooks_dict_ref()) is not None and handle.id in hooks:
                memo[id(hooks[handle.id])] = _nothing
        for module in model.modules():
            if (target := vars(module).get("_gradient_target")) is not None:
                memo[id(target)] = _nothing
        made = type(model).__new__(type(model))
        memo[id(model)] = made
        state = {name: value for name, value in vars(model).items() if name != "__deepcopy__"}
        vars(made).clear()
        vars(made).update(copy.deepcopy(state, memo))
        for module in made.modules():
            _strip(module)
        return made

    vars(model)["__deepcopy__"] = deepcopy

    def undo() -> None:
        vars(model).pop("__deepcopy__", None)

    return undo


def _nothing(*_: Any, **__: Any) -> None:
    """Stands in a copy for a hook of the engine, until it is taken away."""


def _strip(module: nn.Module) -> None:
    for value in vars(module).values():
        if isinstance(value, dict):
            for key in [key for key, one in value.items() if one is _nothing]:
                del value[key]
    if vars(module).get("_gradient_target") is _nothing:
        del vars(module)["_gradient_target"], vars(module)["forward"]
