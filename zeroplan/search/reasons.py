"""Reasons for the first choice: what stands beside it, what each of its choices costs, and what more hardware would buy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.plan import MemoryPlan
from zeroplan.core.sizes import format_bytes, format_gib
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import OffloadDevice, OffloadOptimizer, OffloadParam, ZeroConfig
from zeroplan.engines.words import sharding_text
from zeroplan.ledger.traffic import Executor
from zeroplan.planner.limit import RESERVED_SPREAD
from zeroplan.planner.relief import keeps_logits
from zeroplan.run.ask import Ask
from zeroplan.search.cost import CostModel
from zeroplan.search.memory import Memory
from zeroplan.search.policy import EQUAL, EQUALLY_FAST, HOST_DECIDES, MORE_VRAM, NOTABLE, TRIES, WHAT_IF
from zeroplan.search.recommend import Ranked, SearchOutcome, headroom, plainest, planned, search
from zeroplan.search.results import Point
from zeroplan.search.search_options import ResolvedSearch, SearchOptions, candidates_of
from zeroplan.search.space import Candidate
from zeroplan.techniques.chunked_head import ChunkedHeadTechnique
from zeroplan.techniques.liger import LigerTechnique

#: GPUs of the nodes that one can rent.
_NODES = (1, 2, 4, 8)
#: The part of the card below which what is left is named: as much as reserved memory was off (planner/limit.py).
_LITTLE = RESERVED_SPREAD
#: The part of the card that must be left at the interval's low end for its cause to be the host's lead: errors of reserved
#: memory, two of them at the most between a run that just fills the card and that end, and of what is outside torch.
_CLEAR = 3 * RESERVED_SPREAD
_BOUND = {
    Executor.PYTHON: "the host issues kernels and hooks more slowly than the GPU runs them: "
    "a larger micro batch costs little time",
    Executor.GPU: "the GPU's own computation decides",
    Executor.LINK: "traffic between the GPUs decides",
    Executor.PCIE: "copies between GPU and host decide",
    Executor.HOST: "the optimizer's step on the host decides",
    Executor.DISK: "the disk decides",
    Executor.STALL: "the allocator, which returns memory and takes it again in each step, decides",
}


def name_of(engine: str, zero: ZeroConfig, workload: Workload | None = None) -> str:
    """Name a configuration: ``"ZeRO-3, optimizer on cpu, checkpointing, blocks compiled"``."""
    device = zero.offload_param.device if zero.offloads_param else OffloadDevice.NONE
    text = sharding_text(engine, zero.stage, zero.offload_optimizer.device, device)
    if workload is not None:
        text += ", checkpointing" if workload.gradient_checkpointing else ", no checkpointing"
        text += f", {workload.compile} compiled" if workload.compile is not None else ""
    return text


#: How sentences begin that bear on which one to take, the most important first.
CHOICES = (
    "at most",
    "as fast without offload",
    "the roomiest as fast",
    "head and loss in tiles",
    "on a slow host",
    "the plainest as fast",
)


def choice(ranking: Sequence[Ranked], space: Sequence[Candidate], memory: Memory, cost: CostModel) -> list[str]:
    """Say which simpler one is nearly as fast; and if little of the card is left, how little, and which leaves the most."""
    best, said = ranking[0], []
    spare = headroom(best.plan)
    if spare is not None and 0 <= spare < _LITTLE:
        said.append(f"at most {100 * spare:.1f} % of the card is left: nothing else may use it")
        roomy = _roomiest(ranking, space, memory, cost)
        left = None if roomy is None else headroom(roomy.plan)
        if roomy is not None and left is not None and left - spare >= _LITTLE:
            said.append(f"the roomiest as fast is {_named(roomy)}: it leaves {100 * left:.0f} %, and {_loss(roomy, best)}")
    slow = best.time.slow_host_seconds
    if slow is not None and slow > HOST_DECIDES * best.time.total:
        speed = best.time.tokens_per_second * best.time.total / slow
        said.append(f"on a slow host it is {speed:,.0f} tokens/s: zeroplan doctor --calibrate measures this one's")
    simple = plainest(ranking)
    if simple is not best:
        spares = best.candidate.zero.offload_optimizer and not simple.candidate.zero.offload_optimizer
        said.append(
            f"{'as fast without offload' if spares else 'the plainest as fast'} is {_named(simple)}: it {_loss(simple, best)}"
        )
    return said


def _named(one: Ranked) -> str:
    label = label_of(one.plan.engine, one.candidate.zero, one.candidate.workload)
    return f"{label} with {one.candidate.alloc_conf}" if one.candidate.alloc_conf else label


def _loss(one: Ranked, best: Ranked) -> str:
    lost = 1 - one.time.tokens_per_second / best.time.tokens_per_second
    if lost < EQUAL:
        return "is as fast"
    if (enough := _enough(one.plan)) is not None and one.plan.gpu.cache_emptied:
        return f"costs up to {100 * lost:.1f} % of the speed, and that only if the card fills ({_size(enough)} may do)"
    return f"costs {100 * lost:.1f} % of the speed"


def _enough(plan: MemoryPlan) -> int | None:
    """Return the bytes that a run which fills the card may get by with, where they leave it room; None where they do not.

    Freed blocks wait for the streams that used them, so the further the host runs ahead, the more of them wait. That lead is
    uncertain (engines/simulation.py, `other_lags`); the plan's interval begins at the shortest.
    """
    gpu = plan.gpu
    if not gpu.at_limit or not gpu.usable or gpu.interval is None:
        return None
    return gpu.interval[0] if gpu.interval[0] < (1 - _CLEAR) * gpu.usable else None


def _roomiest(ranking: Sequence[Ranked], space: Sequence[Candidate], memory: Memory, cost: CostModel) -> Ranked | None:
    """Return what leaves the most of the card among all that fit and are as fast as the first but for :data:`EQUALLY_FAST`:
    those of the ranking, and the lightest of the space by their floors, simulated.
    """
    least = (1 - EQUALLY_FAST) * ranking[0].time.tokens_per_second
    near = [
        candidate
        for candidate in space
        if not memory.cannot_fit(candidate)
        and cost.step_time(candidate.workload, candidate.zero, memory.counts(candidate)).tokens_per_second >= least
    ]
    lightest = sorted(near, key=lambda one: (memory.floor(one), not one.alloc_conf))[:TRIES]
    tried = [planned(one, memory, cost) for one in lightest if memory.runnable(one)]
    found = [one for one in (*ranking, *tried) if one.fits and one.time.tokens_per_second >= least]
    return max(found, key=lambda one: headroom(one.plan) or 0.0, default=None)


def reasons_for(best: Ranked, space: Sequence[Candidate], memory: Memory, cost: CostModel) -> list[str]:
    """Sentences on the stages beside it, on what its offload and checkpointing cost, and on what its time is made of."""
    return [*_faster_that_do_not_fit(best, space, memory, cost), *_costs(best, memory, cost), _bound(best), *_full_card(best)]


def _faster_that_do_not_fit(best: Ranked, space: Sequence[Candidate], memory: Memory, cost: CostModel) -> list[str]:
    """Say of three faster families lightest candidate what it would gain, and what it lacks."""
    limit = memory.cluster.usable_vram or 0
    lightest: dict[object, tuple[int, float, Candidate]] = {}
    for candidate in space:
        if candidate.family == best.candidate.family:
            continue
        time = cost.step_time(candidate.workload, candidate.zero, memory.counts(candidate))
        if time.tokens_per_second <= NOTABLE * best.time.tokens_per_second:
            continue
        floor = memory.floor(candidate)
        old = lightest.get(candidate.family)
        if old is None or floor < old[0]:
            lightest[candidate.family] = (floor, time.tokens_per_second, candidate)
    said = []
    for floor, speed, candidate in sorted(lightest.values(), key=lambda entry: entry[0])[:3]:
        gain = f"{100 * (speed / best.time.tokens_per_second - 1):.0f} % faster"
        name = label_of(memory.engine.name, candidate.zero, candidate.workload)
        if floor > limit:
            digits = 1 if _size(floor) != _size(limit) else 3
            needs, usable = format_bytes(floor, digits=digits), format_gib(limit, digits=digits)
            said.append(f"{name} would be {gain} and needs {needs} a GPU at least, of {usable} usable")
            continue
        plan = memory.plan(candidate)
        if plan.fits is False:
            lacks = " and ".join({"gpu": "GPU", "cpu": "host", "nvme": "disk"}[m] for m in plan.misfits)
            high = f"; up to {_size(plan.gpu.interval[1])} a GPU" if plan.gpu.interval else ""
            said.append(f"{name} would be {gain} and does not fit ({lacks} memory{high})")
    return said


def _costs(best: Ranked, memory: Memory, cost: CostModel) -> list[str]:
    """Say what each offload, checkpointing and compiled graphs add to a step, all else alike."""
    candidate, total = best.candidate, best.time.total
    zero, workload = candidate.zero, candidate.workload

    def without(**changes: object) -> float:
        other = replace(candidate, zero=replace(zero, **changes))  # type: ignore[arg-type]
        return cost.step_time(workload, other.zero, memory.counts(other)).total

    said = []
    if zero.offloads_param:
        gained = total - without(offload_param=OffloadParam())
        does = "cost" if gained >= 0 else "save"
        why = "" if gained >= 0 else ": their updates are cast where they lie, without a new copy on the host"
        where = zero.offload_param.device
        said.append(f"parameters on {where} {does} {_seconds(abs(gained))} of {_seconds(total)} a step{why}")
    if zero.offload_optimizer:
        gained = total - without(offload_optimizer=OffloadOptimizer(), offload_param=OffloadParam())
        both = "all offload costs" if zero.offloads_param else f"the optimizer on {zero.offload_optimizer.device} costs"
        said.append(f"{both} {_seconds(gained)} of {_seconds(total)} a step")
    if workload.gradient_checkpointing:
        kept = replace(candidate, workload=workload.checkpointed(False))
        gained = total - cost.step_time(kept.workload, zero, memory.counts(kept)).total
        need = memory.floor(kept) - memory.floor(candidate)
        said.append(f"checkpointing costs {_seconds(gained)} of {_seconds(total)} a step and saves at least {_size(need)}")
    if workload.compile is not None:
        eager = replace(candidate, workload=workload.compiled(None))
        gained = cost.step_time(eager.workload, zero, memory.counts(eager)).total - total
        said.append(f"compiled graphs save {_seconds(gained)} a step, as their kernels are counted")
    return said


def _bound(best: Ranked) -> str:
    busy = best.time.busy
    busiest = best.time.bound
    share = 100 * busy[busiest] / best.time.total
    return f"{_BOUND[busiest]} ({min(share, 100):.0f} % of the step)"


def _full_card(best: Ranked) -> list[str]:
    """Say what it means that the allocator has no room to spare."""
    gpu = best.plan.gpu
    if not gpu.at_limit:
        return []
    enough = _enough(best.plan)
    text = "it fills the card: the allocator gets by with less than it would take by itself"
    if gpu.cache_emptied:
        stalls = _seconds(best.time.busy[Executor.STALL])
        text += f", empties its cache {gpu.cache_emptied} × a step and so costs {'' if enough is None else 'up to '}{stalls}"
    if enough is not None:
        text += f"; {_size(enough)} may do, where the host runs less far ahead and fewer freed blocks wait for a stream"
    return [text]


def _size(count: int) -> str:
    return format_bytes(count, digits=1)


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if abs(value) >= 0.1 else f"{1000 * value:.0f} ms"


def what_tiles_buy(resolved: ResolvedSearch, request: Ask, options: SearchOptions, best: Ranked) -> list[str]:
    """Say what head and loss in tiles would make of the step, where logits and loss are a large part of the best's peak."""
    head = ChunkedHeadTechnique()
    if not keeps_logits(best.plan) or not head.available(resolved.engine, resolved.workload):
        return []
    work = resolved.workload.with_techniques(head.under(resolved.engine))
    tiled = replace(resolved, workload=work, engine=resolved.engine.for_workload(work))
    memory = Memory(tiled.engine, tiled.spec, tiled.cluster, depth=request.depth)
    try:
        found = _best_of(tiled, request, options, memory)
    except BadInput:  # the model's head is another than the engine's tiles take
        return []
    if found is None or found.time.tokens_per_second < NOTABLE * best.time.tokens_per_second:
        return []
    gain = found.time.tokens_per_second / best.time.tokens_per_second
    key = head.key(resolved.engine, options.program or "") or f"{head.where}, as TRL's; Liger's: {LigerTechnique.where}"
    return [f"head and loss in tiles ({key}) make it {gain:.2f} × as fast ({_named(found)})"]


