"""The order in which units are needed, as it has been seen: what to gather next, and what to read ahead from files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise

from zeroplan_runtime.offload.param_swapper import FetchRequest
from zeroplan_runtime.unit_state import ParamSlot, UnitState


class ExecutionOrder:
    """Which unit followed each unit in the last forward (`next_in_forward`) and in the last backward (`next_in_backward`).

    Both begin with the order in which the modules are defined.
    """

    def __init__(self, units: Sequence[UnitState]) -> None:
        self.units = units
        self.next_in_forward = dict(pairwise(units))
        self.next_in_backward = {later: earlier for earlier, later in pairwise(unit for unit in units if not unit.is_root)}

    def reads(
        self, unit: UnitState, slots: Iterable[ParamSlot], *, backward: bool, grad_enabled: bool
    ) -> Iterator[FetchRequest]:
        """The units in files that will be brought into their slots from `unit` on, as far as can be told.

        Args:
            unit: the first, whether it is brought or lies in its slot.
            slots: what holds which unit now.
            backward: the backward has begun.
            grad_enabled: a backward follows this forward.
        """
        held = {slot.name: (slot.holder, slot.is_current) for slot in slots}
        for upcoming in self._ahead(unit, backward=backward, grad_enabled=grad_enabled):
            slot = upcoming.param_slot.name
            holder, fresh = held[slot]
            if upcoming.in_files and not (holder is upcoming and fresh):
                yield FetchRequest(upcoming.name, frozen=upcoming.frozen is not None and holder is not upcoming)
            held[slot] = (upcoming, True)

    def _ahead(self, unit: UnitState, *, backward: bool, grad_enabled: bool) -> Iterator[UnitState]:
        """The units in the order in which they will be needed. What follows a backward is not known: an update may."""
        most = len(self.units)
        turn = unit
        if not backward:
            for turn in islice(_chain(unit, self.next_in_forward), most):
                yield turn
            if not grad_enabled:
                yield from islice(_chain(self.units[0], self.next_in_forward), most)
                return
        else:
            yield unit
        back = islice(_chain(self.next_in_backward.get(turn), self.next_in_backward), most)
        yield from (one for one in back if one.gathers_in_backward)


def _chain(unit: UnitState | None, following: Mapping[UnitState, UnitState]) -> Iterator[UnitState]:
    while unit is not None:
        yield unit
        unit = following.get(unit)
