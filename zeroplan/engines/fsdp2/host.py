"""Host memory of FSDP2's CPUOffloadPolicy on one rank.

Each sharded parameter is pinned, and so is each gradient, because a copy to the host that does not block gets pinned memory;
the optimizer's states are pageable. torch's fused and single-tensor optimizers need nothing more that lasts.
Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py, reset_sharded_param; _fsdp_collectives.py, foreach_reduce
"""

from __future__ import annotations

from zeroplan.core.buffers import Buffer, Phase, Place
from zeroplan.core.tape import ExpandedTape
from zeroplan.engines.base import Case
from zeroplan.engines.simulation import HostPhase
from zeroplan.engines.torch_step import torch_job
from zeroplan.simulate.allocator.pinned_host import pinned_bytes


def host_phases(case: Case, tape: ExpandedTape) -> tuple[HostPhase, ...]:
    """The host's peaks; none where nothing is offloaded."""
    if not case.zero.offloads_param:
        return ()
    job = torch_job(tape, case.workload, case.layout, sharded=True, cublas_workspace=0)
    trained = [count for count, on in zip(job.chunk, job.trainable, strict=True) if on]
    params = pinned_bytes(job.original_bytes * count for count in job.chunk)
    grads = pinned_bytes(job.original_bytes * count for count in trained)
    states: dict[tuple[Buffer, Place], int] = {}
    for domain, p in job.stepped():
        for buffer, nbytes in job.states(domain, p):
            states[buffer, Place.DRAM] = states.get((buffer, Place.DRAM), 0) + nbytes
    loaded = {(Buffer.PARAM_SHARD, Place.PINNED): params}
    with_states = loaded | {(Buffer.GRAD_SHARD, Place.PINNED): grads} | states
    return (
        *(HostPhase.of(phase, loaded) for phase in (Phase.LOAD, Phase.INIT)),
        # From the second step on, states are there throughout, and torch keeps the gradients' pinned blocks.
        *(HostPhase.of(phase, with_states) for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.STEP)),
    )
