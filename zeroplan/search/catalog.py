"""The largest models of the catalog that a machine can train, by method, and the fastest way to train the largest in full."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.plan import MemoryPlan
from zeroplan.models import catalog
from zeroplan.planner.adapters import QUANTIZED_ENGINE, RANK
from zeroplan.planner.describe import describe_cluster
from zeroplan.planner.fit import ACTIVATIONS
from zeroplan.run.ask import Ask
from zeroplan.search.api import run_search
from zeroplan.search.cost import CostModel
from zeroplan.search.memory import Memory
from zeroplan.search.recommend import Ranked
from zeroplan.search.results import Recommendation, SearchResult, recommendation
from zeroplan.search.search_options import ResolvedSearch, SearchOptions, candidates_of, resolve_search
from zeroplan.search.space import Candidate
from zeroplan.techniques.lora import LoraTechnique

#: Models that a method shows, and simulations that each may take.
_SHOWN = 3
_TRIES = 2


@dataclass(frozen=True, slots=True)
class Method:
    """A way to train, by its name in JSON and as a sentence says it.

    `gpu_bytes` and `host_bytes` are the least bytes a parameter, over all ranks, that it takes there; `quantize` is the format
    of the frozen base, in place of the model's dtype.
    """

    name: str
    how: str
    offload: bool
    lora: bool
    gpu_bytes: float
    host_bytes: int
    quantize: str | None = None


#: Full: 16-bit parameters and gradients, fp32 master and two moments (K = 12). Offloaded: all of it on the host.
METHODS = (
    Method("full", "in full", False, False, 14, 0),
    Method("full, offload", "in full with offload", True, False, 0, 16),
    Method("LoRA", "by LoRA", False, True, 2, 0),
    Method("LoRA, offload", "by LoRA with offload", True, True, 0, 2),
    Method("QLoRA", "by QLoRA", False, True, 0.5, 0, "nf4"),
)
#: By model, whether adapters are trained, and the base's format.
Known = dict[tuple[str, bool, str | None], Memory]


@dataclass(frozen=True, slots=True)
class MethodRow:
    """One method's largest models that fit, largest first: those that are larger than any that a plainer method trains.

    `fits` is whether any model of the catalog fits by it.
    """

    method: Method
    found: tuple[tuple[str, int, Recommendation], ...]
    fits: bool


@dataclass(frozen=True, slots=True)
class Overview:
    """The models that a machine can train. `best` answers for the largest full fine-tune, None when not even that fits.

    `cluster` is the machine as the report's JSON holds it.
    """

    rows: tuple[MethodRow, ...]
    cluster: dict[str, Any]
    best: SearchResult | None
    warnings: tuple[str, ...]


def overview(request: Ask, options: SearchOptions | None = None) -> Overview:
    """Find the largest pretrained models by method, at one sequence a GPU with checkpointing, and the answer for the largest.

    Raises:
        BadInput: a value that cannot be used.
    """
    if "quantize" in request:
        raise BadInput("is the base of one model", where="--quantize", remedy="name the model")
    if "compile" in request:
        raise BadInput("makes graphs of one model", where="--compile", remedy="name the model")
    options = options or SearchOptions()
    entries = sorted((entry for entry in catalog.entries() if entry.pretrained), key=lambda e: -e.params)
    smallest = resolve_search(request.replace(model=entries[-1].id), options)
    candidates_of(smallest, request, options)  # what the batch cannot be, before the models are gone through
    known: Known = {}
    rows: tuple[MethodRow, ...] = ()
    for method in METHODS:  # the plainest first: another is for larger models
        found = tuple(_largest(method, entries, request, options, smallest.cluster, known))
        plainer = (row for row in rows if method.offload or not row.method.offload)
        beyond = max((entry[1] for row in plainer for entry in row.found), default=0)
        rows += (MethodRow(method, tuple(entry for entry in found if entry[1] > beyond), bool(found)),)
    full = [entry for row in rows[:2] for entry in row.found[:1]]
    best = None
    if full:
        name = max(full, key=lambda entry: entry[1])[0]
        best = run_search(request.replace(model=name), options)
    return Overview(rows, describe_cluster(smallest.cluster), best, tuple(smallest.warnings))


def _largest(
    method: Method, entries: list[catalog.Entry], request: Ask, options: SearchOptions, limits: Cluster, known: Known
) -> Iterator[tuple[str, int, Recommendation]]:
    found = 0
    shapes: set[int] = set()
    for entry in entries:
        if found >= _SHOWN:
            return
        if entry.params in shapes:
            continue  # the same shapes under another name
        resolved = _resolved(method, entry, request, options, limits)
        if resolved is None:
            continue
        shapes.add(entry.params)
        one = _fits(*resolved, _memory(resolved[0], (entry.id, method.lora, method.quantize), known))
        if one is not None:
            found += 1
            yield entry.id, entry.params, one


def engine_of(method: Method, request: Ask) -> str:
    """Return the engine that trains by the method: the one asked for, or the one whose quantised bases a GPU has measured."""
    return request.engine if method.quantize is None else QUANTIZED_ENGINE


def _resolved(
    method: Method, entry: catalog.Entry, request: Ask, options: SearchOptions, limits: Cluster
) -> tuple[ResolvedSearch, list[Candidate]] | None:
    """The model trained by the method, and how it might be; None where that cannot be, for all that a sum tells."""
    asked = request.replace(
        model=entry.id,
        micro_batch=request.micro_batch or 1,
        lora_rank=(request[LoraTechnique.lora_rank] or RANK) if method.lora else None,
        quantize=method.quantize,
        engine=engine_of(method, request),
    )
    free = replace(options, global_batch=None, gradient_checkpointing=True)
    ranks = 1 if method.quantize is not None else limits.layout.world_size  # each rank holds the whole quantised base
    if method.gpu_bytes * entry.params > (limits.usable_vram or 0) * ranks:
        return None
    if method.host_bytes * entry.params > (limits.usable_cpu_ram or 0) * limits.nodes:
        return None
    try:
        resolved = resolve_search(asked, free)
    except BadInput:  # a sequence length beyond the model's positions
        return None
    space = candidates_of(resolved, asked, free)
    return resolved, [c for c in space if bool(c.zero.offload_optimizer or c.zero.offload_param) is method.offload]


def _memory(resolved: ResolvedSearch, key: tuple[str, bool, str | None], known: Known) -> Memory:
    """Return what is known of a model's memory: methods that train the same parameters share its tapes."""
    if key not in known:
        known[key] = Memory(resolved.engine, resolved.spec, resolved.cluster, trace=False)
    return known[key]


