"""DeepSpeed's allocations over a whole run: from a tape and a job to what the caching allocator makes of them."""

from __future__ import annotations

from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.tape import ExpandedTape
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.deepspeed.groups import flat_group
from zeroplan.engines.deepspeed.job import Job, resolve
from zeroplan.engines.deepspeed.stage0 import Stage1Bf16, stage0_schedule
from zeroplan.engines.deepspeed.stage3 import Stage3
from zeroplan.engines.deepspeed.stage12 import Stage12
from zeroplan.engines.player import StageSchedule, play
from zeroplan.engines.script import Scripts
from zeroplan.simulate.allocator.config import AllocatorConfig
from zeroplan.simulate.recorder import Recorder, simulate
from zeroplan.simulate.timeline import Timeline


def stage_schedule(job: Job, tape: ExpandedTape, recorder: Recorder) -> StageSchedule:
    """The schedule of the wrapper that DeepSpeed chooses for the job."""
    if job.zero.stage == 3:
        return Stage3(job, recorder, tape)
    if job.full_fp32_grads:
        return Stage1Bf16(job, recorder)
    if job.zero.stage in (1, 2):
        return Stage12(job, recorder)
    return stage0_schedule(job, recorder)


def record_deepspeed(job: Job, tape: ExpandedTape, scripts: Scripts | None = None) -> Recorder:
    """Every allocation and free of one rank's run, in order. See :func:`zeroplan.engines.player.play`."""
    recorder = Recorder()
    own_linear = job.zero.stage == 3 and job.zero.memory_efficient_linear
    play(job, tape, recorder, stage_schedule(job, tape, recorder), own_linear=own_linear, scripts=scripts)
    return recorder


def distinct_ranks(job: Job, most: int = 8) -> tuple[int, ...]:
    """The ranks that may need the most, at most `most` of them, the first always.

    At stages 1 and 2 a rank keeps the gradients of all parameters that its part touches, whole: the one that touches the
    most has the highest allocated peak. Each rank's blocks have sizes of their own, which decides how they fragment the
    cache, so beyond those two the ranks stand for all others, evenly spaced. At other stages all ranks are alike.
    """
    if job.ranks == 1 or job.zero.stage not in (1, 2) or job.full_fp32_grads:
        return (0,)
    if job.ranks <= most:
        return tuple(range(job.ranks))
    zero = job.zero
    group = flat_group(
        job.trained,
        job.numel,
        job.ranks,
        width=job.param_bytes,
        round_robin=zero.round_robin_gradients,
        aligned=zero.parameter_alignment,
    )
    touched = [0] * job.ranks
    for p, parts in group.slices.items():
        for part in parts:
            touched[part.rank] += job.numel[p]
    first = [0, max(range(job.ranks), key=touched.__getitem__), job.ranks - 1]
    spaced = max(1, most - len(first))
    first += [round(i * job.ranks / (spaced + 1)) for i in range(1, spaced + 1)]
    return tuple(sorted(list(dict.fromkeys(first))[:most]))


def simulate_deepspeed(
    tape: ExpandedTape,
    workload: Workload,
    zero: ZeroConfig,
    layout: ParallelLayout,
    *,
    rank: int = 0,
    cublas_workspace: int = 0,
    device_memory: int | None = None,
    steps: int | None = None,
    skipped_steps: int = 0,
    zero_init: bool = True,
    config: AllocatorConfig | None = None,
    limit: int | None = None,
) -> Timeline:
    """One rank's memory over building the model, initialisation and as many steps as it takes until peaks repeat.

    Args:
        tape: the tape of one micro batch, expanded for the workload's numbers.
        workload: what is computed.
        zero: how it is sharded and moved.
        layout: how the ranks divide the work.
        rank: whose memory; see :func:`distinct_ranks`.
        cublas_workspace: bytes of one cuBLAS workspace on this GPU.
        device_memory: bytes of the GPU, which decides whether parameters are flattened there; None for enough.
        steps: optimizer steps to play; None for as many as differ.
        skipped_steps: leading steps that fp16's loss scale discards.
        zero_init: stage 3 builds the model under ``deepspeed.zero.Init``.
        config: settings of the caching allocator; torch's defaults if None.
        limit: bytes that the device can give the allocator; None never runs out.
    """
    job = resolve(
        tape,
        workload,
        zero,
        layout,
        rank=rank,
        cublas_workspace=cublas_workspace,
        device_memory=device_memory,
        steps=steps,
        skipped_steps=skipped_steps,
        zero_init=zero_init,
    )
    return simulate(record_deepspeed(job, tape), config, limit, device_memory=device_memory)
