"""The fastest layout that fits, by a model of its time: tensor, context, pipeline and expert parallelism beside FSDP2.

Note [Order of layouts]
    Every layout has a modelled time (:mod:`zeroplan.search.layout_time`), which takes milliseconds, while its memory takes a
    simulation. So layouts are tried by falling tokens a second, without checkpointing and with it, and the first that fits is
    the answer. Of two that are modelled alike, the one that shares less comes first: fewer ranks a replica, tensor parallelism
    before pipeline stages, these before context parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.expert_parallel import GROUPED, experts_of
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.plan import MemoryPlan
from zeroplan.core.rates import rates_of
from zeroplan.engines.registry import DEFAULT_ENGINE, find_engine
from zeroplan.ledger.work import Counts, count_tape, guess_counts, matrices
from zeroplan.planner.describe import describe_layout
from zeroplan.planner.estimate import plan_case
from zeroplan.planner.formula import formula_plan
from zeroplan.planner.request import Request
from zeroplan.planner.resolve import Resolved, resolve
from zeroplan.planner.tapes import ExpandedTapes, expand_for
from zeroplan.search.layout_time import LayoutCost, LayoutTime
from zeroplan.tapes import find_tape

#: The engine whose layouts are planned.
ENGINE = "fsdp2"
#: Micro batches of a step for each pipeline stage, unless the request says how many: a rank then waits for less than a fifth of
#: a step, (pp − 1) / (4 · pp + pp − 1).
MICRO_BATCHES_A_STAGE = 4
#: Pipeline stages and context-parallel ranks that are tried at most.
_MOST_STAGES, _MOST_RING = 16, 16
#: Tokens that a rank of a ring keeps at least.
_LEAST_TOKENS = 4096
#: Nodes that are tried at most, where the smallest cluster is asked for.
MOST_NODES = 1024


@dataclass(frozen=True, slots=True)
class LaidOut:
    """One layout with its plan.

    Attributes:
        request: the request with the layout's degrees, as ``zeroplan estimate`` takes it.
        layout: the layout.
        plan: its memory; at formula depth where the model states alone exceed the card.
        time: its modelled time.
    """

    request: Request
    layout: ParallelLayout
    plan: MemoryPlan
    time: LayoutTime

    @property
    def flags(self) -> str:
        """The flags of ``zeroplan estimate`` that ask for the layout."""
        request = self.request
        words = [f"--nodes {request.nodes}"] if request.nodes > 1 else []
        words += [f"--{name} {getattr(request, name)}" for name in ("tp", "cp", "pp", "ep") if getattr(request, name) > 1]
        words += ["--sp"] if request.sp else []
        words += [f"--grad-accum {request.grad_accum}"] if request.grad_accum and request.grad_accum > 1 else []
        words += ["--gradient-checkpointing"] if request.gradient_checkpointing else []
        return " ".join([*words, f"--engine {request.engine}", f"--stage {self.plan.stage}"])

    def to_dict(self) -> dict[str, Any]:
        """Return what the JSON of ``recommend --layouts`` holds of it; sizes in bytes."""
        gpu = self.plan.gpu
        return {
            "nodes": self.request.nodes,
            "layout": describe_layout(self.layout),
            "stage": self.plan.stage,
            "grad_accum": self.request.grad_accum or 1,
            "gradient_checkpointing": self.request.gradient_checkpointing,
            "model_states": gpu.model_states,
            "total": gpu.total,
            "interval": gpu.interval,
            "usable": gpu.usable,
            "fits": self.plan.fits,
            "modelled": {
                "step_seconds": self.time.total,
                "tokens_per_second": self.time.tokens_per_second,
                "mfu": self.time.utilization,
                "seconds": self.time.parts,
            },
            "flags": self.flags,
        }


@dataclass(frozen=True, slots=True)
class LayoutAnswer:
    """What a search over layouts found.

    Attributes:
        best: the fastest layout that fits; None where none does.
        tried: the layouts that would be faster, the fastest first.
        warnings: what the plans warn of.
    """

    best: LaidOut | None
    tried: tuple[LaidOut, ...]
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as JSON's values."""
        return {
            "best": None if self.best is None else self.best.to_dict(),
            "tried": [one.to_dict() for one in self.tried],
            "warnings": list(self.warnings),
        }


def search_layouts(request: Request, checkpointing: bool | None = None) -> LayoutAnswer:
    """Return the layout of the request's cluster that is modelled to be the fastest of those that fit.

    See Note [Order of layouts].

    Args:
        request: the question; its degrees and stage are not read.
        checkpointing: whether blocks are recomputed; None tries both.

    Raises:
        BadInput: a request that no layout can be planned for.
    """
    request = _asked(request)
    tried: list[LaidOut] = []
    warnings: list[str] = []
    tapes = ExpandedTapes(find_engine(ENGINE))
    found = [one for again in ((False, True) if checkpointing is None else (checkpointing,)) for one in _timed(request, again)]
    found.sort(key=lambda one: -one.time.tokens_per_second)
    too_large: list[ParallelLayout] = []  # layouts whose model states exceed the card
    for one in found:
        if one.layout in too_large:
            continue
        planned = _planned(one, tapes, warnings)
        if planned.plan.fits:
            warnings += [text for text in one.resolved.warnings if text not in warnings]
            return LayoutAnswer(planned, tuple(tried), tuple(warnings))
        if planned.plan.fits is False and planned.plan.gpu.total is None:
            too_large.append(one.layout)
        tried.append(planned)
    return LayoutAnswer(None, tuple(tried), tuple(warnings))


