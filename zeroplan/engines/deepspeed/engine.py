"""DeepSpeed as an Engine: its options and its ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from zeroplan.core.buffers import Phase
from zeroplan.core.errors import BadInput
from zeroplan.core.tape import Stream
from zeroplan.core.tape_options import TraceOptions, options_for
from zeroplan.core.workload import DType
from zeroplan.core.zero_config import DEEPSPEED_VERSION, ZeroConfig
from zeroplan.engines.base import Case
from zeroplan.engines.deepspeed import facts as facts_module
from zeroplan.engines.deepspeed.checkpoint import checkpoint_phases
from zeroplan.engines.deepspeed.job import Job, resolve
from zeroplan.engines.deepspeed.lines import LEDGER
from zeroplan.engines.deepspeed.schedule import distinct_ranks, record_deepspeed
from zeroplan.engines.deepspeed.schedule_host import record_host
from zeroplan.engines.simulation import HostPhase, Simulation
from zeroplan.ledger.line import Ledger
from zeroplan.ledger.optimizers import find_optimizer
from zeroplan.simulate.allocator_config import AllocatorConfig
from zeroplan.simulate.stream import Recorder, simulate

#: Every stage with each offload it allows: (stage, optimizer, parameters).
OPTIONS = (
    (0, "none", "none"),
    (1, "none", "none"),
    (1, "cpu", "none"),
    (2, "none", "none"),
    (2, "cpu", "none"),
    (3, "none", "none"),
    (3, "cpu", "none"),
    (3, "cpu", "cpu"),
    (3, "nvme", "none"),
    (3, "nvme", "nvme"),
)


#: With fp16, the loss scale mostly starts too high and the first steps are discarded. How many depends on the data; one
#: is enough to make the order of allocations that of a run whose states appear late.
FP16_SKIPPED_STEPS = 1


#: Events of the tape that one plan's ranks may play together, a run each: eight ranks of a model of thirty blocks. In a
#: deeper model each rank's odd blocks are a smaller part of the whole, and fewer ranks stand for all.
EVENTS_OVER_RANKS = 80_000
FEWEST_RANKS, MOST_RANKS = 2, 8


def worth_simulating(job: Job, stream: Stream) -> tuple[int, ...]:
    """The ranks whose runs can differ in what they reserve, as many as the model's depth affords."""
    return distinct_ranks(job, max(FEWEST_RANKS, min(MOST_RANKS, EVENTS_OVER_RANKS // max(1, len(stream)))))


class DeepSpeed:
    """DeepSpeed's ZeRO, stages 0 to 3."""

    name = "deepspeed"
    version = DEEPSPEED_VERSION

    def __init__(self) -> None:
        self._recorded: tuple[Case, Stream, dict[tuple[int, int], Recorder]] | None = None  # of the last case

    def options(self) -> list[ZeroConfig]:
        """Stages 0 to 3, each with the offloads it allows."""
        return [ZeroConfig.of(stage, optimizer, param) for stage, optimizer, param in OPTIONS]

    def require_runnable(self, zero: ZeroConfig) -> None:
        """Refuse impossible combinations.

        Raises:
            BadInput: with the remedy.
        """
        zero.require_possible()

    def require_workload(self, case: Case) -> None:
        """Refuse optimizers that DeepSpeed does not combine with ZeRO.

        Raises:
            BadInput: naming the conflict.
        """
        optimizer = find_optimizer(case.workload.optimizer)
        if case.zero.stage and not optimizer.zero:
            raise BadInput(
                f"{optimizer.name} does not run with ZeRO stage {case.zero.stage}",
                where="--optimizer",
                remedy="use --stage 0, or adamw",
            )

    def glossary(self) -> Mapping[str, str]:
        """What each name in the ledger's formulas means."""
        return facts_module.GLOSSARY

    def ledger(self, case: Case) -> tuple[Ledger, Any]:
        """DeepSpeed's lines and the facts of rank 0."""
        return LEDGER, facts_module.facts(
            case.spec,
            case.workload,
            case.zero,
            ranks=case.ranks,
            local_ranks=case.cluster.gpus,
            cublas_workspace=case.cluster.gpu.workspace,
        )

    def trace_options(self, case: Case) -> TraceOptions:
        """Stage 3 runs the model through its own hooks and linear function."""
        return options_for(case.workload, zero3=case.zero.stage == 3)

    def simulate(self, case: Case, stream: Stream, config: AllocatorConfig | None = None) -> Simulation:
        """The schedule of the stage, on each rank that can be the worst.

        With fp16 data decide how many steps the loss scale discards, and with them the order of allocations: the worst rank
        is simulated with and without.
        """
        recorded = self._recordings(case, stream)
        runs = {key: simulate(run, config, device_memory=case.cluster.vram) for key, run in recorded.items()}
        usual = _skipped(case)
        ranks = {rank: run for (rank, skipped), run in runs.items() if skipped == usual}
        rank = max(ranks, key=lambda r: (ranks[r].peak_allocated, ranks[r].peak_reserved))
        least = None
        if usual:
            fullest = max(ranks, key=lambda r: ranks[r].peak_reserved)
            if (fullest, 0) not in runs:
                other = record_deepspeed(self._job(case, stream, fullest, 0), stream)
                recorded[fullest, 0] = other
                runs[fullest, 0] = simulate(other, config, device_memory=case.cluster.vram)
            least = min(ranks[fullest].peak_reserved, runs[fullest, 0].peak_reserved)
        timeline = runs.pop((rank, usual))
        job = self._job(case, stream, 0)
        marks = record_host(job).marks
        host = tuple(HostPhase(mark.phase, mark.peak, mark.pinned) for mark in marks)
        on_host = {mark.phase: mark.pageable + mark.pinned for mark in marks}
        found = Simulation(timeline, rank, host, tuple(runs.values()), least)
        checkpoint = checkpoint_phases(
            job,
            after_init=found.held_after(Phase.INIT) or 0,
            after_step=found.held_after(Phase.STEP) or 0,
            host_init=on_host[Phase.INIT],
            host_step=on_host[Phase.STEP],
        )
        return replace(found, checkpoint=checkpoint)

    def _recordings(self, case: Case, stream: Stream) -> dict[tuple[int, int], Recorder]:
        """By rank and skipped steps, what is allocated and freed: the same under every setting of the allocator.

        Those of the last case are kept.
        """
        last = self._recorded
        if last is not None and last[1] is stream and last[0].spec is case.spec:
            old = last[0]
            if (old.workload, old.cluster, old.zero) == (case.workload, case.cluster, case.zero):
                return last[2]
        skipped = _skipped(case)
        first = self._job(case, stream, 0, skipped)
        runs = {}
        for rank in worth_simulating(first, stream):
            job = first if rank == 0 else self._job(case, stream, rank, skipped)
            runs[rank, skipped] = record_deepspeed(job, stream)
        self._recorded = (case, stream, runs)
        return runs

    def _job(self, case: Case, stream: Stream, rank: int, skipped: int = 0) -> Job:
        return resolve(
            stream,
            case.workload,
            case.zero,
            ranks=case.ranks,
            rank=rank,
            local_ranks=case.cluster.gpus,
            cublas_workspace=case.cluster.gpu.workspace,
            device_memory=case.cluster.vram,
            skipped_steps=skipped,
        )


def _skipped(case: Case) -> int:
    return FP16_SKIPPED_STEPS if case.workload.dtype is DType.FP16 else 0
