"""The fastest layout that fits, by a model of its time: tensor, context, pipeline and expert parallelism beside FSDP2.

Note [Order of layouts]
    What a layout needs at least (:mod:`zeroplan.search.layout_floor`) takes microseconds; most layouts of a large model exceed
    the card by that alone. Every other one has a modelled time (:mod:`zeroplan.search.layout_time`), which takes milliseconds,
    while its memory takes a simulation. So layouts are tried by falling tokens a second, without checkpointing and with it, and
    the first that fits is the answer. Of two that are modelled alike, the one that shares less comes first: fewer ranks a
    replica, tensor parallelism before pipeline stages, these before context parallelism.

Note [Smallest cluster]
    Nodes are doubled until a layout fits. Between that number and its half, whether one fits does not follow from larger or
    smaller numbers, since degrees have to divide the ranks: the numbers between are tried from the smallest on, all up to 16
    nodes and beyond that in steps of a sixteenth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from math import log2
from typing import Any

from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.expert_parallel import GROUPED, experts_of
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.plan import MemoryPlan
from zeroplan.core.progress import working
from zeroplan.core.rates import rates_of
from zeroplan.engines.registry import DEFAULT_ENGINE, find_engine
from zeroplan.ledger.work import Counts, count_tape, guess_counts, matrices
from zeroplan.planner.describe import describe_layout
from zeroplan.planner.estimate import plan_case
from zeroplan.planner.formula import formula_plan
from zeroplan.planner.request import Request
from zeroplan.planner.resolve import Resolved, resolve
from zeroplan.planner.tapes import ExpandedTapes, expand_for
from zeroplan.search.layout_floor import LayoutFloors
from zeroplan.search.layout_time import LayoutCost, LayoutTime
from zeroplan.tapes import shipped

#: The engine whose layouts are planned.
ENGINE = "fsdp2"
#: Micro batches of a step for each pipeline stage, unless the request says how many: a rank then waits for less than a fifth of
#: a step, (pp − 1) / (4 · pp + pp − 1).
MICRO_BATCHES_A_STAGE = 4
#: Pipeline stages and context-parallel ranks that are tried at most.
_MOST_STAGES, _MOST_RING = 16, 16
#: Tokens that a rank of a ring keeps at least.
_LEAST_TOKENS = 4096
#: Ranks that share experts, at most, of which a tape is looked for.
_MOST_EXPERT_RANKS = 1024
#: Parts of a number of nodes by which smaller ones differ that are tried.
_STEPS = 16
#: GPUs of a node, unless the request says how many.
_USUAL_NODE = 8
#: Nodes that are tried at most, where the smallest cluster is asked for.
MOST_NODES = 1024


@dataclass(frozen=True, slots=True)
class LaidOut:
    """One layout with its plan.

    Attributes:
        request: the request with the layout's degrees, as ``zeroplan estimate`` takes it.
        layout: the layout.
        plan: its memory; at formula depth where the model cannot be traced here.
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
class TooLarge:
    """Layouts of one cluster that need more than the card by what follows from counts alone.

    Attributes:
        nodes: of the cluster.
        gpus: of a node.
        layouts: how many there are.
        least: bytes that the worst rank of the smallest of them has at least.
        usable: bytes of the card.
    """

    nodes: int
    gpus: int
    layouts: int
    least: int
    usable: int


