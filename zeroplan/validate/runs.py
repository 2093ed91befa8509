"""The runs of one verify(): jobs are predicted, run on ranks of this machine, measured and compared."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from zeroplan.core.errors import BadInput
from zeroplan.core.plumbing.host_memory import physical_memory
from zeroplan.core.plumbing.progress import watched, working
from zeroplan.core.sizes import format_bytes
from zeroplan.engines.base import Engine
from zeroplan.engines.case import Case
from zeroplan.planner.tapes import ExpandedTapes
from zeroplan.validate.job import VerifyJob, ended_early
from zeroplan.validate.launch import TorchrunLaunch
from zeroplan.validate.machine import VerifyMachine
from zeroplan.validate.measured import Results, compare_ranks
from zeroplan.validate.planned import Planned, predict
from zeroplan.validate.results import Comparison

#: Called with a line of text about what begins or ends.
Say = Callable[[str], None]


def to_stderr(text: str, verb: str = "verify") -> None:
    """Say what is being done: to whoever watches this process's work, else in a line of its own that names the verb."""
    if watched():
        working(text)
        return
    print(f"zeroplan {verb}: {text}", file=sys.stderr, flush=True)


def _states(planned: Planned) -> int:
    """Return the bytes of one rank's lasting parameters and optimizer states, wherever but on a disk."""
    lines = (line for line in planned.plan.lines if line.place != "nvme")
    return sum(line.bytes for line in lines if line.buffer.startswith(("param.master", "param.shard", "optim")))


@dataclass(slots=True)
class Runs:
    """The configurations of one verify(), to run one after another.

    Attributes:
        engine: the engine that all of them run on.
        tapes: their tapes.
        cases, jobs: each configuration, and its job for the ranks.
        machine: what they run on.
        ranks: the number of ranks.
        tolerance: the largest error of the total, as a fraction of the plan.
        say: prints progress.
        skip_misfits: whether to leave out a configuration whose plan does not fit a GPU.
        skipped: a warning for each configuration that was left out.
    """

    engine: Engine
    tapes: ExpandedTapes
    cases: Sequence[Case]
    jobs: Sequence[VerifyJob]
    machine: VerifyMachine
    ranks: int
    tolerance: float
    say: Say
    skip_misfits: bool
    skipped: list[str] = field(default_factory=list)

    def run(self) -> list[Comparison]:
        """Run every job; within a torchrun on this process's ranks, else on ranks that are started for it."""
        return self._within_torchrun() if self.machine.launched else self._launched()

    def _launched(self) -> list[Comparison]:
        """Start one torchrun for each job on GPUs, so that each begins with free memory; on a CPU one for all jobs."""
        comparisons: list[Comparison] = []
        one_by_one = self.machine.device == "cuda"
        waiting = list(range(len(self.jobs)))
        while waiting:
            taken = waiting[:1] if one_by_one else list(waiting)
            plans: dict[int, Planned] = {}
            if one_by_one and self.skip_misfits:
                plans[taken[0]] = self._predict(taken[0])
                if self._skips(taken[0], plans[taken[0]]):
                    waiting.remove(taken[0])
                    continue
            elif not one_by_one:
                plans = {i: self._predict(i) for i in taken}
                self._require_memory(plans.values())
            jobs = [self.jobs[i] for i in taken]

            def progress(place: int, doing: str, taken: Sequence[int] = taken) -> None:
                self._tell(taken[place], doing)

            launch = TorchrunLaunch(jobs, self.ranks, self.machine.device, progress, timeout=jobs[0].timeout)
            what = jobs[0].label if len(taken) == 1 else f"{len(taken)} configurations"
            self.say(f"{what}: starting {self.ranks} {'rank' if self.ranks == 1 else 'ranks'} ({self.machine.device})")
            try:
                launch.start()
                for i in taken:  # while the ranks start
                    plans[i] = plans.get(i) or self._predict(i)
                results = launch.finish()
            finally:
                launch.close()
            for place, i in enumerate(taken):
                got = results.get(place, [])
                if not got and place and not launch.failure:
                    break
                found = self._compared(i, plans[i], got, self.say, failure=launch.failure)
                comparisons.append(found)
                waiting.remove(i)
                if found.measurement.failure or found.measurement.out_of_memory:
                    break  # the jobs after it get ranks of their own
        return comparisons

    def _require_memory(self, plans: Iterable[Planned]) -> None:
        """Raise BadInput where a CPU's ranks would fill this machine's memory by the model's states alone."""
        most, have = max(self.ranks * _states(one) for one in plans), physical_memory()
        if have and most > have:
            what = (
                f"{self.ranks} ranks hold {format_bytes(most)} of the model's states, and there are {format_bytes(have)} here"
            )
            raise BadInput(what, where="verify", remedy="run it where the GPUs are, or give a smaller model, or none")

    def _within_torchrun(self) -> list[Comparison]:
        """This process is one of the ranks. Every rank gets every result."""
        from zeroplan.validate.rank.exchange import gather_results, on_first_rank
        from zeroplan.validate.rank.worker import EXIT_EARLY, join, run_here

        device = join(self.jobs[0], self.machine.device, int(os.environ.get("LOCAL_RANK", "0")))
        first = self.machine.rank == 0
        comparisons: list[Comparison] = []
        for i, (case, job) in enumerate(zip(self.cases, self.jobs, strict=True)):
            planned = on_first_rank(partial(self._predict, i))
            if self._skips(i, planned):
                continue
            result = run_here(job, device, partial(self._tell, i) if first else _silent)
            if ended_early(result):  # the other ranks may wait for this one in vain, so torchrun is to end them
                self._compared(i, planned, [result], to_stderr)
                os._exit(EXIT_EARLY)
            everyones = gather_results(result)
            say = self.say if first else None
            comparisons.append(self._compared(i, planned, everyones, say, nodes=case.cluster.nodes))
        return comparisons

    def _predict(self, i: int) -> Planned:
        return predict(self.engine, self.cases[i], self.tapes)

    def _skips(self, i: int, planned: Planned) -> bool:
        """Return whether to leave out a configuration, with a warning."""
        if not self.skip_misfits or planned.plan.fits is not False:
            return False
        self.skipped.append(f"{self.jobs[i].label} is left out: the plan does not fit this GPU")
        return True

    def _tell(self, i: int, doing: str) -> None:
        """Print what a rank begins; the ends of phases only show that it is alive."""
        if not doing.endswith("done"):
            self.say(f"{self.jobs[i].label}: {doing}")

    def _compared(
        self, i: int, planned: Planned, results: Results, say: Say | None, *, nodes: int = 1, failure: str = ""
    ) -> Comparison:
        device = self.machine.device
        comparison = compare_ranks(
            planned, results, self.tolerance, device=device, ranks=self.ranks, nodes=nodes, failure=failure
        )
        if say is not None:
            say(f"{self.jobs[i].label}: {comparison.verdict}")
        return comparison


def _silent(doing: str) -> None:
    """Say nothing: the first rank speaks for all."""
