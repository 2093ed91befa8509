"""Whether a run fits its card: the run is simulated under the card's limit.

Note [Under the limit]
    Without a limit the caching allocator reserves what it likes. On a card it cannot: when the device has no memory left, it
    returns cached segments and asks again. So a run fits when its simulation *under the card's limit* gets through. That limit
    is what the card leaves to torch, less the error of our figures. The upper end of such a plan's interval is the limited
    run's total plus that error, which is at most the usable memory. Where the limited run ends out of memory, the upper end is
    the unlimited run's, which is above it. So `fits` compares the upper end with the usable memory in both cases.

    A run that empties its cache finds other fragments in every step, so it has to get through until it is steady
    (simulate/steady_state.py). Where the device's lag decides when freed blocks come back (stage 3 on several ranks), it has
    to get through at both ends of that lag, and without emptying its cache at the end, since no two steps are timed alike.
    The interval then reaches from the lower of the two runs to the higher.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroplan.engines.case import Case
from zeroplan.engines.process import Outside
from zeroplan.engines.simulation import Simulation
from zeroplan.simulate.allocator.config import AllocatorConfig
from zeroplan.simulate.cache_release import NO_RELEASE, CacheRelease

#: The error of reserved memory on nine of ten measured runs (benchmarks/results/accuracy.json):
#: the cached block that a request gets depends on timing.
RESERVED_SPREAD = 0.03
#: The largest error of allocated memory. It is the one that counts under a limit, where the allocator caches nothing to spare.
ALLOCATED_SPREAD = 0.002


@dataclass(frozen=True, slots=True)
class RunOnCard:
    """A run on a card of limited memory.

    Attributes:
        simulation: the run whose figures the plan shows: the limited one where the limit changes it and it gets through.
        interval: the lower and the upper bound of the total, in bytes.
        released: what the allocator releases in each step of the limited run.
        fragmented: it does not get through, though the card may have room for all that is allocated.
        waiting: so, and it would if the device followed the host closely: blocks that were freed, and wait for the device, are
            what is too much.
    """

    simulation: Simulation
    interval: tuple[int, int]
    released: CacheRelease = NO_RELEASE
    fragmented: bool = False
    waiting: bool = False


def run_on_card(case: Case, simulation: Simulation, outside: Outside, config: AllocatorConfig | None = None) -> RunOnCard:
    """Simulate the run on the case's card. See Note [Under the limit].

    Args:
        simulation: the run without a limit.
        outside: the memory of the process outside torch's allocator.
        config: the allocator's settings.
    """
    usable = case.cluster.usable_vram
    allocated, reserved = simulation.peak_allocated, simulation.peak_reserved
    lags = [run.peak_reserved for run in simulation.other_lags]
    unsure = outside.spread + round(RESERVED_SPREAD * reserved)
    least = min(reserved, *lags, reserved if simulation.least_reserved is None else simulation.least_reserved)
    low = max(allocated + outside.total - outside.spread, least + outside.total - unsure)
    high = max([reserved, *lags]) + outside.total + unsure
    if usable is None or (high <= usable and not simulation.out_of_memory):
        return RunOnCard(simulation, (low, high))
    doubt = outside.spread + round(ALLOCATED_SPREAD * allocated)
    room = usable - outside.total - doubt
    if allocated <= room and not simulation.out_of_memory:
        limited = simulation.steady_under(room, config, device_memory=case.cluster.vram)
        if limited is not None:
            top = limited.peak_reserved + outside.total
            runs, page = limited.runs, 0
            if config is not None and config.expandable_segments:
                # Measured runs emptied their cache in every step, where the simulation stops after a few.
                page = config.large_segment_size
                if any(len(a.marks) > len(b.marks) for a, b in zip(limited.runs, simulation.runs, strict=True)):
                    runs = simulation.under(room, config, device_memory=case.cluster.vram).runs
            released = CacheRelease.most(CacheRelease.of(run, case.workload.batch.grad_accum, page) for run in runs)
            return RunOnCard(limited, (min(low, top), top + doubt), released)
    fragmented = False
    waiting = bool(lags) and least + outside.total + unsure <= usable
    if (lowest := allocated + outside.total - doubt) <= usable:
        low = min(low, lowest)  # under a limit the allocator caches less, and fragments vary with addresses and timing
        fragmented = reserved + outside.total > usable
    return RunOnCard(simulation, (low, max(high, usable + 1)), fragmented=fragmented, waiting=waiting)


def at_its_limit(case: Case, simulation: Simulation, outside: Outside) -> bool:
    """Return whether a run under the card's limit leaves it less than the error of reserved memory, which fragments decide."""
    usable = case.cluster.usable_vram
    reserved = simulation.peak_reserved
    needed = reserved + outside.total + outside.spread + round(RESERVED_SPREAD * reserved)
    return usable is not None and needed > usable
