"""Whether a run gets through on its card.

Note [Under the limit]
    Peak reserved memory is what the caching allocator takes where it may take what it likes. On a card it cannot: when the
    device has no more, it returns cached segments and asks again. So a run gets through when its simulation *under the
    card's limit* does: with what the card leaves to torch, less how far the figures may be off. The interval's upper end of
    such a plan is that limited run's total with the same doubt, which is at most what is usable; where the limited run ends
    out of memory it is the unlimited run's, which is above. So `fits` still compares the upper end with the usable memory.
    It has to get through for good: it is played on until it settles (simulate/steady_state.py), for a run that empties its
    cache in each step meets other pieces in each. Where the device's pace decides when freed blocks come back (stage 3 among
    several ranks), it has to at both ends of what that pace may be, and without emptying its cache any more, since no two
    steps of it are timed alike; and the interval reaches from the lower of the two to the higher.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroplan.engines.base import Case
from zeroplan.engines.process import Outside
from zeroplan.engines.simulation import Simulation
from zeroplan.simulate.allocator.config import AllocatorConfig
from zeroplan.simulate.cache_release import NO_RELEASE, CacheRelease

#: How far reserved memory was off on nine of ten measured runs (benchmarks/results/accuracy.json): which cached block a
#: request lands in hangs on details of timing that no schedule fixes.
RESERVED_SPREAD = 0.03
#: The same of allocated memory, at worst: under a limit the allocator cannot hold more than it must, so this decides there.
ALLOCATED_SPREAD = 0.002


@dataclass(frozen=True, slots=True)
class Held:
    """A run held against a card.

    Attributes:
        simulation: the run whose figures count: the limited one where it gets through and the limit is felt.
        interval: of the total, in bytes.
        released: what the limited run's allocator returns and takes again in each step.
    """

    simulation: Simulation
    interval: tuple[int, int]
    released: CacheRelease = NO_RELEASE


def held_to(case: Case, simulation: Simulation, outside: Outside, config: AllocatorConfig | None = None) -> Held:
    """The run as it goes on the case's card. See Note [Under the limit].

    Args:
        case: for the card.
        simulation: the run without a limit.
        outside: what the process takes beside torch's allocator.
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
        return Held(simulation, (low, high))
    doubt = outside.spread + round(ALLOCATED_SPREAD * allocated)
    room = usable - outside.total - doubt
    if allocated <= room and not simulation.out_of_memory:
        limited = simulation.steady_under(room, config, device_memory=case.cluster.vram)
        if limited is not None:
            top = limited.peak_reserved + outside.total
            runs, page = limited.runs, 0
            if config is not None and config.expandable_segments:
                # Measured runs went on emptying their cache in each step where the simulation settles after a few.
                page = config.large_segment_size
                if any(len(a.marks) > len(b.marks) for a, b in zip(limited.runs, simulation.runs, strict=True)):
                    runs = simulation.under(room, config, device_memory=case.cluster.vram).runs
            released = CacheRelease.most(CacheRelease.of(run, case.workload.grad_accum, page) for run in runs)
            return Held(limited, (min(low, top), top + doubt), released)
    return Held(simulation, (low, max(high, usable + 1)))
