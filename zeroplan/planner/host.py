"""A node's host memory by phase: each rank's process, the engine's buffers, and what makes the peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from zeroplan.core.buffers import Buffer, Phase, Place
from zeroplan.core.plan import CpuMemory, HostBuffer, HostPeak
from zeroplan.core.saving import Saving
from zeroplan.core.workload import Workload
from zeroplan.engines.simulation import CheckpointPhase, HostBytes, HostPhase, HostRun, Simulation

#: For saving, resuming and reading weights: the phase whose process and standing buffers are there meanwhile.
_LOADED_BY = {Phase.SAVE: Phase.STEP, Phase.RESUME: Phase.INIT, Phase.WEIGHTS: Phase.LOAD}


def host_memory(
    simulation: Simulation | HostRun,
    rss: Mapping[Phase, int],
    *,
    ranks: int,
    workload: Workload,
    techniques: Mapping[Phase, HostBytes],
) -> CpuMemory:
    """Return the host's part of a plan.

    Args:
        simulation: the engine's buffers by phase, on one rank.
        rss: resident bytes of one rank's process at the end of each phase, without those buffers.
        ranks: ranks of one node.
        workload: says whether pretrained weights are read, whose phase counts in place of loading, and whether the run saves.
        techniques: what they keep beside the engine, on one rank, by phase.
    """
    on_host = {one.phase: one for one in simulation.host}
    peaks = []
    for phase, base in rss.items():
        engine = on_host.get(phase)
        alive = Counter(engine.alive if engine is not None else {})
        alive.update(techniques.get(phase, {}))
        peaks.append(_host_peak(phase, base, alive, ranks))
    counted = list(peaks)
    for one in simulation.checkpoint:
        before = _LOADED_BY[one.phase]
        peak = _checkpoint(one, rss[before], on_host.get(before), ranks)
        peaks.append(peak)
        made = one.phase is Phase.WEIGHTS and (one.inevitable or not workload.loop.from_scratch)
        if made or (one.phase is Phase.SAVE and workload.has(Saving)):
            counted.append(peak)
    most = max(counted, key=lambda peak: peak.bytes)
    return CpuMemory(
        per_node=most.bytes,
        pinned=max((one.pinned for one in simulation.host), default=0) * ranks,
        phases={peak.phase: peak.bytes for peak in peaks},
        peak_phase=most.phase,
        peaks=tuple(peaks),
    )


def _checkpoint(one: CheckpointPhase, base: int, before: HostPhase | None, ranks: int) -> HostPeak:
    """The peak while a checkpoint or weights are read or written: what was there before, and the checkpoint's bytes."""
    alive = dict(before.kept) if before is not None else {}
    buffer = Buffer.HOST_MODEL if one.phase is Phase.WEIGHTS else Buffer.HOST_CHECKPOINT
    alive[buffer, Place.DRAM] = one.host - sum(alive.values())
    return _host_peak(one.phase, base, alive, ranks, once=(buffer, one.host_once))


def _host_peak(
    phase: Phase, base: int, alive: HostBytes, ranks: int, *, once: tuple[Buffer, int] = (Buffer.HOST_CHECKPOINT, 0)
) -> HostPeak:
    """The peak of a phase. `base` and `alive` are bytes of each rank, `once` a buffer's bytes on one rank alone."""
    found = {(Buffer.HOST_PROCESS, Place.DRAM): base * ranks}
    for key, count in alive.items():
        found[key] = count * ranks
    if once[1]:
        key = (once[0], Place.DRAM)
        found[key] = found.get(key, 0) + once[1]
    held = sorted(((count, buffer, place) for (buffer, place), count in found.items() if count), reverse=True)
    return HostPeak(
        phase=phase.value,
        bytes=sum(found.values()),
        pinned=sum(count for count, _, place in held if place is Place.PINNED),
        alive=tuple(HostBuffer(buffer=buffer.value, place=place.value, bytes=count) for count, buffer, place in held),
    )
