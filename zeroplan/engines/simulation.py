"""The result of simulating one configuration: the GPU's timelines on the ranks that differ, and the host by phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from zeroplan.core.buffers import Buffer, Phase, Place
from zeroplan.simulate.steady_state import steady_run

if TYPE_CHECKING:
    from zeroplan.simulate.allocator.config import AllocatorConfig
    from zeroplan.simulate.timeline import Timeline

#: Marks by the phase that they end.
_PHASE_OF_MARK = {
    "model": Phase.LOAD,
    "init": Phase.INIT,
    "fwd": Phase.FORWARD,
    "bwd": Phase.BACKWARD,
    "eval": Phase.EVALUATION,
    "gen": Phase.GENERATION,
    "save": Phase.SAVE,
}


def phase_of_mark(name: str) -> Phase:
    """Return the phase that a mark ends: ``model``, ``init``, ``fwd``, ``bwd``, ``eval``, ``gen``, ``save``, or a step."""
    return _PHASE_OF_MARK.get(name, Phase.STEP)


#: Bytes on the host by what they are and where.
HostBytes = Mapping[tuple[Buffer, Place], int]


@dataclass(frozen=True, slots=True)
class HostPhase:
    """One rank's engine buffers on the host in one phase: bytes at its peak, and pinned bytes at its end.

    `alive` is what makes the peak, `kept` what is there at the phase's end; both add up to what they are of. `unmapped` are
    those pinned bytes that no device maps: ``mlock`` holds them, and not CUDA.
    """

    phase: Phase
    peak: int
    pinned: int
    alive: HostBytes = field(default_factory=dict)
    kept: HostBytes = field(default_factory=dict)
    unmapped: int = 0

    @classmethod
    def of(cls, phase: Phase, kept: HostBytes, passing: HostBytes | None = None) -> HostPhase:
        """Make a phase that keeps `kept` and at whose peak `passing` is there as well."""
        alive = dict(kept)
        for key, count in (passing or {}).items():
            alive[key] = alive.get(key, 0) + count
        pinned = sum(count for (_, place), count in kept.items() if place is Place.PINNED)
        return cls(phase, sum(alive.values()), pinned, alive, kept)


def with_pinned(phases: tuple[HostPhase, ...], buffer: Buffer, count: int) -> tuple[HostPhase, ...]:
    """Return a rank's phases with `count` pinned bytes more, from the first forward on."""
    there, more = {one.phase: one for one in phases}, {(buffer, Place.PINNED): count}
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.STEP):
        one = there.get(phase, HostPhase.of(phase, {}))
        there[phase] = replace(
            one,
            peak=one.peak + count,
            pinned=one.pinned + count,
            alive={**one.alive, **more},
            kept={**one.kept, **more},
        )
    return tuple(there.values())


@dataclass(frozen=True, slots=True)
class CheckpointPhase:
    """Saving, resuming or reading weights: bytes at its peak on the GPU (0: not told) and of the engine's on every rank's host.

    `host_once` are those on one rank's host beside. `inevitable`: reading weights counts where none are read, too, since the
    model is made on the host.
    """

    phase: Phase
    gpu: int
    host: int
    host_once: int = 0
    inevitable: bool = False


@dataclass(frozen=True, slots=True)
class HostRun:
    """The host's part of a simulation: `host` and `checkpoint` as of :class:`Simulation`, bytes on the GPU not told."""

    host: tuple[HostPhase, ...]
    checkpoint: tuple[CheckpointPhase, ...] = ()


