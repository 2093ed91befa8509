"""The runtime's memory on a pipeline rank.

Note [The runtime on a stage]
    torch's schedule calls the engine for each micro batch of an accumulation: a forward counts as any, and the backward of the
    step's last micro batch is the one behind which the optimizer steps. The loss is what the program gives the schedule, here
    transformers' own; the engine's takes the place of a whole model's alone. Source: zeroplan_runtime/pipeline.py

    The first half of a backward is another's ``torch.autograd.grad()`` to the engine, and leaves no gradients; the second is
    the micro batch's backward, in which no hook of a module runs. Autograd returns all gradients, so that no product writes in
    place (zeroplan_runtime/pipeline_halves.py).

    A rank's chunks share the engine's buffers. A chunk's backward reduces the units that its forward runs and the root's, and
    the last one of all chunks what waits for it (Note [Chunks] there).
"""

from __future__ import annotations

from zeroplan.core.arena.layout import ArenaLayout, UnitKind
from zeroplan.core.pipeline import Stage
from zeroplan.core.pipeline_order import Do, PipelineOrder, schedule_of
from zeroplan.core.workload import DType
from zeroplan.engines.case import Case
from zeroplan.engines.pipeline import PipelineEngineSchedule, PipelineRun, chunks_of, play_pipeline
from zeroplan.engines.pipeline_cut import StageTape
from zeroplan.engines.runtime.schedule import STEPS_UNTIL_STEADY, RuntimeSchedule, UnitRun
from zeroplan.simulate.recorder import Recorder
from zeroplan.tape.expanded import ExpandedTape


class RuntimeStageSchedule(RuntimeSchedule, PipelineEngineSchedule):
    """One chunk's run. See Note [The runtime on a stage]."""

    def __init__(
        self,
        layout: ArenaLayout,
        tape: ExpandedTape,
        recorder: Recorder,
        backwards: int,
        *,
        cublas_workspace: int,
        makes_room: bool,
        several: bool,
        beside: RuntimeStageSchedule | None = None,
    ) -> None:
        """`backwards`: those of a step and of all chunks, as far as they are played; `several`: the rank has other chunks;
        `beside`: the first one's.
        """
        super().__init__(layout, tape, recorder, cublas_workspace=cublas_workspace, makes_room=makes_room, beside=beside)
        self._backwards, self._done = backwards, 0
        self._first = beside or self
        self._several, self._in_half = several, False
        root = next((unit.shape.name for unit in layout.units if unit.shape.kind is UnitKind.ROOT), None)
        self._own = [run for run in (self.found[1].get(root or ""),) if run is not None]

    def initialize(self) -> None:
        """Take the standing buffers, which are all chunks'."""
        if self._first is self:
            super().initialize()

    def enter(self, module: int) -> None:
        """Note the unit as this chunk's."""
        unit = self.of_module[module]
        for part in (unit, unit.experts) if unit is not None else ():
            if part is not None and part not in self._own:
                self._own.append(part)
        super().enter(module)

    def backward_enter(self, module: int) -> None:
        """Begin the backward of a unit, but in the first half of one."""
        if not self._in_half:
            super().backward_enter(module)

    def half_begin(self) -> None:
        """Let the engine take no notice."""
        self._in_half = True

    def half_end(self) -> None:
        """Let it take notice again."""
        self._in_half = False

    def weights_begin(self) -> None:
        """Begin a backward without hooks."""
        self.backward_begin(False)

    def weights_end(self) -> None:
        """End it."""
        self.backward_end(False)

    def is_due(self, unit: UnitRun) -> bool:
        """Return whether it is one of the chunk's, or one that the step waits for."""
        waits = unit.slot is None or unit.kept is None or not unit.accumulated
        return not self._several or unit in self._own or (self.boundary and waits)

    def backward_begin(self, boundary: bool) -> None:
        """Begin a micro batch's backward; a step follows the last one."""
        first = self._first
        first._done += 1
        super().backward_begin(first._done % self._backwards == 0)

    def backward_end(self, boundary: bool) -> None:
        """Reduce what is left and, before a step, free the slots."""
        super().backward_end(self.boundary)


def record_stage(case: Case, layout: ArenaLayout, tape: ExpandedTape, *, makes_room: bool) -> Recorder:
    """Record every allocation and free of one pipeline rank's run, in order.

    Args:
        case: names the rank, and the order of its micro batches.
        layout: of the rank's chunks.
        tape: the whole model's, as the runtime computes it.
        makes_room: see :class:`RuntimeSchedule`.

    Raises:
        ValueError: a schedule that halves backwards, and a tape without :attr:`ExpandedTape.halves`.
    """
    stages, micro_batches = case.pipeline_chunks, case.workload.batch.grad_accum
    order = PipelineOrder(schedule_of(case.pipeline), case.pp_rank, case.layout.pp, len(stages), micro_batches)
    backwards = sum(action.do in (Do.BACKWARD, Do.WEIGHT) for action in order.shortened())
    recorder, gpu = Recorder(), case.cluster.gpu
    made: list[RuntimeStageSchedule] = []

    def schedule(_: Stage, part: StageTape) -> RuntimeStageSchedule:
        one = RuntimeStageSchedule(
            layout,
            part.tape,
            recorder,
            backwards,
            cublas_workspace=gpu.workspace,
            makes_room=makes_room,
            several=len(stages) > 1,
            beside=made[0] if made else None,
        )
        made.append(one)
        return one

    chunks = chunks_of(order, stages, tape, schedule, token_parts=case.layout.token_parts, holds_sent=gpu.holds_sent)
    stepped = made[0].step
    steps = STEPS_UNTIL_STEADY + (case.workload.numerics.dtype is DType.FP16)
    run = PipelineRun(order, steps, cublas_workspace=gpu.workspace, warm=True, holds_sent=gpu.holds_sent)
    play_pipeline(run, chunks, recorder, lambda: stepped(True))
    return recorder
