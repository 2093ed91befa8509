"""One rank's host memory by phase: the model that is handed over, and what the Arena keeps there."""

from __future__ import annotations

from zeroplan.core.buffers import Phase, Place
from zeroplan.core.layout import Layout, runtime_buffers
from zeroplan.engines.simulation import HostPhase


def host_phases(layout: Layout, model: int) -> tuple[HostPhase, ...]:
    """The host's peaks. `model` are the bytes of the model in host memory, as the user makes it.

    The Arena takes all that stands on the host before the first parameter moves; the parameters then leave one by one.
    """
    rows = [row for row in runtime_buffers(layout) if row.stands]
    pinned = sum(row.bytes for row in rows if row.place is Place.PINNED)
    kept = pinned + sum(row.bytes for row in rows if row.place is Place.DRAM)
    training = tuple(HostPhase(phase, kept, pinned) for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.STEP))
    return (HostPhase(Phase.LOAD, model, 0), HostPhase(Phase.INIT, model + kept, pinned), *training)
