"""Values that somebody else than the optimizer writes into parameters: they reach what the optimizer and the gathers read.

What is trained are the fp32 masters and this rank's shards. Where these are memory of their own, a value that is written into a
parameter (``p.mul_(0.9)`` under ``torch.no_grad()``, ``load_state_dict``) would be gone after the next step. Autograd's version
counters tell which parameters were written since the last look; the engine's own updates do not count there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from zeroplan.core.errors import BadInput
from zeroplan_runtime.model_states import ModelStates
from zeroplan_runtime.unit_state import FlatParam, UnitState


class _Place(NamedTuple):
    """One parameter, and what is kept of it in memory of its own."""

    param: nn.Parameter
    unit: UnitState
    flat: FlatParam
    position: int
    copies: list[torch.Tensor]


class ParameterWrites:
    """Looks for writes to the parameters of `model_states`. Every rank must write the same."""

    def __init__(self, model_states: ModelStates) -> None:
        self._model_states = model_states
        units = model_states.units
        self._trained = [p for unit in units if unit.trainable is not None for p in unit.trainable.params]
        self._places = [place for unit in units for place in _places(unit)]
        self._watched = [place.param for place in self._places]
        self._versions: list[int] = []
        self.forget()

    def forget(self) -> None:
        """Takes the parameters' present values for known."""
        with torch._C.DisableTorchFunctionSubclass():
            self._versions = [param._version for param in self._watched]

    def stepped(self) -> None:
        """The optimizer has written every parameter: autograd refuses graphs that saved one as it was before."""
        torch.autograd.graph.increment_version(self._trained)
        self.forget()

    @torch.no_grad()
    def keep(self) -> None:
        """Copies what was written into parameters to where it is read from.

        Raises:
            BadInput: where that is a file, or an update of it may be on its way.
        """
        with torch._C.DisableTorchFunctionSubclass():
            versions = [param._version for param in self._watched]
            if versions == self._versions:
                return
            before, self._versions = self._versions, versions
            for place, old, new in zip(self._places, before, versions, strict=True):
                if old != new:
                    self._keep_one(place)

    def _keep_one(self, place: _Place) -> None:
        if not place.copies or self._model_states.setup.delayed_update:
            name = place.unit.layout.shape.params[place.flat.layout.params[place.position]].name
            raise BadInput(
                f"parameter {name!r} was written to, but what is trained of it is in a file or behind a delayed update",
                where="offload",
                remedy="write before initialize(), or use engine.load_checkpoint()",
            )
        for copy in place.copies:
            self._model_states.fill_shard(copy, place.flat.layout, place.position, place.param)


def _places(unit: UnitState) -> Iterator[_Place]:
    """The parameters of `unit` of which more than `full` is kept; without copies where that is a file."""
    for flat in unit.flats():
        in_files = unit.in_files or (flat is unit.trainable and unit.master is None)
        kept = [flat.shard, unit.master] if flat is unit.trainable else [flat.shard]
        copies = [] if in_files else [one for one in kept if one is not None and not _shares_memory(one, flat.full)]
        if copies or in_files:
            yield from (_Place(param, unit, flat, i, copies) for i, param in enumerate(flat.params))


def _shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
