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

from zeroplan.core.plan import MemoryPlan
from zeroplan.core.zero_config import OffloadDevice
from zeroplan.search.cost import CostModel, StepTime
from zeroplan.search.memory import Memory
from zeroplan.search.space import Candidate

#: Families (stage, offloads, checkpointing, what is compiled) that an answer shows.
SHOWN = 5
#: Simulations that an answer may take: about two seconds' worth for a model of 32 blocks.
MOST_SIMULATIONS = 48
#: What no setting changes is allocated memory, but for buckets: where that alone exceeds the card by so much, none fits.
_REACH = 1.05
#: What an environment variable that must be set beside the config has to gain.
_ALLOC_CONF_COST = 0.03
#: The part of the usable GPU memory that a recommendation leaves free, beyond the upper end of its interval, if it can: as much
#: again as measured runs' reserved memory was off (planner/limit.py, RESERVED_SPREAD).
HEADROOM = 0.03
#: Of configurations whose predicted speeds differ by less, the simplest is recommended; predicted times are off by as much.
EQUALLY_FAST = 0.03
#: A floor below this share of the card: likely to fit as it is, so the smallest variant is not asked first.
_LIKELY = 0.8


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
    def on_edge(self) -> bool:
        """Whether it leaves less of the GPU free than a recommendation should."""
        spare = headroom(self.plan)
        return spare is not None and spare < HEADROOM

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
    """The result of a search. `ranking` holds the best of each family that fits, fastest first; those on the edge come last.

    `misses` are candidates that were simulated and do not fit; `considered` and `simulated` count candidates.
    """

    ranking: list[Ranked] = field(default_factory=list)
    misses: list[Ranked] = field(default_factory=list)
    considered: int = 0
    simulated: int = 0


def rank_key(candidate: Candidate, time: StepTime) -> tuple[float, int, int]:
    """Return the sort key: fastest first, among equals the one nearest to the defaults, then the smaller micro batch.

    What runs only with settings of the allocator, which no file carries, must be worth it.
    """
    worth = 1 - _ALLOC_CONF_COST if candidate.alloc_conf else 1
    return (-round(worth * time.tokens_per_second, 3), candidate.effort, candidate.workload.batch.micro_batch)


def search(
    space: Iterable[Candidate],
    memory: Memory,
    cost: CostModel,
    *,
    shown: int = SHOWN,
    most: int = MOST_SIMULATIONS,
    strict: bool = False,
    spare: bool = True,
) -> SearchOutcome:
    """Find the fastest candidate that fits of each family, at most `shown` families. See Note [Search].

    After `most` simulations the search ends with what it has; `strict` ends it even with nothing. Without `spare`, what leaves
    no headroom is as good as what does.
    """
    outcome = SearchOutcome()
    timed = []
    for candidate in space:
        outcome.considered += 1
        if not memory.cannot_fit(candidate):
            timed.append(_bound(candidate, memory, cost))
    queue = [(*rank_key(candidate, time), at) for at, (candidate, time) in enumerate(timed)]
    heapify(queue)
    groups: dict[object, list[Candidate]] = {}
    for candidate, _ in timed:
        groups.setdefault(_group(candidate), []).append(candidate)
    done: set[object] = set()
    too_large: dict[object, int] = {}
    missed: dict[Candidate, Ranked] = {}
    on_edge: dict[object, Ranked] = {}  # by family, the fastest that fits without the headroom
    settled: dict[Candidate, Ranked] = {}
    while queue:
        candidate, _ = timed[heappop(queue)[-1]]
        if len(done) >= shown or (memory.simulated >= most and (strict or outcome.ranking)):
            break
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
        likely = memory.floor(candidate) < _LIKELY * (memory.cluster.usable_vram or 0)
        for one in (candidate, frugal) if likely else (frugal, candidate):
            found = _planned(one, memory, cost)
            if not memory.may_fit(found.plan, one):
                missed[one] = found
                if one is frugal and _hopeless(found.plan):
                    too_large[family] = micro
                    break
            elif one is candidate and spare and found.on_edge:
                on_edge[family] = min(on_edge.get(family, found), found, key=lambda r: rank_key(r.candidate, r.time))
                break
            elif one is candidate:
                settled[one] = found
                timed.append((one, found.time))
                heappush(queue, (*rank_key(one, found.time), len(timed) - 1))
                break
    at_edge = (found for family, found in on_edge.items() if family not in done)
    outcome.ranking += sorted(at_edge, key=lambda r: rank_key(r.candidate, r.time))[: shown - len(outcome.ranking)]
    outcome.misses = list(missed.values())
    outcome.simulated = memory.simulated
    return outcome


def simplest_first(ranking: list[Ranked]) -> list[Ranked]:
    """A ranking with the simplest of the configurations that are as fast as its first one at the front."""
    if not ranking:
        return ranking
    first = ranking[0]
    least = (1 - EQUALLY_FAST) * first.time.tokens_per_second
    equal = [one for one in ranking if one.time.tokens_per_second >= least and one.on_edge is first.on_edge]
    best = min(equal, key=lambda one: one.complexity)
    return [best, *(one for one in ranking if one is not best)]


def _bound(candidate: Candidate, memory: Memory, cost: CostModel) -> tuple[Candidate, StepTime]:
    """The candidate with the time that its step takes at least."""
    return candidate, cost.step_time(candidate.workload, candidate.zero, memory.counts(candidate))


def _planned(candidate: Candidate, memory: Memory, cost: CostModel) -> Ranked:
    """Plan the candidate; returns it with its plan, and the step time that follows from it."""
    plan = memory.plan(candidate)
    return Ranked(candidate, cost.step_time(candidate.workload, candidate.zero, memory.counts(candidate), plan=plan), plan)


def _hopeless(plan: MemoryPlan) -> bool:
    """Return whether a candidate misses by more than buckets and the allocator's settings can change."""
    if plan.fits is not False:
        return plan.undecided
    gpu = plan.gpu
    least = gpu.needed if gpu.peak_allocated is None else gpu.peak_allocated + (gpu.outside_torch or 0)
    return plan.misfits != ("gpu",) or least > _REACH * (gpu.usable or 0)


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
    return sorted((_planned(candidate, memory, cost) for candidate in given), key=order_of)


def order_of(ranked: Ranked) -> tuple[bool, bool, float, int, int]:
    """The key by which candidates are sorted: those that fit first, then those that may, then by :func:`rank_key`."""
    return (ranked.fits is False, ranked.plan.undecided, *rank_key(ranked.candidate, ranked.time))


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
            found = _planned(candidate, memory, cost)
            (outcome.ranking if memory.may_fit(found.plan, candidate) else outcome.misses).append(found)
    outcome.ranking.sort(key=lambda r: (r.plan.gpu.needed, rank_key(r.candidate, r.time)))
    del outcome.ranking[shown:]
    outcome.simulated = memory.simulated
    return outcome