@dataclass(frozen=True, slots=True)
class Simulation:
    """A run as it may go: on the rank that allocates the most, and wherever else it can come out otherwise.

    Attributes:
        timeline: the run of `rank`.
        rank: the rank that allocates the most.
        host: every rank's host by phase (all are alike).
        others: the runs of other ranks, which may reserve more, and the same rank's where data decide how it goes.
        checkpoint: saving and resuming, which a run need not do; the host's peak leaves them out unless the workload saves.
            Empty where not derived.
        moved: bytes of each checkpointed input that leaves for pinned memory, which the tape tells and no formula.
        least_reserved: where data decide, the least that the worst rank may reserve; None where they do not.
        other_lags: where the device's lag behind the host decides when freed blocks come back, the run of `rank` at the other
            end of what that lag may be; and runs that differ in what no measured run explains. Peaks are not those of these
            runs, but a plan that fits fits for them, too.
    """

    timeline: Timeline
    rank: int = 0
    host: tuple[HostPhase, ...] = field(default=())
    others: tuple[Timeline, ...] = field(default=())
    least_reserved: int | None = None
    other_lags: tuple[Timeline, ...] = field(default=())
    checkpoint: tuple[CheckpointPhase, ...] = field(default=())
    moved: tuple[int, ...] = field(default=())

    @property
    def runs(self) -> tuple[Timeline, ...]:
        """The timelines of `timeline` and `others`."""
        return (self.timeline, *self.others)

    @property
    def out_of_memory(self) -> bool:
        """Whether any rank's allocator could not serve a request."""
        return any(run.oom is not None for run in self.all_lags)

    @property
    def all_lags(self) -> tuple[Timeline, ...]:
        """Every timeline, those with another lag included."""
        return (*self.runs, *self.other_lags)

    def under(self, limit: int, config: AllocatorConfig | None = None, *, device_memory: int | None = None) -> Simulation:
        """Return the same run where each device gives the allocator `limit` bytes; see :meth:`Timeline.under`."""
        return self._of([run.under(limit, config, device_memory=device_memory) for run in self.all_lags])

    def steady_under(
        self, limit: int, config: AllocatorConfig | None = None, *, device_memory: int | None = None
    ) -> Simulation | None:
        """This run under `limit` bytes, repeated until it is steady (simulate/steady_state.py); None if a rank's run never is.

        Where the device's lag is uncertain no two steps are timed alike, so the last step has to take and return no segment
        at all. With expandable segments a run only has to get through: pages between blocks can be returned.
        """
        steady: list[Timeline] = []
        for run in self.all_lags:
            found = steady_run(run, limit, config, device_memory=device_memory)
            through = found.quiet if self.other_lags else found.steady
            if config is not None and config.expandable_segments:
                through = found.timeline.oom is None
            if not through:
                return None
            steady.append(found.timeline)
        return self._of(steady)

    def _of(self, all_lags: list[Timeline]) -> Simulation:
        """Return a copy with other timelines in place of :attr:`all_lags`."""
        first, last = 1, len(self.runs)
        return replace(self, timeline=all_lags[0], others=tuple(all_lags[first:last]), other_lags=tuple(all_lags[last:]))

    @property
    def peak_allocated(self) -> int:
        """The most that any rank allocates."""
        return max(run.peak_allocated for run in self.runs)

    @property
    def peak_reserved(self) -> int:
        """The most that any rank reserves, which need not be the one that allocates the most."""
        return max(run.peak_reserved for run in self.runs)

    def held_after(self, phase: Phase) -> int | None:
        """The most that any rank holds at the last end of a phase; None where the run did not come so far."""
        last = [[mark.allocated for mark in run.marks if phase_of_mark(mark.name) is phase][-1:] for run in self.runs]
        return max((allocated for one in last for allocated in one), default=None)

    def phases(self) -> dict[str, int]:
        """Peak allocated bytes by phase, on the rank where it is highest, saving and resuming included."""
        peaks: dict[str, int] = {}
        for run in self.runs:
            for mark in run.marks:
                phase = phase_of_mark(mark.name).value
                peaks[phase] = max(peaks.get(phase, 0), mark.peak)
        return peaks | {one.phase.value: one.gpu for one in self.checkpoint if one.gpu and one.phase.value not in peaks}
