"""What a machine can train: the largest models of the catalog by method, and the fastest way to train the largest in full."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.models import catalog
from zeroplan.planner.request import Request
from zeroplan.search.answer import Answer, Recommendation, recommendation
from zeroplan.search.api import answer
from zeroplan.search.cost import CostModel
from zeroplan.search.memory import Memory
from zeroplan.search.problem import Problem, Wish, problem_of, space_of
from zeroplan.search.recommend import Ranked
from zeroplan.search.space import Candidate

#: Models that a method shows, and simulations that each may take.
_SHOWN = 3
_TRIES = 2
_LORA_RANK = 16


@dataclass(frozen=True, slots=True)
class Method:
    """A way to train. `gpu_bytes` and `host_bytes` are the least bytes a parameter, over all ranks, that it takes there."""

    name: str
    offload: bool
    lora: bool
    gpu_bytes: int
    host_bytes: int


#: Full: 16-bit parameters and gradients, fp32 master and two moments (K = 12). Offloaded: all of it on the host.
METHODS = (
    Method("full", False, False, 14, 0),
    Method("full, offload", True, False, 0, 16),
    Method("LoRA", False, True, 2, 0),
    Method("LoRA, offload", True, True, 0, 2),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One method's largest models that fit, largest first."""

    method: Method
    found: tuple[tuple[str, int, Recommendation], ...]


@dataclass(frozen=True, slots=True)
class Overview:
    """What a machine can train. `best` answers for the largest full fine-tune, None when not even that fits."""

    rows: tuple[Row, ...]
    best: Answer | None
    warnings: tuple[str, ...]


def overview(request: Request, wish: Wish | None = None) -> Overview:
    """The largest catalog models by method, at one sequence a GPU with checkpointing, and the answer for the largest.

    Raises:
        BadInput: a value that cannot be used.
    """
    wish = wish or Wish()
    entries = sorted(catalog.entries(), key=lambda e: -e.params)
    smallest = problem_of(replace(request, model=entries[-1].id), wish)
    space_of(smallest, request, wish)  # what the batch cannot be, before the models are gone through
    rows = tuple(Row(method, tuple(_largest(method, entries, request, wish, smallest.cluster))) for method in METHODS)
    full = [entry for row in rows[:2] for entry in row.found[:1]]
    best = None
    if full:
        name = max(full, key=lambda entry: entry[1])[0]
        best = answer(replace(request, model=name), wish)
    return Overview(rows, best, tuple(smallest.warnings))


def _largest(
    method: Method, entries: list[catalog.Entry], request: Request, wish: Wish, limits: Cluster
) -> Iterator[tuple[str, int, Recommendation]]:
    found = 0
    shapes: set[int] = set()
    for entry in entries:
        if found >= _SHOWN:
            return
        if entry.params in shapes:
            continue  # the same shapes under another name
        problem = _problem(method, entry, request, wish, limits)
        if problem is None:
            continue
        shapes.add(entry.params)
        one = _fits(*problem)
        if one is not None:
            found += 1
            yield entry.id, entry.params, one


def _problem(
    method: Method, entry: catalog.Entry, request: Request, wish: Wish, limits: Cluster
) -> tuple[Problem, list[Candidate]] | None:
    """The model trained by the method, and how it might be; None where that cannot be, for all that a sum tells."""
    asked = replace(
        request,
        model=entry.id,
        micro_batch=request.micro_batch or 1,
        lora_rank=(request.lora_rank or _LORA_RANK) if method.lora else None,
    )
    free = replace(wish, global_batch=None, gradient_checkpointing=True)
    if method.gpu_bytes * entry.params > (limits.usable_vram or 0) * limits.layout.world_size:
        return None
    if method.host_bytes * entry.params > (limits.cpu_ram or 0) * limits.nodes:
        return None
    try:
        problem = problem_of(asked, free)
    except BadInput:  # a sequence length beyond the model's positions
        return None
    space = space_of(problem, asked, free)
    return problem, [c for c in space if bool(c.zero.offload_optimizer or c.zero.offload_param) is method.offload]


def _fits(problem: Problem, space: list[Candidate]) -> Recommendation | None:
    """The first that fits of those that need the least."""
    memory = Memory(problem.engine, problem.spec, problem.cluster, trace=False)
    cost = CostModel(problem.engine, problem.spec, problem.cluster, problem.rates)
    space = [c for c in space if not memory.cannot_fit(c) and memory.runnable(c)]
    for candidate in sorted(space, key=lambda c: (memory.floor(c), not c.alloc_conf, c.effort))[:_TRIES]:
        plan = memory.plan(candidate)
        if plan.fits:
            time = cost.step_time(candidate.workload, candidate.zero, memory.counts(candidate))
            return recommendation(problem.engine, Ranked(candidate, time, plan), 0, problem.cluster.layout)
    return None