def smallest_cluster(request: Request, checkpointing: bool | None = None) -> LayoutAnswer:
    """Return the layout of the fewest nodes, doubled from one on, that trains the model; nodes of the request are not read.

    Args:
        request: the question.
        checkpointing: as of :func:`search_layouts`.

    Raises:
        BadInput: a request that no layout can be planned for.
    """
    tried: list[LaidOut] = []
    warnings: tuple[str, ...] = ()
    nodes = 1
    while nodes <= MOST_NODES:
        found = search_layouts(replace(request, nodes=nodes), checkpointing)
        warnings = found.warnings
        if found.best is not None:
            return replace(found, tried=(*tried, *found.tried))
        tried += found.tried
        nodes *= 2
    return LayoutAnswer(None, tuple(tried), warnings)


def _asked(request: Request) -> Request:
    if request.engine not in (DEFAULT_ENGINE, ENGINE):
        raise BadInput(f"layouts are planned for {ENGINE} alone", where="--engine", remedy="leave it out")
    if request.vram is None and request.gpu is None:
        raise BadInput("no limit to fit", where="--gpu", remedy="name the GPU, or give --vram 80G")
    gpus = Cluster.of(gpus=request.gpus, gpu=request.gpu).gpus if request.gpu is not None else request.gpus
    return replace(request, engine=ENGINE, gpus=gpus, stage=None, depth=None)


def _orders(request: Request, experts: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the degrees to try, those that share less first, as fields of a request.

    Args:
        request: the question.
        experts: of a mixture whose ranks may share them, the experts of a block.
    """
    if experts:
        yield from _orders_of_experts(request, experts)
        return
    ranks = request.gpus * request.nodes
    found: list[tuple[tuple[int, int, int], dict[str, Any]]] = []
    for tp in _powers(request.gpus):
        for pp in _powers(min(ranks // tp, _MOST_STAGES)):
            for cp in _powers(min(ranks // (tp * pp), _MOST_RING)):
                if cp > 1 and (request.seq_len or 0) // cp < _LEAST_TOKENS:
                    continue
                degrees: dict[str, Any] = {"tp": tp, "sp": tp > 1 and pp == 1, "cp": cp, "pp": pp, "stage": 3 if pp == 1 else 2}
                if pp > 1 and request.grad_accum is None:
                    degrees["grad_accum"] = MICRO_BATCHES_A_STAGE * pp
                found.append(((tp * pp * cp, cp, pp), degrees))
    for _, degrees in sorted(found, key=lambda one: one[0]):
        yield degrees


def _orders_of_experts(request: Request, experts: int) -> Iterator[dict[str, Any]]:
    ranks = request.gpus * request.nodes
    for pp in _powers(min(ranks, _MOST_STAGES)):
        degrees: dict[str, Any] = {"tp": 1, "sp": False, "cp": 1, "pp": pp, "stage": 3 if pp == 1 else 2}
        if pp > 1 and request.grad_accum is None:
            degrees["grad_accum"] = MICRO_BATCHES_A_STAGE * pp
        for ep in _powers(min(ranks // pp, experts)):
            yield degrees | {"ep": ep}


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length())] if most else []


@dataclass(frozen=True, slots=True)
class _Timed:
    """One layout whose memory is not known yet."""

    request: Request
    resolved: Resolved
    time: LayoutTime

    @property
    def layout(self) -> ParallelLayout:
        return self.resolved.cases[0].layout


def _timed(request: Request, again: bool) -> Iterator[_Timed]:
    """Yield the layouts that the model allows, with checkpointing or without, in the order of :func:`_orders`."""
    alone = resolve(replace(request, gradient_checkpointing=again, stage=3))  # where this cannot be, no degree is to blame
    rates = rates_of(alone.cluster.gpu)
    experts = experts_of(alone.spec.parameters) if alone.spec.model_type in GROUPED else 0
    counted: dict[str, Counts] = {}
    for degrees in _orders(request, experts):
        one = replace(request, gradient_checkpointing=again, **degrees)
        try:
            resolved = resolve(one)
        except BadInput:
            continue
        yield _Timed(one, resolved, LayoutCost(resolved.cases[0], _counts(resolved, counted), rates).time())


def _counts(resolved: Resolved, known: dict[str, Counts]) -> Counts:
    """Return what a rank's micro batch takes of kernels and bytes, counted on a tape where one is at hand."""
    case = resolved.cases[0]
    key = resolved.engine.trace_options(case).key
    if key not in known:
        tape = find_tape(case.spec, case.workload, layout=case.parallel)
        if tape is not None:
            known[key] = count_tape(expand_for(tape, case))
        else:
            tokens = case.workload.rows * (case.workload.seq_len or 0) // (case.layout.cp * case.layout.tp)
            known[key] = guess_counts(matrices(case.spec), case.workload, tokens)
    return known[key]


def _planned(one: _Timed, tapes: ExpandedTapes, warnings: list[str]) -> LaidOut:
    """Plan one layout; by formulas alone where its model states do not fit."""
    resolved, case = one.resolved, one.resolved.cases[0]
    usable = case.cluster.usable_vram or 0
    plan = formula_plan(resolved.engine, case)
    if plan.gpu.model_states <= usable:
        plan, _ = plan_case(plan, case, resolved, tapes, None, warnings, to_first_miss=True)
    elif plan.fits is None:
        plan = plan.model_copy(update={"fits": False})
    return LaidOut(one.request, case.layout, plan, one.time)
