"""Finds aliases of parameters that a forward took while the parameters were not guarded, once the graphs are gone.

A tensor that shares memory with parameters counts as one more use of their storage. So each step compares the number of uses
with the one that the engine itself has, which costs a few microseconds. Where there are more, Python's garbage collector lists
the tensors that exist (about a tenth of a second), and aliases among them are guarded from then on, or refused at stage 3.

At stage 3 a unit's memory is another unit's as soon as its forward has ended, and a tensor that the forward has left there
could be read and dropped before the step. A view refers to its parameter, as the graph does, but a unit's forwards leave as
many of the graph's references each time. So the references before and after each forward of a unit are compared (a tenth of a
microsecond a parameter), and where it leaves a number that is new for it, the tensors are listed and aliases among them are
guarded: a read of one is refused while its unit is not gathered.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable

import torch
from torch import nn

from zeroplan.core.errors import BadInput
from zeroplan_runtime.checks import kept_alias
from zeroplan_runtime.local_tensors import local_of
from zeroplan_runtime.model_states import ModelStates
from zeroplan_runtime.parameter_guard import ParameterGuard, has_memory
from zeroplan_runtime.unit_state import UnitState

_use_count = getattr(torch._C, "_storage_Use_Count", None)
_references_to = getattr(torch.Tensor, "_use_count", None)
#: Seconds. Little beside a search.
_A_MOMENT = 0.005


class ParameterAliases:
    """Watches the memory of the parameters of `model_states`, guarded by `guard`. Make it when the engine is whole.

    Args:
        model_states: the units.
        guard: guards the parameters.
        own: the engine's own tensors; those in other memory do no harm.
    """

    def __init__(self, model_states: ModelStates, guard: ParameterGuard, own: Iterable[torch.Tensor]) -> None:
        self._model_states, self._guard = model_states, guard
        flats = [flat for unit in model_states.units for flat in unit.flats()]
        blocks = [flat.full._base for flat in flats]  # of which each is a part
        params = [param for flat in flats for param in flat.params]
        self._own = {id(tensor) for tensor in (*own, *blocks, *params, *map(local_of, params))}
        #: Addresses of storages by those of their memory: the storages themselves end with the engine's tensors.
        self._storages = {one.data_ptr(): one._cdata for one in (flat.full.untyped_storage() for flat in flats)}
        self._ordinary = {self._uses()}  # numbers of uses without an alias that is not guarded
        #: References to each unit's parameters that its forwards have left without an alias.
        self._left: dict[UnitState, set[int]] = {
            unit: {0} for unit in model_states.units if not unit.is_root and model_states.setup.shards_params
        }
        self._before: dict[UnitState, int] = {}  # references when the forward began
        self._guarded: dict[UnitState, tuple[int, int]] = {}  # of the last guarded forward: these, and how many more it left

    def check(self) -> None:
        """Looks for new aliases. Call it when the graphs are gone, which save aliases, too.

        Raises:
            BadInput: for one of a parameter that is not the root's, at stage 3.
        """
        if self._uses() in self._ordinary:
            return
        time.sleep(_A_MOMENT)  # a thread of the transport may not have let go of a collective that has ended
        if self._uses() in self._ordinary:
            return
        if self._model_states.setup.shards_params and self._search():
            gc.collect()  # it may be garbage in a cycle
        found = self._search()
        for alias in found:
            unit, name = self._owner(alias)
            if self._model_states.setup.shards_params and not unit.is_root:
                raise kept_alias(name)
            self._guard.guard_alias(alias, unit.index, name)
        if not found:
            self._ordinary.add(self._uses())  # now: what ended meanwhile would hide as many aliases later

    def begin_forward(self, unit: UnitState) -> None:
        """Counts the references to the parameters of `unit`, before its forward."""
        if (known := self._left.get(unit)) is None:
            return
        now = self._before[unit] = _references(unit)
        if (guarded := self._guarded.pop(unit, None)) is not None:
            before, left = guarded
            known.add(left - (now - before))  # the graph is gone, but its first one has left what later ones use

    def end_forward(self, unit: UnitState, *, guarded: bool) -> None:
        """Guards the aliases that the forward of `unit` has left.

        Args:
            unit: the unit, whose parameters are still gathered.
            guarded: its parameters were guarded in the forward, so that all aliases are.
        """
        before = self._before.pop(unit, None)
        if before is None:
            return
        left, known = _references(unit) - before, self._left[unit]
        if guarded:
            self._guarded[unit] = before, left
        if left in known:
            return
        begin = unit.param_slot.tensor.data_ptr()
        end = begin + unit.param_slot.tensor.nbytes
        found = [] if guarded else [one for one in self._search() if begin <= one.data_ptr() < end]
        for alias in found:
            self._guard.guard_alias(alias, unit.index, unit.owner_of(alias)[1])
        if not found:
            known.add(left)

    def require_no_arrays(self) -> None:
        """Checks that no array of numpy's shares memory with a parameter.

        Raises:
            BadInput: with the parameter's name.
        """
        name = next(iter(self._guard.arrays.values()), None)
        if name is not None:
            raise BadInput(
                f"an array of numpy's shares memory with parameter {name!r}, and would show other values after the step",
                where="engine.step",
                remedy="keep a copy of it",
            )

    def _uses(self) -> int:
        if _use_count is None:
            return 0
        uses: int = sum(_use_count(storage) for storage in self._storages.values())
        return uses - len(self._guard.aliases)

    def _search(self) -> list[torch.Tensor]:
        """The aliases that are not guarded."""
        found = []
        with torch._C.DisableTorchFunctionSubclass():
            for one in gc.get_objects():
                kind = type(one)
                if kind is not torch.Tensor and not issubclass(kind, nn.Parameter):
                    continue
                if (
                    id(one) not in self._own
                    and one not in self._guard.aliases
                    and has_memory(one)
                    and one.numel()
                    and _address(one) in self._storages
                ):
                    found.append(one)
        return found

    def _owner(self, alias: torch.Tensor) -> tuple[UnitState, str]:
        """Returns a unit and a parameter of it whose memory `alias` begins in; of several units in turn the first."""
        unit = max(self._model_states.units, key=lambda unit: unit.owner_of(alias)[0])
        return unit, unit.owner_of(alias)[1]


def _address(tensor: torch.Tensor) -> int:
    """Returns where the memory of `tensor` begins; 0 for one that a compiler made without any, which torch will not tell of."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return 0


def _references(unit: UnitState) -> int:
    """The references to the parameters of `unit`: by tensors that are views of them, by the graph, by Python."""
    if _references_to is None:
        return 0
    with torch._C.DisableTorchFunctionSubclass():
        return sum(_references_to(param) for flat in unit.flats() for param in flat.params)
