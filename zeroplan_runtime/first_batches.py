"""What an engine looks for in the first micro batches: reads of parameters that are not gathered, and aliases of theirs.

At stage 3 parameters have constant addresses in memory that units share (Note [Addresses] in model_states). A module that reads
another unit's parameter outside that unit's forward would get wrong values without an error. So a dispatch mode checks every
operation of the first micro batches, and such a read raises an error with the parameter's name.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from zeroplan.core.buffers import Phase
from zeroplan_runtime.checks import kept_alias
from zeroplan_runtime.compiled import is_compiled, refuse_compiled, uncompiled
from zeroplan_runtime.model_states import ModelStates
from zeroplan_runtime.optim.step import OptimizerStep
from zeroplan_runtime.parameter_aliases import ParameterAliases
from zeroplan_runtime.parameter_guard import not_gathered
from zeroplan_runtime.pytree import tensors_of
from zeroplan_runtime.schedule import Schedule
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
            for placed in unit.placed():
                self._owners[id(placed.param)] = (unit, placed.name)

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


class FirstBatches:
    """Audits of forwards and backwards. What is audited runs uncompiled. Make it when the engine is whole.

    Args:
        module: the model.
        schedule: of its units.
        step: the optimizer's; None without one.
        audit_steps: of so many micro batches, at stage 3, every operation is checked.
    """

    def __init__(self, module: nn.Module, schedule: Schedule, step: OptimizerStep | None, audit_steps: int) -> None:
        self._module, self._schedule, self._audit_steps = module, schedule, audit_steps
        self._audit: Audit | None = None
        self._watches_aliases, self._ran_uncompiled = True, False
        self._shards = schedule.model_states.setup.shards_params
        self.aliases = ParameterAliases(schedule.model_states, schedule.guard, _own_tensors(schedule, step))
        schedule.aliases = self.aliases if self._shards else None

    def audited(self, micro_steps: int) -> AbstractContextManager[object]:
        """Returns a context that checks parameter reads in the first micro batches at stage 3, and aliases in the first of
        all.

        Args:
            micro_steps: micro batches before this one.
        """
        audits = micro_steps < self._audit_steps and self._shards
        self._schedule.keeps_guard = audits or self._watches_aliases
        if self._watches_aliases:
            self._schedule.guard.watch()
        if not self._schedule.keeps_guard:
            self._audit = None
            if self._ran_uncompiled and is_compiled(self._module):
                refuse_compiled(self._module)
                self._schedule.model_states.release_cache()  # see Note [What the uncompiled micro batch leaves] in compiled.py
            self._ran_uncompiled = False
            return nullcontext()
        self._ran_uncompiled = True
        if audits and self._audit is None:
            self._audit = Audit(self._schedule.model_states)
        return uncompiled(self._audit if self._audit is not None else nullcontext())

    def look_for_aliases(self, *, on_host: bool) -> None:
        """Looks for aliases that forwards took. The ranks agree on what follows from those of the first.

        Args:
            on_host: the host updates parameters.

        Raises:
            BadInput: when one is kept on any rank, at stage 3, and for an array of numpy's whose values would get old.
        """
        schedule = self._schedule
        if on_host or self._shards:
            self.aliases.require_no_arrays()
        if not self._watches_aliases:
            if schedule.hooked and not schedule.has_aliases:
                self.aliases.check()
            return
        name = schedule.guard.end_watch()
        states = schedule.model_states
        found = torch.tensor(float(schedule.has_aliases or bool(name)), device=states.arena.device)
        if states.comm.world_size > 1:
            states.comm.all_reduce_max(found)
        schedule.has_aliases = bool(found)
        if schedule.has_aliases and self._shards:
            raise kept_alias(name)
        self._watches_aliases = False

    def close(self) -> None:
        """Forgets the parameters."""
        self._audit = None


def _own_tensors(schedule: Schedule, step: OptimizerStep | None) -> Iterator[torch.Tensor]:
    """The engine's tensors that may lie in the parameters' memory."""
    for unit in schedule.model_states.units:
        yield unit.param_slot.tensor
        for flat in unit.flats():
            yield from (flat.full, flat.shard, flat.part)
        yield from (one for one in (unit.master, unit.param_16bit) if one is not None)
        hosts = unit.offloaded.buffers if unit.offloaded is not None else ()
        slices = step.slices[unit.index] if step is not None else []
        for part in [*slices, *(part for buffers in hosts for part in buffers.slices)]:
            yield from (one for one in (part.master, part.param) if one is not None)
        yield from (one for buffers in hosts if (one := buffers.param) is not None)
