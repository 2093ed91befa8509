"""Suggestions when nothing fits: the nearest miss, and the cheapest changes that would make it fit, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.sizes import GIB, TIB
from zeroplan.planner.adapters import with_adapters
from zeroplan.planner.relief import keeps_logits
from zeroplan.run.ask import Ask
from zeroplan.search.cost import CostModel
from zeroplan.search.memory import Memory
from zeroplan.search.policy import FAR, NAMED, TRIES
from zeroplan.search.recommend import Ranked, search
from zeroplan.search.results import Recommendation, Suggestion, recommendation
from zeroplan.search.search_options import ResolvedSearch, SearchOptions, candidates_of, resolve_search
from zeroplan.search.space import Candidate
from zeroplan.techniques.chunked_head import ChunkedHeadTechnique

#: Host memory a GPU of rented nodes with cards for training, in GiB.
_HOST = 256
#: Memories of cards that are sold, in GiB.
_CARDS = (16, 24, 32, 40, 48, 80, 141, 180)


def nearest_miss(space: Sequence[Candidate], memory: Memory, cost: CostModel) -> Ranked:
    """Find the candidate that exceeds its worst limit by the least."""
    lightest: dict[object, Candidate] = {}
    for candidate in sorted(space, key=lambda c: (_lack_of_floors(c, memory), memory.floor(c), c.effort)):
        lightest.setdefault(candidate.family, candidate)
    tried = [c for c in list(lightest.values()) if memory.runnable(c)][:TRIES]
    if tried and _lack_of_floors(tried[0], memory) > FAR:
        del tried[1:]
    ranked = [Ranked(c, cost.step_time(c.workload, c.zero, memory.counts(c)), memory.plan(c)) for c in tried]
    return min(ranked, key=lambda r: lack(r, memory))


def lack(ranked: Ranked, memory: Memory) -> float:
    """Return what the candidate needs over the limit that it exceeds most; 1.0 is just enough."""
    plan, cluster = ranked.plan, memory.cluster
    high = plan.gpu.interval[1] if plan.gpu.interval else max(plan.gpu.needed, memory.floor(ranked.candidate))
    over = [high / cluster.usable_vram] if cluster.usable_vram else []
    over += [plan.cpu.per_node / cluster.usable_cpu_ram] if cluster.usable_cpu_ram else []
    over += [plan.nvme.per_node / cluster.nvme] if cluster.nvme else []
    return max(over, default=0.0)


def _lack_of_floors(candidate: Candidate, memory: Memory) -> float:
    cluster = memory.cluster
    host, disk = memory.host_floor(candidate)
    over = [memory.floor(candidate) / cluster.usable_vram] if cluster.usable_vram else []
    over += [host / cluster.usable_cpu_ram] if cluster.usable_cpu_ram else []
    over += [disk / cluster.nvme] if cluster.nvme else []
    return max(1.0, max(over, default=0.0))


@dataclass(frozen=True, slots=True)
class _Option:
    what: str
    request: Ask
    options: SearchOptions
    last: bool = False  # of a row of ever larger steps; the first that fits ends the row
    row: str = ""


def _adapters(request: Ask, options: SearchOptions) -> Iterator[_Option]:
    for what, flags, changed in with_adapters(request):
        yield _Option(f"{what} ({flags})", changed, options)


def adapters_that_fit(resolved: ResolvedSearch, request: Ask, options: SearchOptions) -> Iterator[Suggestion]:
    """Yield LoRA and QLoRA where they surely fit, as fast as they can be: what to do where all weights may fit at most."""
    for option in _adapters(request, options) if resolved.workload.lora_rank is None else ():
        if (found := _changed(option)) is None:
            continue
        changed, space, memory, cost = found
        for ranked in search(space, memory, cost, shown=1).ranking[:1]:
            if ranked.plan.fits:
                yield Suggestion(option.what, recommendation(changed.engine, ranked, 0, changed.cluster.layout))


def _options(resolved: ResolvedSearch, request: Ask, options: SearchOptions, nearest: Recommendation) -> Iterator[_Option]:
    """Yield the changes, the cheapest first: those that cost a flag, then quality, then money."""
    cluster, workload = resolved.cluster, resolved.workload
    if ChunkedHeadTechnique().available(resolved.engine, workload) and keeps_logits(nearest.plan):
        key = ChunkedHeadTechnique().key(resolved.engine, options.program or "") or ChunkedHeadTechnique.where
        yield _Option(f"head and loss in tiles ({key})", request.replace(chunked_head=True), options)
    eight_bit = find_optimizer(workload.numerics.optimizer).eight_bit
    if eight_bit and workload.lora_rank is None:
        yield _Option(f"8-bit AdamW (--optimizer {eight_bit})", request.replace(optimizer=eight_bit), options)
    if workload.lora_rank is None:
        yield from _adapters(request, options)
    seq = workload.batch.seq_len or 0
    for parts in (2, 4):
        if seq // parts >= 512:
            shorter = request.replace(seq_len=seq // parts)
            yield _Option(f"sequences of {seq // parts} (--seq-len {seq // parts})", shorter, options, row="seq")
    if cluster.nvme is None:
        yield _Option("2 TiB of disk a node (--nvme 2T)", request.replace(nvme=2 * TIB), options)
    need = nearest.plan.cpu.per_node
    if cluster.usable_cpu_ram is not None and need > cluster.usable_cpu_ram:
        size = 64 * GIB
        while size - cluster.host.share(size) < 1.05 * need:
            size *= 2
        yield _Option(f"{size // GIB} GiB of host memory a node", request.replace(cpu_ram=size), options)
    host = cluster.cpu_ram or 0
    for factor in (2, 4, 8):
        gpus = cluster.gpus * factor
        if gpus <= 8 and (options.global_batch or gpus * cluster.nodes) % (gpus * cluster.nodes) == 0:
            more = request.replace(gpus=gpus, cpu_ram=host * factor)
            yield _Option(f"{gpus} GPUs a node (--gpus {gpus}) with as much host memory each", more, options, row="gpus")
    for nodes in (2, 4, 8, 16) if cluster.gpus >= 8 else ():
        if (options.global_batch or 0) % (cluster.gpus * nodes) == 0 and nodes > cluster.nodes:
            yield _Option(f"{nodes} such nodes (--nodes {nodes})", request.replace(nodes=nodes), options, row="nodes")
    for size in _CARDS:
        if cluster.vram is not None and size * GIB > cluster.vram:
            yield _Option(f"cards of {size} GiB (--vram {size}G)", request.replace(vram=size * GIB), options, row="vram")


#: Machines that one can rent: GPUs a node and nodes.
_MACHINES = ((1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 4), (8, 8), (8, 16), (8, 32))


def _machines(cluster: Cluster, request: Ask, options: SearchOptions) -> Iterator[_Option]:
    """Yield whole machines, those with the least memory first: several things at once, where no change by itself is enough."""
    sizes = [(gpus * nodes * card, gpus, nodes, card) for gpus, nodes in _MACHINES for card in _CARDS]
    least = cluster.gpus * cluster.nodes * (cluster.vram or 0) / GIB
    for whole, gpus, nodes, card in sorted(sizes):
        if whole <= least or gpus * nodes < cluster.gpus * cluster.nodes:
            continue
        machine = request.replace(gpus=gpus, nodes=nodes, vram=card * GIB, cpu_ram=gpus * _HOST * GIB, gpu=None)
        count = f"{gpus} GPUs" if gpus > 1 else "1 GPU"
        what = f"{nodes} nodes of {count}" if nodes > 1 else count
        yield _Option(f"{what} of {card} GiB with {gpus * _HOST} GiB of host memory a node", machine, options, row="machine")


def cheapest_suggestions(
    resolved: ResolvedSearch, request: Ask, options: SearchOptions, nearest: Recommendation, memory: Memory
) -> Iterator[Suggestion]:
    """Yield the changes that make the model fit, cheapest first, each with the configuration that needs the least.

    `memory` is that of the resolved: whatever trains the same parameters shares its tapes.
    """
    done: set[str] = set()
    named = 0
    for option in _options(resolved, request, options, nearest):
        if named >= NAMED:
            return
        if option.row and option.row in done:
            continue
        found = _least(option, memory if _same_model(option.request, request) else None)
        if found is not None:
            done.add(option.row)
            named += 1
            yield Suggestion(option.what, found)
    if named:
        return
    for option in _machines(resolved.cluster, request, options):
        found = _least(option, None)
        if found is not None:
            yield Suggestion(option.what, found)
            return


def _same_model(one: Ask, two: Ask) -> bool:
    """Return whether two requests train the same parameters, so that tapes can be shared."""
    names = ("lora_rank", "lora_targets", "gpu", "quantize", "engine", "chunked_head")
    return all(one.values.get(name) == two.values.get(name) for name in names)


def _changed(
    option: _Option, base: Memory | None = None
) -> tuple[ResolvedSearch, Sequence[Candidate], Memory, CostModel] | None:
    """Return the search after a change, whose plans share the tapes of `base`; None where the change is refused."""
    try:
        changed = resolve_search(option.request, option.options)
        space = candidates_of(changed, option.request, option.options)
    except BadInput:
        return None
    if base is None:
        memory = Memory(changed.engine, changed.spec, changed.cluster, depth=option.request.depth)
    else:
        memory = base.on(changed.cluster)
    return changed, space, memory, CostModel(changed.engine, memory.spec, changed.cluster, changed.rates)


def _least(option: _Option, base: Memory | None) -> Recommendation | None:
    """Find a configuration that fits after the change, the lightest by its floor first; None when none of the lightest does."""
    if (search_after := _changed(option, base)) is None:
        return None
    changed, space, memory, cost = search_after
    likely = sorted((c for c in space if not memory.cannot_fit(c)), key=lambda c: (memory.floor(c), c.effort))
    lightest: dict[object, Candidate] = {}
    for candidate in likely:
        lightest.setdefault(candidate.family, candidate)
    for candidate in [c for c in lightest.values() if memory.runnable(c)][:TRIES]:
        try:
            plan = memory.plan(candidate)
        except BadInput:  # the model's head is another than the engine's tiles take
            return None
        if memory.may_fit(plan, candidate):
            time = cost.step_time(candidate.workload, candidate.zero, memory.counts(candidate))
            return recommendation(changed.engine, Ranked(candidate, time, plan), 0, changed.cluster.layout)
    return None
