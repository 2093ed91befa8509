"""Checks the first micro batches at stage 3 for parameters that are read while their unit is sharded.

At stage 3 parameters have constant addresses in memory that units share (Note [Addresses] in model_states). A module that reads
another unit's parameter outside that unit's forward would get wrong values without an error. So a dispatch mode checks every
operation of the first micro batches, and such a read raises an error with the parameter's name.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zeroplan.core.buffers import Phase
from zeroplan_runtime.model_states import ModelStates
from zeroplan_runtime.parameter_guard import not_gathered
from zeroplan_runtime.pytree import tensors_of
from zeroplan_runtime.unit_state import UnitState


class Audit(TorchDispatchMode):
    """A context in which every operation that is given a parameter, or a view of one, must find its unit unsharded.

    Raises:
        BadInput: from the operation, with the parameter's name.
    """

    def __init__(self, model_states: ModelStates) -> None:
        super().__init__()
        self._arena = model_states.arena
        self._owners: dict[int, tuple[UnitState, str]] = {}
        self._views: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self._view_owners: dict[int, tuple[UnitState, str]] = {}
        for unit in model_states.units:
            for flat in unit.flats():
                for i, param in zip(flat.layout.params, flat.params, strict=True):
                    self._owners[id(param)] = (unit, unit.layout.shape.params[i].name)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        owner = None
        for tensor in tensors_of((args, dict(kwargs or {}))):
            found = self._owner(tensor)
            if found is not None:
                unit, name = owner = found
                if unit.param_slot.holder is not unit and func not in _HARMLESS:
                    raise not_gathered(name, unit, in_backward=self._arena.phase is Phase.BACKWARD)
        result = func(*args, **(kwargs or {}))
        if owner is not None and func.is_view and isinstance(result, torch.Tensor):
            self._views[id(result)] = result
            self._view_owners[id(result)] = owner
        return result

    def _owner(self, tensor: torch.Tensor) -> tuple[UnitState, str] | None:
        found = self._owners.get(id(tensor))
        if found is None and self._views.get(id(tensor)) is tensor:
            found = self._view_owners[id(tensor)]
        return found


#: Operations that do not read the values of their arguments.
_HARMLESS = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.empty_like.default})
