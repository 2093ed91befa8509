"""FSDP2's memory on a pipeline rank.

Note [FSDP2 on a stage]
    Between the first forward and the last backward of a step nothing is resharded and nothing is reduced: gradients of the
    micro batches add up whole, in the reduction's dtype. Behind the last backward each group is reduced and resharded, the
    root first. Source: torch/distributed/pipelining/stage.py (``backward_maybe_with_nosync``, ``perform_reduce_grad``).

    A rank with one chunk gathers a group where its first forward needs it, as FSDP2 does by itself. Looped schedules gather all
    groups of a chunk ahead, on the stream of the computation, and copy them out where the chunk is first needed
    (torch/distributed/pipelining/schedules.py, ``UNSHARD``; _fsdp_param_group.py, ``get_all_gather_streams``). Each chunk is an
    FSDP root of its own; one optimizer steps all of them.

    Where a backward runs in two halves, the second one sets or adds to a parameter's ``.grad`` by itself. Hooks run in the
    first half, so that FSDP2 takes such a gradient over with the next micro batch's first half, or when it reduces
    (_backward.py, ``stage_backward_weight``; FSDPParamGroup.post_backward).
"""

from __future__ import annotations

from dataclasses import replace

from zeroplan.core.pipeline import Stage
from zeroplan.core.pipeline_order import PipelineOrder, schedule_of
from zeroplan.engines.fsdp2.rank import Fsdp2Rank
from zeroplan.engines.fsdp2.schedule import COMPUTE, Fsdp2Schedule, Group
from zeroplan.engines.pipeline import PipelineEngineSchedule, PipelineRun, chunks_of, play_pipeline
from zeroplan.engines.pipeline_cut import StageTape
from zeroplan.engines.torch_step import STEPS_UNTIL_STEADY, optimizer_step
from zeroplan.simulate.recorder import Recorder
from zeroplan.tape.expanded import ExpandedTape


class Fsdp2StageSchedule(Fsdp2Schedule, PipelineEngineSchedule):
    """One chunk's run. See Note [FSDP2 on a stage]."""

    def __init__(self, rank: Fsdp2Rank, part: StageTape, recorder: Recorder) -> None:
        super().__init__(rank, part.tape, recorder)
        self.waits = False  # whether groups were gathered ahead and are not copied out

    def _every(self) -> list[Group]:
        return [group for module in sorted(self.groups) for group in self.groups_of(module)]

    def unshard(self) -> None:
        """Gather every group, the root's first, as ``submod.modules()`` lists them."""
        for group in self._every():
            self._unshard(group, COMPUTE)
        self.waits = True

    def wait_for_unshard(self) -> None:
        """Copy out what was gathered ahead; each output is freed at once, since the gather was asynchronous."""
        if not self.waits:
            return
        self.waits = False
        self.in_backward = True  # FSDPParamGroup.wait_for_unshard frees the output outside the forward alone
        for group in self._every():
            self._wait_for_unshard(group)

    def reshard(self) -> None:
        """Free every group's parameters; behind the reduction there are none."""
        for group in self._every():
            self._reshard(group)

    def grad(self, param: int, handle: int) -> None:
        """Keep a gradient, or add it to one that no hook has taken over."""
        group = (self.experts if param in self.rank.shared_experts else self.groups)[self.home[param]]
        if param in group.grads:
            self.free(handle)
        else:
            super().grad(param, handle)

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
            for group in reversed(self.groups_of(module)):
                self._post_backward(group)
        self._finalize_backward()


def record_fsdp2_stages(rank: Fsdp2Rank, tape: ExpandedTape) -> Recorder:
    """Record every allocation and free of one pipeline rank's run, in order.

    Raises:
        ValueError: a schedule that halves backwards, and a tape without :attr:`ExpandedTape.halves`.
    """
    recorder, stages = Recorder(), rank.pipeline_chunks
    micro_batches = rank.workload.batch.grad_accum
    order = PipelineOrder(schedule_of(rank.pipeline), rank.pp_rank, rank.layout.pp, len(stages), micro_batches)

    def schedule(stage: Stage, part: StageTape) -> Fsdp2StageSchedule:
        one = replace(rank, parameters=part.tape.parameters, pipeline_chunks=(stage,))
        return Fsdp2StageSchedule(one, part, recorder)

    chunks = chunks_of(order, stages, tape, schedule, token_parts=rank.layout.token_parts, holds_sent=rank.holds_sent)
    run = PipelineRun(order, STEPS_UNTIL_STEADY, cublas_workspace=rank.cublas_workspace, holds_sent=rank.holds_sent)
    stepped = False

    def step() -> None:
        nonlocal stepped
        if not rank.offload:
            optimizer_step(recorder, rank, applied=True, first=not stepped)
        stepped = True

    play_pipeline(run, chunks, recorder, step)
    return recorder