def what_more_buys(resolved: ResolvedSearch, request: Ask, options: SearchOptions, best: Ranked, memory: Memory) -> list[str]:
    """Say what 8 GiB more a GPU, and the next larger node or number of nodes, would make of the step."""
    cluster = resolved.cluster
    assert cluster.vram is not None
    said = []
    wider = next((count for count in _NODES if count > cluster.gpus), None)
    if wider is None or cluster.nodes > 1:
        more, what_more = replace(cluster, nodes=2 * cluster.nodes), f"{2 * cluster.nodes} nodes"
    else:
        more, what_more = cluster.resized(wider), f"{wider} GPUs a node"
    larger = replace(cluster, vram=cluster.vram + MORE_VRAM)
    for what, grown in (("8 GiB more a GPU", larger), (what_more, more)):
        found = _best_on(grown, resolved, request, options, memory)
        if found is None:
            continue
        gain = found.time.tokens_per_second / best.time.tokens_per_second
        if gain < NOTABLE:
            said.append(f"{what} would gain nothing")
            continue
        name = name_of(memory.engine.name, found.candidate.zero, found.candidate.workload)
        said.append(
            f"{what} would make it {gain:.2f} × as fast ({name}, micro batch {found.candidate.workload.batch.micro_batch})"
        )
    return said


