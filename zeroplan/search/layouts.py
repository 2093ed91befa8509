"""The fastest layout that fits, by a model of its time: tensor, context, pipeline and expert parallelism beside FSDP2.

Note [Order of layouts]
    What a layout needs at least (:mod:`zeroplan.search.layout_floor`) takes microseconds; most layouts of a large model exceed
    the card by that alone. Every other one has a modelled time (:mod:`zeroplan.search.layout_time`), which takes milliseconds,
    while its memory takes a simulation. So layouts are tried by falling tokens a second, without checkpointing and with it, and
    the first that fits is the answer. A layout's variants (other schedules, shards within nodes, ZeRO-2) are looked at where
    they could be faster and the layout itself fits. Of two that are modelled alike, the one that shares less
    comes first: fewer ranks a replica, tensor parallelism before pipeline stages, these before context parallelism.

Note [Smallest cluster]
    Nodes are doubled until a layout fits. Between that number and its half, whether one fits does not follow from larger or
    smaller numbers, since degrees have to divide the ranks: the numbers between are tried from the smallest on, all up to 16
    nodes and beyond that in steps of a sixteenth.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import count
from math import gcd

from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.plan import MemoryPlan, Verdict
from zeroplan.core.plumbing.progress import working
from zeroplan.core.rates import Rates
from zeroplan.core.unmodelled import may_add
from zeroplan.engines.registry import find_engine
from zeroplan.ledger.work import Counts
from zeroplan.planner.estimate import allocator_config, plan_case
from zeroplan.planner.fit import left_out
from zeroplan.planner.formula import FORMULA, formula_plan
from zeroplan.planner.resolve import Resolved, resolve
from zeroplan.planner.tapes import ExpandedTapes
from zeroplan.run.ask import Ask
from zeroplan.search.layout_answer import LaidOut, LayoutAnswer, TooLarge
from zeroplan.search.layout_counts import rank_counts
from zeroplan.search.layout_floor import LayoutFloors
from zeroplan.search.layout_orders import (
    LEAST_GAIN,
    LayoutOrders,
    checked_request,
    divides,
    fixed_degrees,
    flags_of,
    least_ranks,
    powers,
    require_batch,
    sequences,
    without_degrees,
)
from zeroplan.search.layout_recomputation import lacks_tape, recomputations
from zeroplan.search.layout_time import LayoutCost, LayoutTime, Link
from zeroplan.search.machine_rates import machine_rates
from zeroplan.search.policy import EQUALLY_FAST, MOST_TOKENS

#: Parts of a number of nodes by which smaller ones differ that are tried.
_STEPS = 16
#: Plainer layouts, at most, that are planned to name the plainest that fits.
_PLAINER = 3
#: Nodes that are tried at most, where the smallest cluster is asked for.
MOST_NODES = 1024


def search_layouts(
    request: Ask,
    checkpointing: bool | None = None,
    global_batch: int | None = None,
    profile: str | os.PathLike[str] | None = None,
) -> LayoutAnswer:
    """Return the layout of the request's cluster that is modelled to be the fastest of those that fit.

    See Note [Order of layouts].

    Args:
        request: the question; the search keeps to the degrees, the stage and the accumulation that it says.
        checkpointing: whether blocks are recomputed; None tries both.
        global_batch: sequences of a step, which the accumulation makes of the layout's ranks; None leaves it open.
        profile: the path of measured rates; None takes the user's own profile where it is of this GPU.

    Raises:
        BadInput: a request that no layout can be planned for: in the words in which the layout of its degrees is refused.
    """
    search = _Search(request, checkpointing, global_batch, profile)
    found = search.on(search.nodes)
    if found.chosen is None:
        found = search.with_many_stages().on(search.nodes)
    if found.chosen is None:
        found = search.with_all_stages(found).with_straddling()
    search.require_possible()
    return found


def smallest_cluster(
    request: Ask,
    checkpointing: bool | None = None,
    global_batch: int | None = None,
    profile: str | os.PathLike[str] | None = None,
) -> LayoutAnswer:
    """Return the fastest layout of the smallest cluster that trains the model; nodes of the request are not read.

    See Note [Smallest cluster]. Where no number of GPUs is given, usual nodes are assumed, and parts of one come first.

    Args:
        request: the question.
        checkpointing: as of :func:`search_layouts`.
        global_batch: as of :func:`search_layouts`.
        profile: likewise.

    Raises:
        BadInput: a request that no layout can be planned for.
    """
    search = _Search(request, checkpointing, global_batch, profile, any_nodes=True)
    tried: list[LaidOut] = []
    too_large: list[TooLarge] = []

    def on(nodes: int, gpus: int | None = None, *, doubtful: bool = False) -> LayoutAnswer:
        found = search.on(nodes, gpus, doubtful=doubtful)
        tried.extend(found.tried if found.best is None else ())
        too_large.extend(found.too_large if found.best is None else ())
        return found

    def whole(found: LayoutAnswer) -> LayoutAnswer:
        more = (search.assumed,) if search.assumed else ()
        return replace(
            found,
            tried=(*tried, *(found.tried if found.best else ())),
            too_large=(*too_large, *(found.too_large if found.best else ())),
            warnings=(*more, *found.warnings),
        )

    for gpus in powers(search.gpus // 2) if search.assumed else ():
        found = on(1, gpus)
        if found.chosen is not None:
            return whole(found)
    unit = search.least_nodes
    nodes, found = unit, on(unit)
    while found.chosen is None and nodes < MOST_NODES:
        nodes *= 2
        found = on(nodes)
        search.require_possible()  # no more nodes would help
    if found.chosen is not None:
        for between in _between(nodes, unit):
            smaller = on(between, doubtful=True)
            if smaller.chosen is not None:
                return whole(smaller)
    return whole(found)


def _between(nodes: int, unit: int = 1) -> range:
    """Return the numbers of nodes to try between the half of `nodes` and `nodes`. See Note [Smallest cluster]."""
    step = unit * max(1, nodes // unit // _STEPS)
    return range(nodes // 2 + step, nodes, step) if nodes > unit else range(0)


class _Search:
    """Searches for layouts of one request on clusters of several sizes.

    Attributes:
        gpus: of a node.
        said: what is assumed of the cluster; empty where the request says it.
    """

    def __init__(
        self,
        request: Ask,
        checkpointing: bool | None,
        global_batch: int | None,
        profile: str | os.PathLike[str] | None = None,
        *,
        any_nodes: bool = False,
    ) -> None:
        self._request = checked_request(request, global_batch)
        self._batch = global_batch
        self.gpus, self.nodes, self.assumed = self._request.gpus, self._request.nodes, ""
        if any_nodes and self.gpus == 1 and "gpus" not in request:
            self.gpus = Cluster.of(gpu=self._request.gpu).gpu.node
            self.assumed = f"nodes of {self.gpus} GPUs are assumed; --gpus says otherwise"
        self._tapes = None if request.depth == FORMULA else ExpandedTapes(find_engine(self._request.engine))
        self._config = allocator_config(request.alloc_conf)
        layouts = find_engine(self._request.engine).layouts
        assert layouts is not None, "checked_request refuses such engines"
        # Where this cannot be, no degree is to blame.
        plain = without_degrees(self._request).replace(nodes=1, stage=layouts.stage, grad_accum=None)
        self._choices = recomputations(plain, checkpointing)
        alone = [resolve(plain.replace(**again)) for again in self._choices]
        self._spec, self._rate_warnings = alone[0].spec, list[str]()
        cluster = replace(alone[0].cluster, gpus=self.gpus, nodes=2 if any_nodes else self.nodes)
        self._rates = machine_rates(cluster, profile, self._rate_warnings)
        self._usable = alone[0].cluster.usable_vram or 0
        self._floors = LayoutFloors(alone[0].cases[0])
        self._orders = LayoutOrders.of_model(self._spec, layouts, global_batch)
        self._counted: dict[str, Counts] = {}
        self._refused: BadInput | None = None
        self._allowed_one = False
        self._untimed: BadInput | None = None
        self._looked_at_one = False

    @property
    def least_nodes(self) -> int:
        """The nodes of which the fixed degrees take a multiple."""
        ranks = least_ranks(self._request)
        return ranks // gcd(ranks, self.gpus)

    def with_many_stages(self) -> _Search:
        """Look at more pipeline stages from now on, and return this search."""
        self._orders = self._orders.with_many_stages()
        return self

    def with_all_stages(self, found: LayoutAnswer) -> LayoutAnswer:
        """Return the answer with each layout that may fit planned on all its stages, where a search stopped at the first."""

        def whole(one: LaidOut) -> LaidOut:
            if one.plan.verdict is not Verdict.MAY_FIT or len(one.plan.stages) in (0, one.layout.pp):
                return one
            return replace(one, plan=self._plan_of(resolve(one.request), [], to_first_doubt=False))

        return replace(found, tried=tuple(whole(one) for one in found.tried))

    def require_possible(self) -> None:
        """Raise what was said of the first layout, if none of any cluster so far is possible.

        Raises:
            BadInput: the degrees that the request fixes cannot be.
        """
        if self._refused is not None and not self._allowed_one:
            raise self._refused
        if self._untimed is not None and not self._looked_at_one:
            raise self._untimed

    def on(self, nodes: int, gpus: int | None = None, *, doubtful: bool = False) -> LayoutAnswer:
        """Search on a number of nodes.

        Args:
            gpus: of a node; all, if left out.
            doubtful: probably nothing fits, so that layouts are looked at without checkpointing only if one with it may fit.
        """
        asked = self._request.replace(nodes=nodes, gpus=gpus or self.gpus)
        what = f"layouts on {nodes} nodes" if nodes > 1 else f"layouts on {asked.gpus} GPUs"
        working(what)
        if not self._can_be(asked):
            return LayoutAnswer(None, (), fixed=flags_of(fixed_degrees(asked)))
        kept, floors = [], []
        for possible in self._possible(asked):
            try:
                floor = self._floors.of(possible)
            except BadInput as error:  # more stages than blocks
                self._untimed = self._untimed or error
                continue
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
            timed = self._timed(possible, resolved)
            if timed is not None:
                found.append(timed)
        self._looked_at_one = self._looked_at_one or bool(found or floors)
        too_large = (TooLarge(nodes, asked.gpus, len(floors), min(floors), self._usable),) if floors else ()
        found.sort(key=lambda one: -one.worth)
        answer = LayoutAnswer(None, (), (), too_large, flags_of(fixed_degrees(asked)))
        if doubtful and len(self._choices) > 1:
            least = self._first_that_fits(
                asked, [one for one in found if one.request.value("gradient_checkpointing")], what, answer
            )
            if least.chosen is None:
                return least
        return self._first_that_fits(asked, found, what, answer)

    def _first_that_fits(self, asked: Ask, found: list[_Timed], what: str, answer: LayoutAnswer) -> LayoutAnswer:
        """Plan layouts and their variants in the order of their speed, up to the first that fits; returns `answer` with what
        came out. Variants stand where they would be if they waited for nothing.
        """
        number = count()
        queue = [(-speed, next(number), one, only) for one in found for speed, only in one.places]
        heapify(queue)
        planned: dict[int, LaidOut] = {}
        tried: list[LaidOut] = []
        warnings = list(self._rate_warnings) if asked.nodes > 1 or not self._rate_warnings else []
        may: LaidOut | None = None
        said: tuple[str, ...] = ()

        def plan(one: _Timed) -> LaidOut:
            if id(one) not in planned:
                planned[id(one)] = self._planned(one, warnings)
            return planned[id(one)]

        def leaves_room(plain: _Timed, variant: _Timed) -> bool:
            """Return whether a variant may fit, by the layout without it, of which the first stage is looked at first."""
            first = planned.get(id(plain)) or self._planned(plain, warnings, most_stages=1)
            if first.plan.fits is False:
                planned[id(plain)] = first
            gpu = first.plan.gpu
            if gpu.interval is None:
                return False
            more = self._floors.interleaved_inputs(variant.request) if variant.request.vpp > plain.request.vpp else 0
            room = gpu.interval[1] + more <= self._usable
            return first.plan.fits is not False and room and plan(plain).plan.fits is not False

        while queue:
            working(what, len(tried), len(tried) + len(queue))
            _, _, one, variants = heappop(queue)
            if may is not None and one.leaves_out:
                continue  # slower, and not known to fit either
            if variants:
                for other in self._variants(asked, one):
                    heappush(queue, (-other.worth / (1 + LEAST_GAIN), next(number), other, False))
                continue
            if one.plain is not None and not leaves_room(one.plain, one):
                continue
            laid_out = plan(one)
            if laid_out.plan.fits:
                warnings += [text for text in one.resolved.warnings if text not in warnings]
                plainest = self._plainest(found, one, plan)
                found_best = replace(answer, best=laid_out, plainest=plainest, without_checkpointing=self._without(one.request))
                return replace(found_best, tried=tuple(tried), warnings=tuple(warnings))
            if may is None and laid_out.plan.undecided and not laid_out.plan.misfits:
                may, said = laid_out, one.resolved.warnings
            tried.append(laid_out)
        warnings += [text for text in said if text not in warnings]
        return replace(answer, may=may, tried=tuple(tried), warnings=tuple(warnings))

    def _without(self, request: Ask) -> int | None:
        """Return what a layout that recomputes blocks needs at least without that, if it was cut for it."""
        floor = self._floors.of(request.replace(gradient_checkpointing=False))
        kept = request.value("gradient_checkpointing") and len(self._choices) > 1
        return floor if kept and floor > self._usable else None

    def _plainest(self, found: list[_Timed], best: _Timed, plan: Callable[[_Timed], LaidOut]) -> LaidOut | None:
        """Return the plainest layout that fits and is slower than the best by less than times are off; None if the best is it.

        Of those that may be plainer, the plainest few are planned; `plan` keeps what is planned already.
        """
        least = (1 - EQUALLY_FAST) * best.worth
        plainer = (one for one in found if one.worth >= least and one.complexity < best.complexity)
        for one in sorted(plainer, key=lambda one: one.complexity)[:_PLAINER]:
            laid_out = plan(one)
            if laid_out.plan.fits:
                return laid_out
        return None

    def _variants(self, asked: Ask, one: _Timed) -> Iterator[_Timed]:
        """Yield the variants of a layout that are faster. See Note [Variants of a layout] in layout_orders.py."""
        for fields in self._orders.variants(asked, one.request):
            request = one.request.replace(**fields)
            if not divides(request) or self._floors.of(request) > self._usable:
                continue
            resolved = self._allowed(request)
            if resolved is None:
                continue
            timed = self._timed(request, resolved)
            if timed is None:
                continue
            timed = replace(timed, plain=one)
            if timed.worth > (1 + LEAST_GAIN) * one.worth:
                yield timed

    def _timed(self, request: Ask, resolved: Resolved) -> _Timed | None:
        """Return a layout with its time; None where its schedule has too few micro batches, or a stage no block."""
        cost = self._cost(resolved, self._rates)
        try:
            more = request.pp > 1 and self._batch is None and "grad_accum" not in self._request
            time = cost.time()
            return _Timed(request, resolved, time, cost.links, cost.time(request.pp) if more else time)
        except BadInput as error:
            self._untimed = self._untimed or error
            return None

    def _cost(self, resolved: Resolved, rates: Rates) -> LayoutCost:
        return LayoutCost(resolved.cases[0], rank_counts(resolved, self._counted), rates, resolved.engine)

    def _can_be(self, request: Ask) -> bool:
        """Return whether some layout is possible at all, however large; where nothing is fixed, one is.

        What is said against the first that is not is kept, of the last cluster.
        """
        refused = None
        if not fixed_degrees(request) and request.stage is None and request.grad_accum is None and self._batch is None:
            return True
        for again in self._choices:
            for degrees in self._orders.of(request):
                try:
                    self._resolved(request.replace(**again, **degrees))
                except BadInput as error:
                    refused = refused or error
                else:
                    self._allowed_one = True
                    return True
        self._refused = refused
        return False

    def _possible(self, request: Ask) -> Iterator[Ask]:
        """Yield a request for each layout whose degrees divide the ranks, in the order of :class:`LayoutOrders`.

        Layouts that would take more tokens a step than anybody trains with are left out, unless the request says the batch.
        """
        limited = self._batch is None and "micro_batch" not in request and "grad_accum" not in request
        for again in self._choices:
            for degrees in self._orders.of(request):
                one = request.replace(**again, **degrees)
                if (
                    divides(one)
                    and not lacks_tape(again, one)
                    and not (limited and sequences(one) * (one.seq_len or 1) > MOST_TOKENS)
                ):
                    yield one

    def _allowed(self, request: Ask) -> Resolved | None:
        """Resolve a layout; None where the model does not allow it."""
        try:
            return self._resolved(request)
        except BadInput:
            return None

    def _resolved(self, request: Ask) -> Resolved:
        resolved = resolve(request)
        if self._batch is not None:
            require_batch(resolved, self._batch)
        return resolved

    def _planned(self, one: _Timed, warnings: list[str], *, most_stages: int | None = None) -> LaidOut:
        """Plan one layout, of a pipeline so many stages at most."""
        plan = self._plan_of(one.resolved, warnings, most_stages=most_stages)
        plain = None if one.plain is None else one.plain.time
        slow = self._cost(one.resolved, self._rates.on_slow_host()).time().total
        return LaidOut(one.request, one.resolved.cases[0].layout, plan, one.time, one.worth, one.links, plain, slow)

    def _plan_of(
        self, resolved: Resolved, warnings: list[str], *, most_stages: int | None = None, to_first_doubt: bool = True
    ) -> MemoryPlan:
        case, shown = resolved.cases[0], (resolved, self._tapes, self._config, warnings)
        formula = formula_plan(resolved.engine, case)
        return plan_case(formula, case, *shown, to_first_doubt=to_first_doubt, most_stages=most_stages)[0]


@dataclass(frozen=True, slots=True)
class _Timed:
    """One layout whose memory is not known yet; `compared` is its time by which it is compared (Note [Order of layouts]), and
    `plain` the layout of which it is a variant.
    """

    request: Ask
    resolved: Resolved
    time: LayoutTime
    links: tuple[Link, ...]
    compared: LayoutTime
    plain: _Timed | None = None

    @property
    def worth(self) -> float:
        """Tokens a second by which layouts are ordered."""
        return self.compared.tokens_per_second

    @property
    def places(self) -> list[tuple[float, bool]]:
        """Its tokens a second, and what its variants cannot exceed, marked; without the latter where that is no gain. Variants
        count for less, as :data:`LEAST_GAIN` says.
        """
        time = self.compared
        least = time.total - (time.waiting if self.request.pp > 1 else time.sharding)
        most = time.tokens_per_second * time.total / least / (1 + LEAST_GAIN)
        found = [(self.worth, False)]
        return found if most <= self.worth else [*found, (most, True)]

    @property
    def complexity(self) -> tuple[bool, bool, bool, bool, bool, int]:
        """The order of equally fast layouts: stages, shared experts, rings, shared matrices, replicas, recomputation."""
        ask = self.request
        degrees = (ask.pp > 1, ask.ep > 1, ask.cp > 1, ask.tp > 1, ask.dp_replicate > 1)
        return (*degrees, ask.pp * ask.cp * ask.tp * ask.vpp + ask.value("gradient_checkpointing"))

    @property
    def leaves_out(self) -> bool:
        """Whether its figures will leave out what decides, so that it cannot be known to fit."""
        return may_add(left_out(self.resolved.engine, self.resolved.cases[0]))
