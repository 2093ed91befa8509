"""Copies values that the user writes into parameters to the masters and shards, which the optimizer and all-gathers read.

The optimizer updates the fp32 masters and this rank's shards. Where these have separate memory, a value that the user writes
into a parameter (``p.mul_(0.9)`` under ``torch.no_grad()``, ``load_state_dict``) would be lost at the next step. Autograd's
version counters tell which parameters were written since the last check; the engine's own updates do not change them. Elements
that have their old value keep their masters in full precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from zeroplan.core.errors import BadInput
from zeroplan_runtime.local_tensors import local_of, version_of
from zeroplan_runtime.model_states import ModelStates
from zeroplan_runtime.unit_state import PlacedParam, UnitState


class _Place(NamedTuple):
    """One parameter and its masters and shards that have separate memory."""

    unit: UnitState
    placed: PlacedParam
    copies: list[torch.Tensor]


class ParameterWrites:
    """Finds the user's writes to the parameters of `model_states`. Every rank must write the same values.

    `before` is called before masters or shards change.
    """

    def __init__(self, model_states: ModelStates, before: Callable[[], None]) -> None:
        self._model_states, self._before = model_states, before
        units = model_states.units
        self._trained = [p for unit in units if unit.trainable is not None for p in unit.trainable.params]
        self._places = [place for unit in units for place in _places(unit)]
        self._watched = [place.placed.param for place in self._places]
        self._of_unit: dict[UnitState, list[int]] = {}
        for i, place in enumerate(self._places):
            self._of_unit.setdefault(place.unit, []).append(i)
        self._versions: list[int] = []
        self._exported: set[int] = set()  # those whose memory was handed out
        self.forget()

    def forget(self) -> None:
        """Ignores the writes so far."""
        with torch._C.DisableTorchFunctionSubclass():
            self._versions = [version_of(param) for param in self._watched]

    def free(self) -> None:
        """Drops the masters and shards, so that their memory is freed; writes are not found any more."""
        self._places.clear()
        self._watched.clear()
        self._trained.clear()
        self._of_unit.clear()
        self._exported.clear()
        self._versions = []

    def stepped(self) -> None:
        """Marks every trained parameter as changed by the optimizer, so that autograd refuses graphs from before the step."""
        torch.autograd.graph.increment_version(self._trained)
        self.forget()

    @torch.no_grad()
    def keep(self) -> None:
        """Copies the user's writes since the last call to masters and shards.

        Raises:
            BadInput: when a written parameter's master or shard is in a file, or updates are delayed.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for i in self._exported:
                self._keep_exported(i)
            versions = [version_of(param) for param in self._watched]
            if versions == self._versions:
                return
            before, self._versions = self._versions, versions
            for place, old, new in zip(self._places, before, versions, strict=True):
                if old != new:
                    self._keep_one(place)

    @torch.no_grad()
    def keep_unit(self, unit: UnitState) -> None:
        """:meth:`keep` for what the forward of `unit` has written into its parameters."""
        for i in self._of_unit.get(unit, ()):
            if i in self._exported:
                self._keep_exported(i)
            version = version_of(self._watched[i])
            if version != self._versions[i]:
                self._versions[i] = version
                self._keep_one(self._places[i])

    def exported(self, unit: UnitState, name: str) -> None:
        """Notes that the memory of the parameter `name` of `unit` is handed out, as an array or by dlpack.

        Writes to it change no version, so its values are compared from then on, where they are current.

        Raises:
            BadInput: where its master or shard is in a file, has a delayed update, or is rounded anew.
        """
        for i in self._of_unit.get(unit, ()):
            place = self._places[i]
            if place.placed.name != name:
                continue
            states = self._model_states
            narrow = states.float8_gathers is not None and states.float8_gathers.takes(unit)
            if states.quantiser is not None or narrow or states.setup.delayed_update or not place.copies:
                raise BadInput(
                    f"an array or dlpack would share memory with parameter {name!r}, and writes to it would be lost",
                    where="float8_gathers" if narrow else "offload" if states.quantiser is None else "quantize_training",
                    remedy="take it of a clone() of the parameter",
                )
            self._exported.add(i)

    def _keep_exported(self, i: int) -> None:
        place = self._places[i]
        slot, offloaded = place.unit.param_slot, place.unit.offloaded
        if slot.holder is place.unit and slot.is_current and not (offloaded is not None and offloaded.update_pending):
            self._keep_one(place)

    def _keep_one(self, place: _Place) -> None:
        param, name, flat, position = place.placed
        if self._model_states.quantiser is not None:
            raise rounded_weights(name)
        if place.unit.param_slot.is_rounded and place.unit.param_slot.holder is place.unit:
            raise BadInput(
                f"parameter {name!r} was written to where it is gathered in 8 bits",
                where="float8_gathers",
                remedy="write within engine.gathered(unit)",
            )
        if not place.copies or self._model_states.setup.delayed_update:
            raise BadInput(
                f"parameter {name!r} was written to, but its master or shard is in a file or has a delayed update",
                where="offload",
                remedy="write before initialize(), or use engine.load_checkpoint()",
            )
        self._before()
        for copy in place.copies:
            self._model_states.fill_shard(copy, flat.layout, position, local_of(param), changed=True)


def rounded_weights(name: str) -> BadInput:
    """The error for a write to a weight that is rounded from its master."""
    return BadInput(
        f"parameter {name!r} was written to, but its weights are rounded anew from the masters",
        where="quantize_training",
        remedy="write before initialize(), or use engine.load_checkpoint()",
    )


def _places(unit: UnitState) -> Iterator[_Place]:
    """The parameters of `unit` with a separate master or shard; `copies` is empty where that is in a file."""
    for flat in unit.flats():
        in_files = unit.in_files or (flat is unit.trainable and unit.master is None)
        kept = [flat.shard, unit.master] if flat is unit.trainable else [flat.shard]
        copies = [] if in_files else [one for one in kept if one is not None and not _shares_memory(one, flat.full)]
        if copies or in_files:
            yield from (_Place(unit, placed, copies) for placed in unit.placed() if placed.flat is flat)


def _shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