def _best_on(cluster: Cluster, resolved: ResolvedSearch, request: Ask, options: SearchOptions, memory: Memory) -> Ranked | None:
    return _best_of(replace(resolved, cluster=cluster), request, options, memory.on(cluster))


def _best_of(resolved: ResolvedSearch, request: Ask, options: SearchOptions, memory: Memory) -> Ranked | None:
    """Return the best that few simulations find of another run; None if there is none."""
    try:
        space = candidates_of(resolved, request, options)
    except BadInput:  # the batch does not divide by these ranks and what is fixed
        return None
    cost = CostModel(resolved.engine, resolved.spec, resolved.cluster, resolved.rates)
    outcome = search(space, memory, cost, shown=1, most=WHAT_IF, strict=True)
    return outcome.ranking[0] if outcome.ranking else None


def label_of(engine: str, zero: ZeroConfig, workload: Workload) -> str:
    """Name a configuration as its point does: ``"ZeRO-3, checkpointing, micro batch 2"``."""
    return f"{name_of(engine, zero, workload)}, micro batch {workload.batch.micro_batch}"


def points(space: Iterable[Candidate], outcome: SearchOutcome, memory: Memory, cost: CostModel) -> list[Point]:
    """The picture of memory against speed: what was simulated, and of every other family its lightest floor."""
    found = []
    seen = set()
    for ranked in (*outcome.ranking, *outcome.misses):
        plan, candidate = ranked.plan, ranked.candidate
        high = plan.gpu.interval[1] if plan.gpu.interval else max(plan.gpu.needed, memory.floor(candidate))
        label = label_of(memory.engine.name, candidate.zero, candidate.workload)
        found.append(Point(label, high, ranked.time.tokens_per_second, plan.fits is not False and not plan.undecided, False))
        seen.add((candidate.family, candidate.workload.batch.micro_batch))
    for candidate in space:
        key = (candidate.family, candidate.workload.batch.micro_batch)
        if key not in seen and candidate.effort % 4 == 0:
            seen.add(key)
            time = cost.step_time(candidate.workload, candidate.zero, memory.counts(candidate))
            label = label_of(memory.engine.name, candidate.zero, candidate.workload)
            found.append(Point(label, memory.floor(candidate), time.tokens_per_second, False, True))
    return found
