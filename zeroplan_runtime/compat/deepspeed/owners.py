"""The engine that has each parameter, so that DeepSpeed's functions of a parameter alone find it."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from zeroplan_runtime.engine import Engine
from zeroplan_runtime.parameter_states import ParameterStates

_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()


def own(engine: Engine) -> None:
    """Notes that `engine` has its module's parameters."""
    reference: Any = weakref.ref(engine)
    for param in engine.module.parameters():
        _owners[param] = reference


def owner(param: nn.Parameter) -> Engine | None:
    """The engine that has `param`; None for a parameter of no engine, or of one that is destroyed."""
    engine = _owners[param]() if param in _owners else None
    return None if engine is None or engine.checks.is_destroyed else engine


def states_of(param: nn.Parameter) -> ParameterStates | None:
    """Returns the parameter states of `param`'s engine; None for a parameter that no engine trains."""
    engine = owner(param)
    if engine is None:
        return None
    states = ParameterStates(engine)
    return states if states.trains(param) else None
