"""recommend(): the fastest configurations that fit, best first.

Note [Search]
    Step times need no simulation, so candidates are sorted by speed first and simulated in that order: the first that fits
    is the fastest that fits. Where the simulation finds that the allocator has to empty its cache in each step, the time
    grows, and the candidate is put back in its new place. Floors (search/memory.py) skip those that cannot fit. Of a stage,
    offload and micro batch the variant with the smallest buckets is tried first: where that misses by a margin, so do the
    others, and so do larger micro batches. A test compares the answer with brute force over the whole space.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import log, log1p

from zeroplan.core.plan import MemoryPlan, Verdict
from zeroplan.core.zero_config import OffloadDevice
from zeroplan.search.cost import CostModel, StepTime
from zeroplan.search.memory import Memory
from zeroplan.search.policy import EQUAL, EQUALLY_FAST, LIKELY, MOST_SIMULATIONS, REACH, SHOWN
from zeroplan.search.space import Candidate


@dataclass(frozen=True, slots=True)
class Ranked:
    """A candidate with its predicted time and its memory."""

    candidate: Candidate
    time: StepTime
    plan: MemoryPlan

    @property
    def fits(self) -> bool | None:
        """Whether the plan fits; None without a limit, and where that is unknown."""
        return self.plan.fits

    @property
    def complexity(self) -> tuple[int, int, bool, int, int, int]:
        """The order of equally fast configurations: offload, recomputation, settings beside the file, the stage, its knobs."""
        zero, devices = self.candidate.zero, list(OffloadDevice)
        return (
            devices.index(zero.offload_param.device) if zero.offloads_param else 0,
            devices.index(zero.offload_optimizer.device),
            self.candidate.workload.gradient_checkpointing,
            bool(self.candidate.alloc_conf) + (self.candidate.workload.compile is not None),
            zero.stage,
            self.candidate.effort,
        )


def headroom(plan: MemoryPlan) -> float | None:
    """Return the part of the usable GPU memory above the interval's upper end; None without a limit or an interval."""
    gpu = plan.gpu
    return (gpu.usable - gpu.interval[1]) / gpu.usable if gpu.usable and gpu.interval else None


@dataclass(slots=True)
class SearchOutcome:
    """The result of a search. `ranking` holds the best of each family that fits, fastest first, then of those that may.

    `misses` are candidates that were simulated and do not fit; `considered` and `simulated` count candidates.
    """

    ranking: list[Ranked] = field(default_factory=list)
    misses: list[Ranked] = field(default_factory=list)
    considered: int = 0
    simulated: int = 0


def rank_key(candidate: Candidate, time: StepTime) -> tuple[int, bool, int, int]:
    """Return the sort key: fastest first; among equals one without settings of the allocator, which no file carries, then the
    one nearest to the defaults, then the smaller micro batch.

    Speeds are equal where the same step of :data:`EQUAL` holds them.
    """
    speed = round(log(max(time.tokens_per_second, 1e-9)) / log1p(EQUAL))
    return (-speed, bool(candidate.alloc_conf), candidate.effort, candidate.workload.batch.micro_batch)


def search(
    space: Iterable[Candidate],
    memory: Memory,
    cost: CostModel,
    *,
    shown: int = SHOWN,
    most: int = MOST_SIMULATIONS,
    strict: bool = False,
) -> SearchOutcome:
    """Find the fastest candidate that fits of each family, at most `shown` families. See Note [Search].

    After `most` simulations the search ends with what it has; `strict` ends it even with nothing.
    """
    outcome = SearchOutcome()
    timed = []
    for candidate in space:
        outcome.considered += 1
        if not memory.cannot_fit(candidate):
            timed.append(_bound(candidate, memory, cost))
    queue = [
        (memory.exceeds_assumed_host(candidate), *rank_key(candidate, time), at) for at, (candidate, time) in enumerate(timed)
    ]
    heapify(queue)
    groups: dict[object, list[Candidate]] = {}
    for candidate, _ in timed:
        groups.setdefault(_group(candidate), []).append(candidate)
    done: set[object] = set()
    too_large: dict[object, int] = {}
    missed: dict[Candidate, Ranked] = {}
    settled: dict[Candidate, Ranked] = {}
    while queue:
        large, *_, at = heappop(queue)
        candidate, _ = timed[at]
        if len(done) >= shown or (memory.simulated >= most and (strict or outcome.ranking)):
            break
        if large and outcome.ranking:
            break  # what needs more than the assumed host is for when nothing else fits
        family, micro = candidate.family, candidate.workload.batch.micro_batch
        if family in done:
            continue
        if candidate in settled:
            outcome.ranking.append(settled[candidate])
            done.add(family)
            continue
        if micro >= too_large.get(family, micro + 1) or not memory.runnable(candidate):
            continue
        frugal = min(
            groups[_group(candidate)], key=lambda c: (c.zero.buckets.reduce_bucket_size, memory.floor(c), not c.alloc_conf)
        )
        likely = memory.floor(candidate) < LIKELY * (memory.cluster.usable_vram or 0)
        for one in (candidate, frugal) if likely else (frugal, candidate):
            found = planned(one, memory, cost)
            if not memory.may_fit(found.plan, one):
                missed[one] = found
                if found.plan.verdict is Verdict.MAY_FIT and large:
                    done.add(family)
                    break
                if one is frugal and _hopeless(found.plan):
                    too_large[family] = micro
                    break
            elif one is candidate:
                settled[one] = found
                timed.append((one, found.time))
                heappush(queue, (large, *rank_key(one, found.time), len(timed) - 1))
                break
    for verdict in (Verdict.MAY_FIT,) if outcome.ranking else (Verdict.MAY_FIT, Verdict.UNKNOWN):
        outcome.ranking += _missed_with(verdict, missed.values(), outcome.ranking)[: shown - len(outcome.ranking)]
    outcome.ranking.sort(key=order_of)
    outcome.misses = list(missed.values())
    outcome.simulated = memory.simulated
    return outcome


