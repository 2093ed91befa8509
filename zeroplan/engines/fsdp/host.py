"""Host memory of FSDP 1's CPUOffload on one rank. See Note [CPUOffload of FSDP 1]."""

from __future__ import annotations

from zeroplan.core.buffers import Buffer, Phase, Place
from zeroplan.engines.fsdp.rank import FsdpRank
from zeroplan.engines.simulation import HostPhase
from zeroplan.simulate.allocator.pinned_host import pinned_bytes


def host_phases(rank: FsdpRank) -> tuple[HostPhase, ...]:
    """Return the host's peaks by phase; none where nothing is offloaded. Parts are pinned at the first forward."""
    if not rank.offload:
        return ()
    parts = [rank.bytes_of(unit) * rank.shard(unit) for unit in rank.units]
    pinned = pinned_bytes(parts)
    states: dict[tuple[Buffer, Place], int] = {}
    for domain, p in rank.stepped():
        for buffer, nbytes in rank.states(domain, p):
            states[buffer, Place.DRAM] = states.get((buffer, Place.DRAM), 0) + nbytes
    wrapped = {(Buffer.PARAM_SHARD, Place.DRAM): sum(parts)}
    running = {(Buffer.PARAM_SHARD, Place.PINNED): pinned, (Buffer.GRAD_SHARD, Place.PINNED): pinned} | states
    return (
        HostPhase.of(Phase.INIT, wrapped),
        *(HostPhase.of(phase, running) for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.STEP)),
    )
