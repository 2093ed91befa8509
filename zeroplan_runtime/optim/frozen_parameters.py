"""Parameters that are frozen while an engine has them, and thawed again.

A step passes over what torch's optimizers would pass over for want of a gradient: a frozen parameter keeps its value and its
states, and counts the steps that it has missed, by which its bias corrections lag. Its memory, and its zeros in the reductions,
stay. A parameter that is trained, but that no loss has reached, counts as one with a gradient of zeros, as everywhere.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from zeroplan.core.arena.layout_setup import RuntimeSetup
from zeroplan.core.errors import BadInput
from zeroplan.core.optimizer_row import RuntimeKernel
from zeroplan_runtime.unit_state import UnitState

#: Index of a unit, and a parameter's position in its trainable flat.
Place = tuple[int, int]


class FrozenParameters:
    """The parameters of `units` that the engine trains, and which of them a step passes over.

    Attributes:
        passed_over: those that the present step leaves as they are.
        missed: by place the applied steps that a parameter has missed.
    """

    def __init__(self, units: Iterable[UnitState]) -> None:
        self._units = list(units)
        self._trained: list[tuple[Place, nn.Parameter]] = [
            ((unit.index, i), param)
            for unit in self._units
            if unit.trainable is not None
            for i, param in enumerate(unit.trainable.params)
        ]
        self._seen: set[Place] = set()
        self.passed_over: frozenset[Place] = frozenset()
        self.missed: dict[Place, int] = {}

    def look(self) -> bool:
        """Notes which are frozen now, at the start of a forward or backward, or at a step.

        Returns:
            Whether one was frozen since the last step.
        """
        with torch._C.DisableTorchFunctionSubclass():
            self._seen.update(place for place, param in self._trained if not param.requires_grad)
        return bool(self._seen)

    def choose(self) -> int:
        """Decides which ones the coming step passes over: those seen frozen that have got no gradient.

        Returns:
            A hash of them, by which ranks compare; 0 for none.
        """
        self.look()
        unreached = (place for place in self._seen if not self._units[place[0]].grads.arrived[place[1]])
        self.passed_over = frozenset(unreached)
        return zlib.crc32(repr(sorted(self.passed_over)).encode()) if self.passed_over else 0

    def require_separate(self, kernel: RuntimeKernel, setup: RuntimeSetup) -> None:
        """Checks that the optimizer can pass over one parameter.

        Raises:
            BadInput: where its update depends on others.
        """
        if setup.block > 1:
            why = "its states are in blocks that parameters share"
        elif setup.compresses or setup.takes_norms or kernel.carried:
            why = "the optimizer steps all of a group by one state, norm or message"
        else:
            return
        raise BadInput(
            f"{self.name_of(min(self.passed_over))!r} was trained when the engine was made and is frozen now, and {why}",
            where="engine.step",
            remedy="call engine.destroy(keep_parameters=True) and initialize again",
        )

    def stepped(self) -> None:
        """Notes that the updates of the step have been issued."""
        self._seen.clear()

    def was_applied(self) -> None:
        """Counts an applied step for those that have missed it."""
        for place in self.passed_over:
            self.missed[place] = self.missed.get(place, 0) + 1

    def name_of(self, place: Place) -> str:
        """Returns a parameter's full name."""
        return self._units[place[0]].name_of(place[1])

    def state_dict(self) -> dict[str, int]:
        """Returns for a checkpoint the steps that parameters have missed, by name."""
        return {self.name_of(place): missed for place, missed in self.missed.items()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continues from :meth:`state_dict`."""
        self._seen.clear()
        self.passed_over = frozenset()
        self.missed = {place: state[name] for place, _ in self._trained if state.get(name := self.name_of(place))}
