"""DeepSpeed's allocations over a whole run: from a tape and a rank to what the caching allocator makes of them."""

from __future__ import annotations

from zeroplan.core.saving import Saving
from zeroplan.core.workload import TiledLoss
from zeroplan.engines.deepspeed.base import DeepSpeedSchedule
from zeroplan.engines.deepspeed.rank import DeepSpeedRank
from zeroplan.engines.deepspeed.stage0 import Stage1Bf16, stage0_schedule
from zeroplan.engines.deepspeed.stage3 import Stage3
from zeroplan.engines.deepspeed.stage12 import Stage12
from zeroplan.engines.player import Run, play
from zeroplan.simulate.recorder import Recorder
from zeroplan.tape.expanded import ExpandedTape
from zeroplan.techniques.table import blocks_of

#: Optimizer steps until peaks repeat: the first makes the states, the second runs with them (and at stage 3 with the
#: complete trace), the third meets the blocks that the second left in the allocator's cache.
STEPS_UNTIL_STEADY = 3


def stage_schedule(rank: DeepSpeedRank, tape: ExpandedTape, recorder: Recorder) -> DeepSpeedSchedule:
    """Return the schedule of the optimizer wrapper that DeepSpeed chooses for the rank's configuration."""
    if rank.stage == 3:
        return Stage3(rank, recorder, tape)
    if rank.full_fp32_grads:
        return Stage1Bf16(rank, recorder)
    if rank.stage in (1, 2):
        head = "lm_head" if rank.workload.technique(TiledLoss) else None
        tiled = next((at for at, module in enumerate(tape.modules) if module.name.rpartition(".")[2] == head), -1)
        return Stage12(rank, recorder, tiled)
    return stage0_schedule(rank, recorder)


def record_deepspeed(
    rank: DeepSpeedRank,
    tape: ExpandedTape,
    *,
    steps: int | None = None,
    skipped_steps: int = 0,
) -> Recorder:
    """Record every allocation and free of one rank's run, in order. See :func:`zeroplan.engines.player.play`.

    Args:
        tape: the tape of one micro batch, expanded for the workload's numbers.
        steps: optimizer steps to play; None for as many as differ.
        skipped_steps: leading steps that fp16's falling loss scale discards. Data decide how many, so it is an input.
    """
    recorder = Recorder()
    steps = STEPS_UNTIL_STEADY + skipped_steps if steps is None else steps
    run = Run(
        rank.grad_accum,
        steps,
        skipped_steps,
        rank.cublas_workspace,
        rank.workload.loop.detached_loss,
        saves=rank.workload.has(Saving),
        blocks=blocks_of(rank.workload, rank),
    )
    own_linear = rank.stage == 3 and rank.zero.stage3.memory_efficient_linear
    play(run, tape, recorder, stage_schedule(rank, tape, recorder), own_linear=own_linear)
    return recorder


def distinct_ranks(rank: DeepSpeedRank, most: int = 8) -> tuple[int, ...]:
    """Return the ranks that may need the most memory: rank 0 and others, at most `most` in all.

    At stages 1 and 2 a rank keeps the gradients of all parameters that its part touches, whole: the rank that touches the
    most has the highest allocated peak. Each rank's blocks have sizes of their own, which decides how they fragment the
    cache, so beyond those two the ranks stand for all others, evenly spaced. At other stages all ranks are alike.
    """
    ranks = rank.ranks
    if ranks == 1 or rank.stage not in (1, 2) or rank.full_fp32_grads:
        return (0,)
    if ranks <= most:
        return tuple(range(ranks))
    touched = [0] * ranks
    for group in rank.flat.each:
        alike = ranks // group.ranks
        for p, parts in group.slices.items():
            for part in parts:
                for neighbour in range(part.rank * alike, (part.rank + 1) * alike):
                    touched[neighbour] += rank.numel[p]
    first = [0, max(range(ranks), key=touched.__getitem__), ranks - 1]
    spaced = max(1, most - len(first))
    first += [round(i * ranks / (spaced + 1)) for i in range(1, spaced + 1)]
    return tuple(sorted(list(dict.fromkeys(first))[:most]))