@dataclass(frozen=True, slots=True)
class LayoutAnswer:
    """What a search over layouts found.

    Attributes:
        best: the fastest layout that fits; None where none does.
        tried: the layouts that were simulated and do not fit; of the best one's cluster these would be faster.
        too_large: by cluster, the layouts that were not simulated.
        warnings: what the plans warn of.
    """

    best: LaidOut | None
    tried: tuple[LaidOut, ...]
    warnings: tuple[str, ...] = ()
    too_large: tuple[TooLarge, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as JSON's values."""
        return {
            "best": None if self.best is None else self.best.to_dict(),
            "tried": [one.to_dict() for one in self.tried],
            "too_large": [asdict(one) for one in self.too_large],
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
    return _Search(request, checkpointing).on(request.nodes)


def smallest_cluster(request: Request, checkpointing: bool | None = None) -> LayoutAnswer:
    """Return the fastest layout of the smallest cluster that trains the model; nodes of the request are not read.

    See Note [Smallest cluster]. Where no number of GPUs is given, nodes of eight are assumed, and parts of one come first.

    Args:
        request: the question.
        checkpointing: as of :func:`search_layouts`.

    Raises:
        BadInput: a request that no layout can be planned for.
    """
    search = _Search(request, checkpointing)
    tried: list[LaidOut] = []
    too_large: list[TooLarge] = []

    def on(nodes: int, gpus: int | None = None) -> LayoutAnswer:
        found = search.on(nodes, gpus)
        tried.extend(found.tried if found.best is None else ())
        too_large.extend(found.too_large if found.best is None else ())
        return found

    def whole(found: LayoutAnswer) -> LayoutAnswer:
        more = (search.said,) if search.said else ()
        return replace(
            found,
            tried=(*tried, *(found.tried if found.best else ())),
            too_large=(*too_large, *(found.too_large if found.best else ())),
            warnings=(*more, *found.warnings),
        )

    for gpus in _powers(search.gpus // 2) if search.said else ():
        found = on(1, gpus)
        if found.best is not None:
            return whole(found)
    nodes, found = 1, on(1)
    while found.best is None and nodes < MOST_NODES:
        nodes *= 2
        found = on(nodes)
    if found.best is not None:
        for between in _between(nodes):
            smaller = on(between)
            if smaller.best is not None:
                return whole(smaller)
    return whole(found)


def _between(nodes: int) -> range:
    """Return the numbers of nodes to try between the half of `nodes` and `nodes`. See Note [Smallest cluster]."""
    step = max(1, nodes // _STEPS)
    return range(nodes // 2 + step, nodes, step)


class _Search:
    """Searches for layouts of one request on clusters of several sizes.

    Attributes:
        gpus: of a node.
        said: what is assumed of the cluster; empty where the request says it.
    """

    def __init__(self, request: Request, checkpointing: bool | None) -> None:
        self._request = _asked(request)
        self._choices = (False, True) if checkpointing is None else (checkpointing,)
        self.gpus, self.said = self._request.gpus, ""
        if request.gpus == 1 and self.gpus == 1:
            self.gpus, self.said = _USUAL_NODE, f"nodes of {_USUAL_NODE} GPUs are assumed; --gpus says otherwise"
        self._tapes = ExpandedTapes(find_engine(ENGINE))
        # Where this cannot be, no degree is to blame.
        alone = [resolve(replace(self._request, nodes=1, gradient_checkpointing=again, stage=3)) for again in self._choices]
        self._spec, self._rates = alone[0].spec, rates_of(alone[0].cluster.gpu)
        self._usable = alone[0].cluster.usable_vram or 0
        self._floors = LayoutFloors(alone[0].cases[0])
        self._experts = experts_of(self._spec.parameters) if self._spec.model_type in GROUPED else 0
        self._counted: dict[str, Counts] = {}

    def on(self, nodes: int, gpus: int | None = None) -> LayoutAnswer:
        """Search on a number of nodes. `gpus` of a node: all, if left out."""
        asked = replace(self._request, nodes=nodes, gpus=gpus or self.gpus)
        what = f"layouts on {nodes} nodes" if nodes > 1 else f"layouts on {asked.gpus} GPUs"
        working(what)
        kept, floors = [], []
        for possible in self._possible(asked):
            floor = self._floors.of(possible)
            if floor > self._usable:
                floors.append(floor)
            else:
                kept.append(possible)
        found = []
        for possible in kept:
            resolved = self._allowed(possible)
            if resolved is None:
                continue
            states = formula_plan(resolved.engine, resolved.cases[0]).gpu.model_states  # padded
            if states > self._usable:
                floors.append(states)
                continue
            counts = _counts(resolved, self._counted)
            found.append(_Timed(possible, resolved, LayoutCost(resolved.cases[0], counts, self._rates).time()))
        too_large = (TooLarge(nodes, asked.gpus, len(floors), min(floors), self._usable),) if floors else ()
        found.sort(key=lambda one: -one.time.tokens_per_second)
        tried: list[LaidOut] = []
        warnings: list[str] = []
        for at, one in enumerate(found):
            working(what, at, len(found))
            planned = _planned(one, self._tapes, warnings)
            if planned.plan.fits:
                warnings += [text for text in one.resolved.warnings if text not in warnings]
                return LayoutAnswer(planned, tuple(tried), tuple(warnings), too_large)
            tried.append(planned)
        return LayoutAnswer(None, tuple(tried), tuple(warnings), too_large)

    def _possible(self, request: Request) -> Iterator[Request]:
        """Yield a request for each layout whose degrees divide the ranks, in the order of :func:`_orders`."""
        ranks = request.gpus * request.nodes
        for again in self._choices:
            for degrees in _orders(request, self._experts):
                one = replace(request, gradient_checkpointing=again, **degrees)
                if ranks % (one.tp * one.cp * one.pp) == 0 and ranks // one.pp % one.ep == 0:
                    yield one

    def _allowed(self, request: Request) -> Resolved | None:
        """Resolve a layout; None where the model does not allow it."""
        try:
            return resolve(request)
        except BadInput:
            return None


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


def _counts(resolved: Resolved, known: dict[str, Counts]) -> Counts:
    """Return what a rank's micro batch takes of kernels and bytes, counted on a shipped tape where there is one.

    What was traced here before must not decide, or the answer would depend on earlier ones. Ranks that share experts do as much
    whatever their number, so the tape of the nearest number serves, and of a ring's ranks that of as many tokens.
    """
    case = resolved.cases[0]
    options = resolved.engine.trace_options(case)
    if options.key not in known:
        near = sorted(_powers(_MOST_EXPERT_RANKS), key=lambda ranks: (abs(log2(ranks / options.ep)), ranks))
        shared = [replace(options, ep=ranks) for ranks in near if ranks > 1] if options.ep > 1 else []
        for one in (options, *shared, replace(options, cp=1)):
            tape = shipped.find(case.spec, one)
            if tape is not None:
                known[options.key] = count_tape(expand_for(tape, case))
                break
        else:
            tokens = case.workload.rows * (case.workload.seq_len or 0) // (case.layout.cp * case.layout.tp)
            known[options.key] = guess_counts(matrices(case.spec), case.workload, tokens)
    return known[options.key]


def _planned(one: _Timed, tapes: ExpandedTapes, warnings: list[str]) -> LaidOut:
    """Plan one layout."""
    resolved, case = one.resolved, one.resolved.cases[0]
    plan = formula_plan(resolved.engine, case)
    plan, _ = plan_case(plan, case, resolved, tapes, None, warnings, to_first_miss=True)
    return LaidOut(one.request, case.layout, plan, one.time)
