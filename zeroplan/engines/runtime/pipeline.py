"""The runtime's memory on a pipeline rank with one stage.

Note [The runtime on a stage]
    torch's schedule calls the engine for each micro batch of an accumulation: a forward counts as any, and the backward of the
    step's last micro batch is the one behind which the optimizer steps. The loss is what the program gives the schedule, here
    transformers' own; the engine's takes the place of a whole model's alone. Source: zeroplan_runtime/pipeline.py
"""

from __future__ import annotations

from zeroplan.core.layout import Layout
from zeroplan.core.pipeline_action import Do
from zeroplan.core.pipeline_order import PipelineOrder, schedule_of
from zeroplan.core.tape import ExpandedTape
from zeroplan.core.workload import DType
from zeroplan.engines.base import Case
from zeroplan.engines.pipeline import ModelChunk, PipelineEngineSchedule, PipelineRun, play_pipeline
from zeroplan.engines.pipeline_cut import cut
from zeroplan.engines.runtime.schedule import STEPS_UNTIL_STEADY, RuntimeSchedule
from zeroplan.simulate.recorder import Recorder


class RuntimeStageSchedule(RuntimeSchedule, PipelineEngineSchedule):
    """One stage's run. See Note [The runtime on a stage]."""

    def __init__(
        self, layout: Layout, tape: ExpandedTape, recorder: Recorder, backwards: int, *, cublas_workspace: int, makes_room: bool
    ) -> None:
        """`backwards`: those of a step, as far as they are played."""
        super().__init__(layout, tape, recorder, cublas_workspace=cublas_workspace, makes_room=makes_room)
        self._backwards, self._done = backwards, 0

    def backward_begin(self, boundary: bool) -> None:
        """Begin a micro batch's backward; a step follows the last one."""
        self._done += 1
        super().backward_begin(self._done % self._backwards == 0)

    def backward_end(self, boundary: bool) -> None:
        """Reduce what is left and, before a step, free the slots."""
        super().backward_end(self.boundary)


def record_stage(case: Case, layout: Layout, tape: ExpandedTape, *, makes_room: bool) -> Recorder:
    """Record every allocation and free of one pipeline rank's run, in order.

    Args:
        case: names the rank, and the order of its micro batches.
        layout: of the rank's stage.
        tape: the whole model's, as the runtime computes it.
        makes_room: see :class:`RuntimeSchedule`.
    """
    (stage,) = case.pipeline_chunks
    order = PipelineOrder(schedule_of(case.pipeline), case.pp_rank, case.layout.pp, 1, case.workload.grad_accum)
    backwards = sum(action.do is Do.BACKWARD for action in order.shortened())
    recorder, workspace = Recorder(), case.cluster.gpu.workspace
    part = cut(tape, stage, holds_output=True)
    schedule = RuntimeStageSchedule(layout, part.tape, recorder, backwards, cublas_workspace=workspace, makes_room=makes_room)
    steps = STEPS_UNTIL_STEADY + (case.workload.dtype is DType.FP16)
    run = PipelineRun(order, steps, cublas_workspace=workspace, warm=True)
    play_pipeline(run, [ModelChunk(stage, part, schedule)], recorder, lambda: schedule.step(True))
    return recorder
