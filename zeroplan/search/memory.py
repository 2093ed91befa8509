"""A candidate's memory: a floor from formulas in microseconds, and the simulated plan of those that survive it.

Note [Floors]
    A floor is what must be allocated at once whatever the schedule does, beside what lies outside torch: either the engine's
    buffers that live through forward and step with the most that the model's own computation holds at once, or all buffers of
    the step, which is one moment while those of the other phases come one after another. It is never above the simulated total
    (a test holds that), so a candidate whose floor exceeds the card, less the doubt that a fit leaves room for
    (planner/limit.py), cannot fit and need not be simulated.
    Sums over parameters and tapes are kept by what they depend on, so a floor is two look-ups and a sum.
"""

from __future__ import annotations

from dataclasses import replace

from zeroplan.core.buffers import Buffer, Phase, Place
from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.float8 import Float8Recipe
from zeroplan.core.plan import CpuMemory, MemoryPlan, Verdict
from zeroplan.core.plumbing.progress import working
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.base import Engine
from zeroplan.engines.case import Case
from zeroplan.engines.process import Outside
from zeroplan.engines.technique_lines import technique_host
from zeroplan.ledger.line import evaluate
from zeroplan.ledger.work import Counts, Matrices, count_tape, guess_counts, matrices, scale_counts
from zeroplan.models.spec import ModelSpec
from zeroplan.planner.fit import judged
from zeroplan.planner.formula import (
    FORMULA,
    activation_estimate,
    formula_plan,
    how_to_simulate,
    lives_between_steps,
    usual_activations,
)
from zeroplan.planner.host import host_memory
from zeroplan.planner.simulated import simulated_plan
from zeroplan.planner.tapes import NoTapeError, expanded_tape_of, tape_at_hand
from zeroplan.search.policy import ANALYTIC_SPREAD, FLOOR_SLACK
from zeroplan.search.space import Candidate
from zeroplan.simulate.allocator.config import AllocatorConfig
from zeroplan.tape.expanded import ExpandedTape


