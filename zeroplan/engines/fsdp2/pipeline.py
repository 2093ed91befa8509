"""FSDP2's memory on a pipeline stage.

Note [FSDP2 on a stage]
    Between the first forward and the last backward of a step nothing is resharded and nothing is reduced: gradients of the
    micro batches add up whole, in the reduction's dtype. Behind the last backward each group is reduced and resharded, the
    root first. Source: torch/distributed/pipelining/stage.py (``backward_maybe_with_nosync``, ``perform_reduce_grad``).
"""

from __future__ import annotations

from zeroplan.core.pipeline import Stage, schedule_of
from zeroplan.core.tape import ExpandedTape
from zeroplan.engines.fsdp2.rank import Fsdp2Rank
from zeroplan.engines.fsdp2.schedule import Fsdp2Schedule, Group
from zeroplan.engines.pipeline import PipelineEngineSchedule, PipelineRun, cut, play_pipeline
from zeroplan.engines.torch_step import STEPS_UNTIL_STEADY
from zeroplan.simulate.recorder import Recorder


class Fsdp2StageSchedule(Fsdp2Schedule, PipelineEngineSchedule):
    """One rank's run. See Note [FSDP2 on a stage]."""

    def _post_backward(self, group: Group) -> None:
        if self.reduces:
            super()._post_backward(group)
            return
        for p in [p for p in group.grads if p in group.accumulated]:
            self.free(group.grads.pop(p))
        self._keep_unsharded(group)

    def reduce(self) -> None:
        """Run every group's post-backward, the root's first (FSDPParamGroup.post_backward)."""
        self.reduces = True
        for module in sorted(self.groups):
            self._post_backward(self.groups[module])
        self._free_reduce_input()


def record_fsdp2_stage(rank: Fsdp2Rank, tape: ExpandedTape, stage: Stage) -> Recorder:
    """Record every allocation and free of one rank's run on a pipeline stage, in order."""
    part = cut(tape, stage)
    recorder = Recorder()
    run = PipelineRun(
        stage, schedule_of(rank.pipeline), rank.workload.grad_accum, STEPS_UNTIL_STEADY, cublas_workspace=rank.cublas_workspace
    )
    play_pipeline(run, part, recorder, Fsdp2StageSchedule(rank, part.tape, recorder))
    return recorder
