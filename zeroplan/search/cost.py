"""A step's predicted time: the engine's traffic lines over the machine's rates, laid side by side where they overlap.

Note [Overlap]
    The host issues kernels ahead of the GPU and never waits within a micro batch. So the backward's kernels are issued once
    the forward's are, and run once the forward has run: a micro batch takes the longest of the device's work, of the host's,
    and of the host's forward before the device's backward. Where something waits for the device after the forward, as a
    loop does that prints each loss or a measurement with marks, each half takes the longer of its two by itself. On the
    device, collectives run beside the computation where the engine overlaps them (stage 3, `overlap_comm`, FSDP2, DDP) and
    after it where it does not (stages 1 and 2 by default). Copies to pinned host memory overlap likewise. Collectives and the
    kernels beside them slow each other down (Note [A step of units]). An optimizer step reads on the host whether
    gradients overflowed, and their norm, so its parts follow each other; but what the host issues before it first waits, as
    stage 1's reduction, it issues while the device still runs the backward. What a full card's allocator returns and takes
    again stops everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, Any

from zeroplan.core.buffers import Phase
from zeroplan.core.cluster import Cluster
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.rates import Rates
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.base import Engine
from zeroplan.engines.compute_traffic import COMPUTE, ComputeFacts
from zeroplan.ledger.traffic import Executor, WorkItem, derived_work, work_items
from zeroplan.ledger.work import Counts, Matrices, matrices
from zeroplan.models.spec import ModelSpec
from zeroplan.search.collectives import RankGroup, fabric_of
from zeroplan.search.unit_time import seconds_beside

if TYPE_CHECKING:
    from zeroplan.core.plan import MemoryPlan


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds. `forward` and `backward` are of one micro batch, `step` of the optimizer; `total` is a whole step.

    `busy` is the whole step's busy time by executor, which adds up to more than `total` where work overlaps; `bound` is what a
    faster step would need most. `slow_host_seconds` are a step's on the slowest host that was calibrated, if a plan was given.
    """

    forward: float
    backward: float
    step: float
    total: float
    tokens_per_second: float
    busy: dict[Executor, float]
    bound: Executor
    slow_host_seconds: float | None = None


class CostModel:
    """Step times of one model on one cluster under one engine; sums over the model's parameters are kept between calls."""

    def __init__(self, engine: Engine, spec: ModelSpec, cluster: Cluster, rates: Rates) -> None:
        self.cluster, self.rates = cluster, rates
        self.traffic = engine.traffic(spec, cluster)
        self.matrices: Matrices = matrices(spec)
        ranks = cluster.layout.world_size
        self.first = spec.parameters.numel[0] / max(1, sum(spec.parameters.numel))
        self.taken = fabric_of(rates, cluster.gpu).taken(RankGroup(ranks, gcd(ranks, cluster.domain)))

    def items(
        self,
        workload: Workload,
        zero: ZeroConfig,
        counts: Counts,
        *,
        plan: MemoryPlan | None = None,
        derive: bool = False,
        rates: Rates | None = None,
    ) -> list[WorkItem]:
        """List every line of work of one configuration, with its formula if `derive`; `rates` may be other than the machine's.

        Without a `plan` the allocator is taken to have room, so the time is a lower bound.
        """
        gpu = None if plan is None else plan.gpu
        remapped = (0, 0, 0) if gpu is None else (gpu.segments_remapped, gpu.bytes_remapped, gpu.pages_remapped)
        compute = ComputeFacts(self.matrices, counts, workload, remapped)
        own, ledger, rates = self.traffic.facts(compute, workload, zero), self.traffic.ledger, rates or self.rates
        if derive:
            return [*derived_work(COMPUTE, compute, rates), *derived_work(ledger, own, rates)]
        return work_items(COMPUTE, compute, rates) + work_items(ledger, own, rates)

    def step_time(
        self, workload: Workload, zero: ZeroConfig, counts: Counts, *, plan: MemoryPlan | None = None, marked: bool = False
    ) -> StepTime:
        """Predict the time of one optimizer step; arguments as of :meth:`items` and :func:`compose`."""
        time = self.composed(self.items(workload, zero, counts, plan=plan), workload, zero, marked=marked)
        if plan is None:
            return time
        slow = self.items(workload, zero, counts, plan=plan, rates=self.rates.on_slow_host())
        return replace(time, slow_host_seconds=self.composed(slow, workload, zero, marked=marked).total)

    def composed(self, items: Sequence[WorkItem], workload: Workload, zero: ZeroConfig, *, marked: bool = False) -> StepTime:
        """Lay lines of work side by side as this engine and these GPUs do; arguments as of :func:`compose`."""
        overlap, layout = self.traffic.overlaps(zero), self.cluster.layout
        return compose(items, workload, overlap, layout, marked=marked, taken=self.taken, unhidden=self.first)

    def facts(self, workload: Workload, zero: ZeroConfig, counts: Counts) -> tuple[Any, Any]:
        """Return the facts that the lines read: the computation's, and the engine's."""
        compute = ComputeFacts(self.matrices, counts, workload)
        return compute, self.traffic.facts(compute, workload, zero)