def _missed_with(verdict: Verdict, missed: Iterable[Ranked], ranking: Sequence[Ranked]) -> list[Ranked]:
    """Return the fastest with this verdict of each family that the ranking has not, fastest first."""
    families = {one.candidate.family for one in ranking}
    found: dict[object, Ranked] = {}
    for one in sorted(missed, key=lambda r: rank_key(r.candidate, r.time)):
        if one.plan.verdict is verdict and one.candidate.family not in families:
            found.setdefault(one.candidate.family, one)
    return list(found.values())


def plainest(ranking: Sequence[Ranked]) -> Ranked:
    """Return the simplest of the configurations that are as fast as the ranking's first, and as sure to fit."""
    first = ranking[0]
    least = (1 - EQUALLY_FAST) * first.time.tokens_per_second
    equal = [one for one in ranking if one.time.tokens_per_second >= least and one.plan.verdict is first.plan.verdict]
    return min(equal, key=lambda one: one.complexity)


def _bound(candidate: Candidate, memory: Memory, cost: CostModel) -> tuple[Candidate, StepTime]:
    """The candidate with the time that its step takes at least."""
    return candidate, cost.step_time(candidate.workload, candidate.zero, memory.counts(candidate))


def planned(candidate: Candidate, memory: Memory, cost: CostModel) -> Ranked:
    """Plan the candidate; returns it with its plan, and the step time that follows from it."""
    plan = memory.plan(candidate)
    return Ranked(candidate, cost.step_time(candidate.workload, candidate.zero, memory.counts(candidate), plan=plan), plan)


def _hopeless(plan: MemoryPlan) -> bool:
    """Return whether a candidate misses by more than buckets and the allocator's settings can change."""
    if plan.verdict not in (Verdict.DOES_NOT_FIT, Verdict.MAY_FIT):
        return plan.undecided
    gpu = plan.gpu
    least = gpu.needed if gpu.peak_allocated is None else gpu.peak_allocated + (gpu.outside_torch or 0)
    return plan.misfits != ("gpu",) or least > REACH * (gpu.usable or 0)


def _group(candidate: Candidate) -> object:
    """Return the key that candidates share which differ in bucket sizes and allocator settings alone."""
    return candidate.family, candidate.workload.batch.micro_batch


def rank_all(given: Sequence[Candidate], memory: Memory, cost: CostModel) -> list[Ranked]:
    """Rank every given candidate by speed: those that fit, then those of which that is unknown, then those that do not.

    What differs in the micro batch alone is simulated in a row: it shares what the engine recorded.
    """
    alike: dict[object, list[Candidate]] = {}
    for candidate in given:
        alike.setdefault((candidate.zero, candidate.workload.but(micro_batch=1)), []).append(candidate)
    for group in alike.values():
        for candidate in group:
            memory.plan(candidate)
    return sorted((planned(candidate, memory, cost) for candidate in given), key=order_of)


def order_of(ranked: Ranked) -> tuple[int, int, bool, int, int]:
    """The key by which candidates are sorted: those that fit first, then those that may, then by :func:`rank_key`."""
    return (ranked.plan.verdict.rank, *rank_key(ranked.candidate, ranked.time))


def least_memory(space: Iterable[Candidate], memory: Memory, cost: CostModel, *, shown: int = SHOWN) -> SearchOutcome:
    """Find the candidates that need the least GPU memory, one of each family (``--goal memory``)."""
    outcome = SearchOutcome()
    smallest: dict[object, Candidate] = {}
    for candidate in space:
        outcome.considered += 1
        best = smallest.get(candidate.family)
        if best is None or memory.floor(candidate) < memory.floor(best):
            smallest[candidate.family] = candidate
    chosen = sorted(smallest.values(), key=memory.floor)[: 2 * shown]
    for candidate in chosen:
        if memory.runnable(candidate):
            found = planned(candidate, memory, cost)
            edge = found.plan.verdict is Verdict.MAY_FIT
            (outcome.ranking if edge or memory.may_fit(found.plan, candidate) else outcome.misses).append(found)
    outcome.ranking.sort(key=lambda r: (r.plan.verdict.rank, r.plan.gpu.needed, rank_key(r.candidate, r.time)))
    del outcome.ranking[shown:]
    outcome.simulated = memory.simulated
    return outcome
