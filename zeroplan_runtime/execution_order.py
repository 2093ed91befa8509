"""The order in which units run, recorded from the last forward and backward: what to unshard and to read from files next.

Note [Host waits]
    To unshard a unit whose update on the host is not done, or whose parameters are still to be read from a file, the host
    must wait. In the forward such a unit is therefore unsharded after the whole previous unit has been launched, so that the
    device has work meanwhile. No hook tells when a unit's backward has been launched, so in the backward the unit is
    unsharded before the previous unit: the device still has the work that was launched earlier. Which of the two happens
    depends only on where a unit's parameters rest, which is the same on all ranks, never on whether they have arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise

from zeroplan_runtime.offload.param_swapper import FetchRequest
from zeroplan_runtime.unit_state import ParamSlot, UnitState


class ExecutionOrder:
    """The unit that followed each unit in the last forward (`next_in_forward`) and in the last backward (`next_in_backward`).

    Both begin with the order in which the modules are defined, or with none where it `learns` which of the units there are.

    Attributes:
        left_out: units that the present step does not run. They keep their places in both orders.
    """

    def __init__(self, units: Sequence[UnitState], *, learns: bool = False) -> None:
        self.units = units
        self.left_out: frozenset[UnitState] = frozenset()
        defined = [] if learns else units
        self.next_in_forward = dict(pairwise(defined))
        self.next_in_backward = {later: earlier for earlier, later in pairwise(one for one in defined if not one.is_root)}

    def after_in_forward(self, unit: UnitState) -> UnitState | None:
        """The unit that is expected after `unit` in a forward."""
        return self._kept(self.next_in_forward, unit)

    def after_in_backward(self, unit: UnitState) -> UnitState | None:
        """The unit that is expected after `unit` in a backward."""
        return self._kept(self.next_in_backward, unit)

    def _kept(self, following: Mapping[UnitState, UnitState], unit: UnitState) -> UnitState | None:
        found = following.get(unit)
        for _ in self.left_out:  # the recorded order may have a loop
            if found is None or found not in self.left_out:
                break
            found = following.get(found)
        return found

    def of_forward(self) -> list[UnitState]:
        """Every unit, in the order in which the next forward will probably need them."""
        seen = dict.fromkeys(islice(_chain(self.units[0], self.next_in_forward), len(self.units)))
        return list(seen | dict.fromkeys(self.units))

    def reads(
        self, unit: UnitState, slots: Iterable[ParamSlot], *, backward: bool, grad_enabled: bool
    ) -> Iterator[FetchRequest]:
        """The reads from files that the unshards from `unit` on will need, in order, as far as they can be predicted.

        Args:
            unit: the unit that is needed now, whether or not its slot holds it already.
            slots: the parameter slots, as they are now.
            backward: the backward has begun.
            grad_enabled: a backward follows this forward.
        """
        held = {slot.name: (slot.holder, slot.is_current) for slot in slots}
        for upcoming in self._ahead(unit, backward=backward, grad_enabled=grad_enabled):
            if upcoming in self.left_out:
                continue
            slot = upcoming.param_slot.name
            holder, is_current = held[slot]
            if upcoming.in_files and not (holder is upcoming and is_current):
                yield FetchRequest(upcoming.name, frozen=upcoming.frozen is not None and holder is not upcoming)
            held[slot] = (upcoming, True)

    def _ahead(self, unit: UnitState, *, backward: bool, grad_enabled: bool) -> Iterator[UnitState]:
        """The units in the order in which they will be needed. Nothing is predicted past a backward: an update may follow."""
        limit = len(self.units)  # the recorded order may have a loop
        last = unit
        if not backward:
            for last in islice(_chain(unit, self.next_in_forward), limit):
                yield last
            if not grad_enabled:
                yield from islice(_chain(self.units[0], self.next_in_forward), limit)
                return
        else:
            yield unit
        in_backward = islice(_chain(self.next_in_backward.get(last), self.next_in_backward), limit)
        yield from (one for one in in_backward if one.gathers_in_backward)


def _chain(unit: UnitState | None, following: Mapping[UnitState, UnitState]) -> Iterator[UnitState]:
    while unit is not None:
        yield unit
        unit = following.get(unit)
