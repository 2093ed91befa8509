"""What a simulated run of one configuration tells: the GPU's timeline on the worst rank, and the host by phase."""

from __future__ import annotations

from dataclasses import dataclass, field

from zeroplan.core.buffers import Phase
from zeroplan.simulate.timeline import Timeline

#: Marks by the phase that they end.
_PHASE_OF_MARK = {"model": Phase.LOAD, "init": Phase.INIT, "fwd": Phase.FORWARD, "bwd": Phase.BACKWARD}


def phase_of_mark(name: str) -> Phase:
    """The phase that a mark ends: ``model``, ``init``, ``fwd``, ``bwd``, or a step."""
    return _PHASE_OF_MARK.get(name, Phase.STEP)


@dataclass(frozen=True, slots=True)
class HostPhase:
    """One rank's engine buffers on the host in one phase: bytes at its peak, and pinned bytes at its end."""

    phase: Phase
    peak: int
    pinned: int


@dataclass(frozen=True, slots=True)
class Simulation:
    """The run of the rank that needs the most, and every rank's host (all are alike)."""

    timeline: Timeline
    rank: int = 0
    host: tuple[HostPhase, ...] = field(default=())

    def phases(self) -> dict[str, int]:
        """Peak allocated bytes by phase."""
        peaks: dict[str, int] = {}
        for mark in self.timeline.marks:
            phase = phase_of_mark(mark.name).value
            peaks[phase] = max(peaks.get(phase, 0), mark.peak)
        return peaks