#: No second of work for any executor.
_IDLE = dict.fromkeys(Executor, 0.0)


def compose(
    items: Sequence[WorkItem],
    workload: Workload,
    overlap: bool,
    layout: ParallelLayout,
    *,
    marked: bool = False,
    taken: float = 0.0,
    unhidden: float = 0.0,
) -> StepTime:
    """Lay the lines of work side by side. See Note [Overlap].

    Args:
        items: the lines of one micro batch's forward and backward, and of a step.
        workload: for the tokens, and how often a micro batch is run.
        overlap: whether collectives and copies run beside the computation.
        layout: for the samples of a step.
        marked: whether the host waits for the device after each forward and backward.
        taken: the part of the multiprocessors that the kernels of collectives keep.
        unhidden: the part of a forward's gathers that nothing can run beside: those of its first parameter.
    """
    busy = {Phase.FORWARD: _IDLE.copy(), Phase.BACKWARD: _IDLE.copy(), Phase.STEP: _IDLE.copy()}
    ahead = _IDLE.copy()
    for item in items:
        executor = item.resource.executor
        busy[item.phase][executor] += item.seconds
        if item.ahead:
            ahead[executor] += item.seconds

    def device(work: dict[Executor, float]) -> float:
        gpu, link, side = work[Executor.GPU], work[Executor.LINK], (work[Executor.PCIE], work[Executor.DISK])
        if not overlap:
            return gpu + link + sum(side)
        lasts = seconds_beside(link, gpu)
        alone = unhidden * link if work is busy[Phase.FORWARD] else 0.0
        return max(alone + gpu + taken * min(gpu, lasts), lasts, *side)

    first, second = busy[Phase.FORWARD], busy[Phase.BACKWARD]
    forward, backward = max(first[Executor.PYTHON], device(first)), max(second[Executor.PYTHON], device(second))
    lag = backward - second[Executor.PYTHON]
    if not marked:
        issued = first[Executor.PYTHON] + max(second[Executor.PYTHON], device(second))
        backward = max(issued, device(first) + device(second)) - forward
        lag = forward + backward - first[Executor.PYTHON] - second[Executor.PYTHON]
    last = busy[Phase.STEP]
    # Disk and host work in a pipeline of sub-groups; what the link and the GPU do comes before or after.
    step = (
        last[Executor.PYTHON]
        + last[Executor.GPU]
        + last[Executor.LINK]
        + last[Executor.PCIE]
        + max(last[Executor.HOST], last[Executor.DISK])
    )
    step += last[Executor.STALL] - min(ahead[Executor.PYTHON], lag + ahead[Executor.GPU] + ahead[Executor.LINK])
    count = workload.batch.grad_accum
    total = count * (forward + backward) + step
    whole = {executor: count * (first[executor] + second[executor]) + last[executor] for executor in _IDLE}
    tokens = workload.batch.micro_batch * (workload.batch.seq_len or 0) * count * layout.dp
    bound = max(whole, key=whole.__getitem__)
    return StepTime(forward, backward, step, total, tokens / total if total else 0.0, whole, bound)
