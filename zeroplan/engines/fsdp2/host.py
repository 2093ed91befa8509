"""Host memory of FSDP2's CPUOffloadPolicy on one rank.

Each sharded parameter is pinned, and so is each gradient, because a copy to the host that does not block gets pinned memory;
the optimizer's states are pageable. torch's fused and single-tensor optimizers need nothing more that lasts.
Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py, reset_sharded_param; _fsdp_collectives.py, foreach_reduce
"""

from __future__ import annotations

from zeroplan.core.buffers import Buffer, Phase, Place
from zeroplan.engines.fsdp2.rank import Fsdp2Rank
from zeroplan.engines.simulation import HostPhase
from zeroplan.simulate.allocator.pinned_host import pinned_bytes


def host_phases(rank: Fsdp2Rank) -> tuple[HostPhase, ...]:
    """Return the host's peaks by phase; none where nothing is offloaded."""
    if not rank.offload:
        return ()
    params = pinned_bytes(rank.width(p) * count for p, count in enumerate(rank.chunks))
    grads = pinned_bytes(rank.original_bytes * rank.chunks[p] for p in rank.trained)
    states: dict[tuple[Buffer, Place], int] = {}
    for domain, p in rank.stepped():
        for buffer, nbytes in rank.states(domain, p):
            states[buffer, Place.DRAM] = states.get((buffer, Place.DRAM), 0) + nbytes
    loaded = {(Buffer.PARAM_SHARD, Place.PINNED): params}
    with_states = loaded | {(Buffer.GRAD_SHARD, Place.PINNED): grads} | states
    return (
        *(HostPhase.of(phase, loaded) for phase in (Phase.LOAD, Phase.INIT)),
        # From the second step on, states are there throughout, and torch keeps the gradients' pinned blocks.
        *(HostPhase.of(phase, with_states) for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.STEP)),
    )