class Memory:
    """Floors and plans of one model on one cluster under one engine."""

    def __init__(
        self, engine: Engine, spec: ModelSpec, cluster: Cluster, *, depth: str | None = None, trace: bool = True
    ) -> None:
        """Depth ``"formula"`` simulates nothing; it and `trace` False take only tapes that are at hand, and trace none."""
        self.engine, self.spec, self.cluster = engine, spec, cluster
        self.depth, self.trace = depth, trace and depth != FORMULA
        self.no_tape = ""  # why there is no tape, once that is known
        self.remedy = ""  # and what to do about it
        self.simulated = 0
        self._usable = cluster.usable_vram
        self._matrices: Matrices = matrices(spec)
        self._streams: dict[tuple[str, int, int], ExpandedTape | None] = {}
        self._counts: dict[tuple[str, int, int], Counts] = {}
        self._traced: dict[tuple[str, int, int], Counts | None] = {}
        self._computed: dict[tuple[str, int], tuple[int, int]] = {}
        self._states: dict[tuple[ZeroConfig, bool], tuple[int, int, int]] = {}
        self._host: dict[ZeroConfig, tuple[int, int]] = {}
        self._plans: dict[Candidate, MemoryPlan] = {}

    def on(self, cluster: Cluster) -> Memory:
        """Return a Memory of another cluster that shares tapes and counts, and plans where just the limits differ."""
        other = Memory(self.engine, self.spec, cluster, depth=self.depth, trace=self.trace)
        other.no_tape, other.remedy = self.no_tape, self.remedy
        other._streams, other._counts, other._computed = self._streams, self._counts, self._computed
        other._traced = self._traced
        if (cluster.gpus, cluster.nodes, cluster.gpu) == (self.cluster.gpus, self.cluster.nodes, self.cluster.gpu):
            plans = ((candidate, other._judged(candidate, plan)) for candidate, plan in self._plans.items())
            other._plans = {candidate: plan for candidate, plan in plans if plan is not None}
        return other

    def _judged(self, candidate: Candidate, plan: MemoryPlan) -> MemoryPlan | None:
        """A plan held against this cluster's limits; None where only a simulation under them can tell."""
        gpu, usable = plan.gpu, self._usable
        if gpu.interval is None or gpu.at_limit:
            return None
        case = self.case(candidate)
        if usable is not None and gpu.interval[1] > usable >= (gpu.peak_allocated or 0) + (gpu.outside_torch or 0):
            return None
        fit = judged(case, plan.unmodelled, gpu=gpu.interval, cpu=plan.cpu.per_node, nvme=plan.nvme.per_node)
        return plan.model_copy(update={"gpu": gpu.model_copy(update={"usable": usable}), **fit})

    def case(self, candidate: Candidate) -> Case:
        """Return the candidate as a :class:`Case` for the engines."""
        return Case(self.spec, candidate.workload, self.cluster, candidate.zero, unmodelled=candidate.unmodelled)

    def runnable(self, candidate: Candidate) -> bool:
        """Return whether the engine trains this at all."""
        try:
            self.engine.require_workload(self.case(candidate))
        except BadInput:
            return False
        return True

    def counts(self, candidate: Candidate) -> Counts:
        """Count the kernels, bytes and modules of one micro batch."""
        workload = candidate.workload
        key = (self._tape_key(candidate), workload.batch.micro_batch, workload.batch.seq_len or 0)
        found = self._counts.get(key)
        if found is None:
            # Stage 3's identity functions are counted as its hooks, so the plain tape serves every stage.
            plain = replace(candidate, zero=ZeroConfig())
            one, two = self._counted(plain, 1), self._counted(plain, 2)
            if one is None or two is None:
                tokens = workload.batch.micro_batch * (workload.batch.seq_len or 0)
                found = guess_counts(self._matrices, workload, tokens)
            else:
                found = scale_counts(one, two, workload.batch.micro_batch)
            self._counts[key] = found
        return found

    def _counted(self, candidate: Candidate, micro_batch: int) -> Counts | None:
        key = (self._tape_key(candidate), micro_batch, candidate.workload.batch.seq_len or 0)
        if key not in self._traced:
            found, stream = None, self._stream(candidate, micro_batch)
            if stream is not None:
                case = self.case(replace(candidate, workload=candidate.workload.but(micro_batch=micro_batch)))
                counted = count_tape(self.engine.computed_tape(case, stream))
                found = replace(counted, casts=case.workload.has(Float8Recipe))
            self._traced[key] = found
        return self._traced[key]

    def floor(self, candidate: Candidate) -> int:
        """Bytes a GPU that this cannot do without. See Note [Floors]."""
        between, stepping, _ = self._state_floors(candidate)
        return max(between + self._computation(candidate), stepping)

    def _state_floors(self, candidate: Candidate) -> tuple[int, int, int]:
        """Return the floors that need no tape: the buffers beside the computation, those of the step, and the doubt of
        either.
        """
        key = (candidate.zero, candidate.workload.batch.grad_accum > 1)
        found = self._states.get(key)
        if found is None:
            found = self._states[key] = self._live_states(candidate)
        return found

    def host_floor(self, candidate: Candidate) -> tuple[int, int]:
        """Bytes of a node's host memory and disk that this cannot do without."""
        found = self._host.get(candidate.zero)
        if found is None:
            case = self.case(candidate)
            # Inputs that leave with checkpointing grow with the micro batch, which the floor is not of.
            items = [item for item in evaluate(*self.engine.ledger(case)) if item.buffer is not Buffer.ACTIVATION_CHECKPOINT]
            local = self.cluster.gpus
            host = sum(i.bytes for i in items if i.place in (Place.PINNED, Place.DRAM) and lives_between_steps(i))
            disk = sum(i.bytes for i in items if i.place is Place.NVME)
            found = self._host[candidate.zero] = (round(FLOOR_SLACK * host) * local, disk * local)
        return found

    def cannot_fit(self, candidate: Candidate) -> bool:
        """Return whether the floors alone exceed a limit."""
        cluster, usable = self.cluster, self._usable
        # The states alone first, then the host's: many a candidate falls before its tape has to be read.
        between, stepping, doubt = self._state_floors(candidate)
        if usable is not None and max(between, stepping) + doubt > usable:
            return True
        ram, nvme = cluster.usable_cpu_ram, cluster.nvme
        if ram is not None or nvme is not None:
            host, disk = self.host_floor(candidate)
            if (ram is not None and host > ram and not cluster.assumes_host) or (nvme is not None and disk > nvme):
                return True
        return usable is not None and self.floor(candidate) + doubt > usable

    def exceeds_assumed_host(self, candidate: Candidate) -> bool:
        """Return whether the floor of the host's memory is above the size that is assumed for it."""
        cluster = self.cluster
        return cluster.assumes_host and self.host_floor(candidate)[0] > (cluster.usable_cpu_ram or 0)

    def host(self, candidate: Candidate) -> CpuMemory | None:
        """Return the host's part of the candidate's plan, at the least that a process takes; None where only a simulation can
        tell.
        """
        case = self.case(candidate)
        run = self.engine.simulate_host(case)
        if run is None:
            return None
        rss = self.engine.host_rss(case.workload, case.zero, rotary=False)
        return host_memory(
            run, rss, ranks=self.cluster.gpus, workload=case.workload, techniques=technique_host(self.engine, case)
        )

    def plan(self, candidate: Candidate) -> MemoryPlan:
        """The candidate's plan at the deepest depth there is; kept, because several questions ask for it."""
        found = self._plans.get(candidate)
        if found is None:
            case = self.case(candidate)
            working(f"simulating {candidate.zero.label}, micro batch {candidate.workload.batch.micro_batch}")
            stream = self._stream(candidate, candidate.workload.batch.micro_batch) if self.depth != FORMULA else None
            if stream is None:
                found = self._analytic(case)
            else:
                conf = AllocatorConfig.parse(candidate.alloc_conf, where="--alloc-conf") if candidate.alloc_conf else None
                found = simulated_plan(formula_plan(self.engine, case), self.engine, case, stream, conf).plan
                self.simulated += 1
            self._plans[candidate] = found
        return found

    def _analytic(self, case: Case) -> MemoryPlan:
        """A formula plan; whether it fits is unknown, unless its states alone exceed a limit."""
        plan = formula_plan(self.engine, case)
        return (
            plan.model_copy(update={"settle": plan.settle.replace(how_to_simulate(case), self.remedy)}) if self.remedy else plan
        )

    def may_fit(self, plan: MemoryPlan, candidate: Candidate) -> bool:
        """Return whether a plan fits, or where that is unknown, whether it does by the analytic estimate of activations.

        One at the edge of a limit does not: it stands behind all that fit (:class:`~zeroplan.core.plan.Verdict`); nor does one
        that is unknown, and beyond a limit by its figures.
        """
        if plan.verdict is not Verdict.UNKNOWN or plan.gpu.interval is not None:
            return plan.verdict is Verdict.FITS or (plan.verdict is Verdict.UNKNOWN and not plan.misfits)
        bound, case = self._bound(candidate.workload), self.case(candidate)
        need = max(plan.gpu.phases.values()) + round(bound * (1 + ANALYTIC_SPREAD)) + self._outside(case).total
        return self._usable is None or need <= self._usable

    def _bound(self, workload: Workload) -> int:
        bound = activation_estimate(self.spec, workload)
        return usual_activations(self.spec.params, workload) if bound is None else bound

    def _outside(self, case: Case) -> Outside:
        return self.engine.outside_torch(case.workload, case.zero, case.cluster)

    def _live_states(self, candidate: Candidate) -> tuple[int, int, int]:
        case = self.case(candidate)
        on_gpu = [item for item in evaluate(*self.engine.ledger(case)) if item.place is Place.HBM]
        outside = self._outside(case)
        between = sum(item.bytes for item in on_gpu if lives_between_steps(item))
        stepping = sum(i.bytes for i in on_gpu if Phase.STEP in i.phases) if self.engine.step_buffers_coexist else 0
        return (
            round(FLOOR_SLACK * between) + outside.total,
            round(FLOOR_SLACK * stepping) + outside.total,
            outside.spread,
        )

    def _computation(self, candidate: Candidate) -> int:
        """Return the least bytes that the computation holds at its fullest.

        That maximum is of sums that grow linearly, so it is convex in the micro batch, and the line through its values at
        one and two lies below it from there on.
        """
        key, micro = (self._tape_key(candidate), candidate.workload.batch.seq_len or 0), candidate.workload.batch.micro_batch
        line = self._computed.get(key)
        if line is None:
            one = self._stream(candidate, 1)
            if one is None:
                bound = self._bound(candidate.workload)
                line = (0, round((1 - ANALYTIC_SPREAD) * bound / micro / 2))
            elif micro == 1:
                return one.activation_peak  # the tape at two may never be asked for
            else:
                two = self._stream(candidate, 2)
                first = one.activation_peak
                slope = max(0, (two or one).activation_peak - first)
                line = (first - slope, slope)
            self._computed[key] = line
        return line[0] + line[1] * micro

    def _tape_key(self, candidate: Candidate) -> str:
        work = candidate.workload
        return f"{work.gradient_checkpointing} {work.compile} {candidate.zero.stage == 3}"

    def _stream(self, candidate: Candidate, micro_batch: int) -> ExpandedTape | None:
        workload: Workload = candidate.workload.but(micro_batch=micro_batch, grad_accum=1)
        key = (self._tape_key(candidate), micro_batch, workload.batch.seq_len or 0)
        if key not in self._streams:
            try:
                case = Case(self.spec, workload, self.cluster, candidate.zero)
                self._streams[key] = None if self.no_tape else self._tape(case)
            except NoTapeError as error:
                self.no_tape, self.remedy = str(error), error.remedy
                self._streams[key] = None
        return self._streams[key]

    def _tape(self, case: Case) -> ExpandedTape:
        if self.trace:
            return expanded_tape_of(self.engine, case)
        tape = tape_at_hand(self.engine, case, plain=True)
        if tape is None:
            raise NoTapeError(f"no tape of {case.spec.name} is at hand")
        return tape
