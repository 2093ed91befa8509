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
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush

from zeroplan.core.plan import MemoryPlan
from zeroplan.search.cost import CostModel, StepTime
from zeroplan.search.memory import Memory
from zeroplan.search.space import Candidate

#: Families (stage, offloads, checkpointing) that an answer shows.
SHOWN = 5
#: Simulations that an answer may take: about two seconds' worth for a model of 32 blocks.
MOST_SIMULATIONS = 48
#: What no setting changes is allocated memory, but for buckets: where that alone exceeds the card by so much, none fits.
_REACH = 1.05
#: What an environment variable that must be set beside the config has to gain.
_ALLOC_CONF_COST = 0.03
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
        """Whether the plan fits; None without a limit."""
        return self.plan.fits


@dataclass(slots=True)
class Outcome:
    """What a search found. `ranking` holds the best of each family that fits, fastest first.

    `misses` are candidates that were simulated and do not fit; `considered`, `pruned` and `simulated` count candidates.
    """

    ranking: list[Ranked] = field(default_factory=list)
    misses: list[Ranked] = field(default_factory=list)
    considered: int = 0
    pruned: int = 0
    simulated: int = 0


def rank_key(candidate: Candidate, time: StepTime) -> tuple[float, int, int]:
    """Return the sort key: fastest first, among equals the one nearest to the defaults, then the smaller micro batch.

    What runs only with settings of the allocator, which no file carries, must be worth it.
    """
    worth = 1 - _ALLOC_CONF_COST if candidate.alloc_conf else 1
    return (-round(worth * time.tokens_per_second, 3), candidate.effort, candidate.workload.micro_batch)


def search(
    space: Iterable[Candidate],
    memory: Memory,
    cost: CostModel,
    *,
    shown: int = SHOWN,
    most: int = MOST_SIMULATIONS,
    strict: bool = False,
) -> Outcome:
    """Find the fastest candidate that fits of each family, at most `shown` families. See Note [Search].

    After `most` simulations the search ends with what it has; `strict` ends it even with nothing.
    """
    outcome = Outcome()
    timed = []
    for candidate in space:
        outcome.considered += 1
        if memory.cannot_fit(candidate):
            outcome.pruned += 1
            continue
        timed.append(_bound(candidate, memory, cost))
    queue = [(*rank_key(candidate, time), at) for at, (candidate, time) in enumerate(timed)]
    heapify(queue)
    groups: dict[object, list[Candidate]] = {}
    for candidate, _ in timed:
        groups.setdefault(_group(candidate), []).append(candidate)
    done: set[object] = set()
    too_large: dict[object, int] = {}
    missed: dict[Candidate, Ranked] = {}
    settled: dict[Candidate, Ranked] = {}
    while queue:
        candidate, _ = timed[heappop(queue)[-1]]
        if len(done) >= shown or (memory.simulated >= most and (strict or outcome.ranking)):
            break
        family, micro = candidate.family, candidate.workload.micro_batch
        if family in done:
            continue
        if candidate in settled:
            outcome.ranking.append(settled[candidate])
            done.add(family)
            continue
        if micro >= too_large.get(family, micro + 1) or not memory.runnable(candidate):
            continue
        frugal = min(groups[_group(candidate)], key=lambda c: (c.zero.reduce_bucket_size, memory.floor(c), not c.alloc_conf))
        likely = memory.floor(candidate) < _LIKELY * (memory.cluster.usable_vram or 0)
        for one in (candidate, frugal) if likely else (frugal, candidate):
            found = _planned(one, memory, cost)
            if found.fits is False:
                missed[one] = found
                if one is frugal and _hopeless(found.plan):
                    too_large[family] = micro
                    break
            elif one is candidate:
                settled[one] = found
                timed.append((one, found.time))
                heappush(queue, (*rank_key(one, found.time), len(timed) - 1))
                break
    outcome.misses = list(missed.values())
    outcome.simulated = memory.simulated
    return outcome


def _bound(candidate: Candidate, memory: Memory, cost: CostModel) -> tuple[Candidate, StepTime]:
    """The candidate with the time that its step takes at least."""
    return candidate, cost.step_time(candidate.workload, candidate.zero, memory.counts(candidate))


def _planned(candidate: Candidate, memory: Memory, cost: CostModel) -> Ranked:
    """The candidate with its plan, and the step time that follows from it."""
    plan = memory.plan(candidate)
    return Ranked(candidate, cost.step_time(candidate.workload, candidate.zero, memory.counts(candidate), plan=plan), plan)


def _hopeless(plan: MemoryPlan) -> bool:
    """Whether it misses by more than buckets and the allocator's settings can change."""
    if plan.fits is not False:
        return False
    gpu = plan.gpu
    least = gpu.needed if gpu.peak_allocated is None else gpu.peak_allocated + (gpu.outside_torch or 0)
    return plan.misfits != ("gpu",) or least > _REACH * (gpu.usable or 0)


def _group(candidate: Candidate) -> object:
    """The key that candidates share which differ in bucket sizes and allocator settings alone."""
    return candidate.family, candidate.workload.micro_batch


def rank_all(given: Sequence[Candidate], memory: Memory, cost: CostModel) -> list[Ranked]:
    """Rank every given candidate: those that fit by speed, then those that do not.

    What differs in the micro batch alone is simulated in a row: it shares what the engine recorded.
    """
    alike: dict[object, list[Candidate]] = {}
    for candidate in given:
        alike.setdefault((candidate.zero, replace(candidate.workload, micro_batch=1)), []).append(candidate)
    for group in alike.values():
        for candidate in group:
            memory.plan(candidate)
    return sorted((_planned(candidate, memory, cost) for candidate in given), key=order_of)


def order_of(ranked: Ranked) -> tuple[bool, float, int, int]:
    """The key by which candidates are sorted: those that fit first, then by :func:`rank_key`."""
    return (ranked.fits is False, *rank_key(ranked.candidate, ranked.time))


def least_memory(space: Iterable[Candidate], memory: Memory, cost: CostModel, *, shown: int = SHOWN) -> Outcome:
    """Find the candidates that need the least GPU memory, one of each family (``--goal memory``)."""
    outcome = Outcome()
    smallest: dict[object, Candidate] = {}
    for candidate in space:
        outcome.considered += 1
        best = smallest.get(candidate.family)
        if best is None or memory.floor(candidate) < memory.floor(best):
            smallest[candidate.family] = candidate
    chosen = sorted(smallest.values(), key=memory.floor)[: 2 * shown]
    outcome.pruned = outcome.considered - len(chosen)
    for candidate in chosen:
        if memory.runnable(candidate):
            found = _planned(candidate, memory, cost)
            (outcome.misses if found.fits is False else outcome.ranking).append(found)
    outcome.ranking.sort(key=lambda r: (r.plan.gpu.needed, rank_key(r.candidate, r.time)))
    del outcome.ranking[shown:]
    outcome.simulated = memory.simulated
    return outcome