def _fits(resolved: ResolvedSearch, space: list[Candidate], memory: Memory) -> Recommendation | None:
    """Return the first that fits of those that need the least. Where no tape is at hand, the bound of a formula decides."""
    cost = CostModel(resolved.engine, resolved.spec, resolved.cluster, resolved.rates)
    space = [c for c in space if not memory.cannot_fit(c) and memory.runnable(c)]
    for candidate in sorted(space, key=lambda c: (memory.floor(c), not c.alloc_conf, c.effort))[:_TRIES]:
        host = memory.host(candidate)
        if host is not None and host.per_node > (resolved.cluster.usable_cpu_ram or host.per_node):
            continue
        plan = memory.plan(candidate)
        if plan.gpu.interval is None and host is not None:  # at formula depth, which leaves processes out
            plan = plan.model_copy(update={"cpu": host})
        if plan.fits or fits_by_bound(plan):
            time = cost.step_time(candidate.workload, candidate.zero, memory.counts(candidate))
            return recommendation(resolved.engine, Ranked(candidate, time, plan), 0, resolved.cluster.layout)
    return None


def fits_by_bound(plan: MemoryPlan) -> bool:
    """Return whether a plan that was not simulated fits with the most activations that 19 of 20 models keep.

    Stage 3 also holds gathered parameters, which only a simulation counts.
    """
    gpu = plan.gpu
    known = plan.stage < 3 and {one.key for one in plan.unmodelled} <= {ACTIVATIONS}
    return known and plan.undecided and None not in (gpu.bound, gpu.usable) and (gpu.bound or 0) <= (gpu.usable or 0)
