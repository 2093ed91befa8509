"""Which of torch's pipeline schedules the engine runs, with how many chunks a rank, and which micro batches they take."""

from __future__ import annotations

from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)

from zeroplan.core.errors import BadInput

WHERE = "engine.pipeline_schedule"
#: Those of one stage a rank, and those that take several.
TorchSchedule = PipelineScheduleSingle | PipelineScheduleMulti

_FOLDED = (ScheduleZBVZeroBubble, ScheduleDualPipeV)
_IN_ROUNDS = (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble)
_KNOWN = "GPipe, 1F1B or InterleavedZeroBubble, or with several chunks Interleaved1F1B, LoopedBFS, ZBVZeroBubble or DualPipeV"


def is_folded(kind: type[TorchSchedule]) -> bool:
    """Returns whether a rank has one stage from each end of the pipeline."""
    return issubclass(kind, _FOLDED)


def is_halved(kind: type[TorchSchedule]) -> bool:
    """Returns whether backwards run in halves, some or all."""
    return issubclass(kind, (*_FOLDED, ScheduleInterleavedZeroBubble))


def chosen_schedule(kind: type[TorchSchedule] | str, chunks: int) -> type[TorchSchedule]:
    """Returns the class of a schedule.

    Args:
        kind: the class, or its name.
        chunks: the stages that a rank has.

    Raises:
        BadInput: for a schedule that is unknown or not run, and for other chunks than it has.
    """
    try:
        chosen: type[TorchSchedule] = get_schedule_class(kind) if isinstance(kind, str) else kind
    except ValueError:
        raise BadInput(f"torch has no schedule {kind!r}", where=WHERE, remedy=f"use {_KNOWN}") from None
    several = (*_FOLDED, ScheduleInterleaved1F1B, ScheduleLoopedBFS)
    if not isinstance(chosen, type) or not issubclass(
        chosen, (PipelineScheduleSingle, ScheduleInterleavedZeroBubble, *several)
    ):
        name = getattr(chosen, "__name__", repr(chosen))
        raise BadInput(f"{name} is not run by the engine", where=WHERE, remedy=f"use {_KNOWN}")
    if chunks < 1:
        raise BadInput(f"{chunks} chunks are none", where=WHERE, remedy="use chunks of 1 or more")
    if issubclass(chosen, PipelineScheduleSingle) and chunks > 1:
        what, remedy = "runs one stage a rank", "use Interleaved1F1B or LoopedBFS, or leave chunks out"
    elif issubclass(chosen, _FOLDED) and chunks != 2:
        what, remedy = "gives each rank two stages", "give chunks=2, and a model whose forward takes chunk"
    elif issubclass(chosen, several) and chunks == 1:
        what, remedy = (
            "is for several stages a rank",
            "give chunks, and a model whose forward takes chunk; or use 1F1B or GPipe",
        )
    else:
        return chosen
    raise BadInput(f"{chosen.__name__} {what}, and chunks is {chunks}", where=WHERE, remedy=remedy)


def require_micro_batches(kind: type[TorchSchedule], micros: int, ranks: int) -> None:
    """Refuses micro batches that a schedule over so many ranks does not take, with torch's own rules.

    Raises:
        BadInput: naming the numbers.
    """
    if issubclass(kind, Schedule1F1B) and micros < ranks:
        raise BadInput(
            f"{micros} micro batches are fewer than the {ranks} stages of 1F1B",
            where=WHERE,
            remedy=f"set gradient_accumulation_steps to {ranks} or more, or use GPipe",
        )
    if issubclass(kind, ScheduleDualPipeV) and micros < 2 * ranks:
        raise BadInput(
            f"{micros} micro batches are fewer than the {2 * ranks} stages of DualPipeV",
            where=WHERE,
            remedy=f"set gradient_accumulation_steps to {2 * ranks} or more, or use ZBVZeroBubble",
        )
    rounds = max(1, micros // ranks)
    if issubclass(kind, _IN_ROUNDS) and micros % rounds:
        raise BadInput(
            f"the {rounds} rounds of {kind.__name__} do not divide {micros} micro batches",
            where=WHERE,
            remedy=f"set gradient_accumulation_steps to a multiple of {ranks}",
        )
