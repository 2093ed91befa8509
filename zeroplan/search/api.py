"""The search from request to answer: :func:`run_search`, whose result holds all that ``recommend`` shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from zeroplan.core.errors import BadInput
from zeroplan.core.plan import Verdict
from zeroplan.core.tasks import training_of
from zeroplan.engines.base import Engine
from zeroplan.engines.case import Case
from zeroplan.engines.words import may_become
from zeroplan.run.ask import Ask
from zeroplan.search.cost import CostModel
from zeroplan.search.files import model_of
from zeroplan.search.memory import Memory
from zeroplan.search.policy import NOTABLE, WHAT_IF
from zeroplan.search.reasons import choice, points, reasons_for, what_more_buys, what_tiles_buy
from zeroplan.search.recommend import least_memory, order_of, rank_all, search
from zeroplan.search.results import Recommendation, SearchResult, Suggestion, recommendation
from zeroplan.search.search_options import AUTO, ResolvedSearch, SearchOptions, candidates_of, resolve_search
from zeroplan.search.space import Candidate
from zeroplan.search.suggestions import adapters_that_fit, cheapest_suggestions, nearest_miss
from zeroplan.techniques.compiled import CompiledTechnique
from zeroplan.techniques.table import techniques_of

if TYPE_CHECKING:
    from zeroplan.interop.edits.written import ChangedFiles


def run_search(request: Ask, options: SearchOptions | None = None) -> SearchResult:
    """Search for the best configurations of a request; the result holds all that ``zeroplan recommend`` shows.

    Raises:
        BadInput: a value that cannot be used.
    """
    options = options or SearchOptions()
    current, sourced = None, (request, options)
    if request[CompiledTechnique.compile] == AUTO and (options.candidates is not None or options.source is not None):
        raise BadInput("is a choice of the search's own", where="--compile auto", remedy="write blocks, or leave it out")
    if options.source is not None:
        from zeroplan.search.from_setup import with_source

        request, options, current = with_source(request, options)
    resolved = resolve_search(request, options)
    if current is not None and current.engine.name == resolved.engine.name:
        resolved = replace(resolved, engine=current.engine)  # with the settings of its own that the source has
    memory = Memory(resolved.engine, resolved.spec, resolved.cluster, depth=request.depth)
    cost = CostModel(resolved.engine, resolved.spec, resolved.cluster, resolved.rates)
    layout = resolved.cluster.layout
    if options.candidates is not None:
        found = _ranked(_listed(options.candidates, resolved, request), resolved, memory, cost)
        return _answer(resolved, request, options, tuple(found), memory, considered=len(found))
    space = candidates_of(resolved, request, options)
    if options.goal == "memory":
        outcome = least_memory(space, memory, cost, shown=options.shown)
    else:
        outcome = search(space, memory, cost, shown=options.shown)
    ranking = [recommendation(resolved.engine, r, i, layout) for i, r in enumerate(outcome.ranking)]
    nearest: Recommendation | None = None
    changes: tuple[Suggestion, ...] = ()
    if not ranking:
        miss = nearest_miss(space, memory, cost)
        nearest = recommendation(resolved.engine, miss, 0, layout)
        changes = tuple(cheapest_suggestions(resolved, request, options, nearest, memory))
        if (other := _of_other_engine(request, options, None)) is not None:
            changes = (Suggestion(f"--engine {other.engine.name}", other), *changes)
    elif ranking[0].plan.verdict is Verdict.MAY_FIT:
        changes = tuple(adapters_that_fit(resolved, request, options))
    if ranking and options.explain:
        said = [*choice(outcome.ranking, space, memory, cost), *reasons_for(outcome.ranking[0], space, memory, cost)]
        if options.goal == "throughput":
            said += what_tiles_buy(resolved, request, options, outcome.ranking[0])
            said += what_more_buys(resolved, request, options, outcome.ranking[0], memory)
        ranking[0] = replace(ranking[0], reasons=tuple(said))
    changed: tuple[ChangedFiles, Recommendation] | tuple[None, None] = (None, None)
    if ranking and current is not None and resolved.engine.name in may_become(current.engine.name):
        changed = _changed_files(*sourced, ranking[0], current) or changed
    return replace(
        _answer(resolved, request, options, tuple(ranking), memory, considered=outcome.considered),
        changed=changed[0],
        changed_run=changed[1],
        other_engine=_of_other_engine(request, options, ranking[0]) if ranking else None,
        nearest=nearest,
        changes=changes,
        current=current,
        points=tuple(points(space, outcome, memory, cost)) if options.explain else (),
    )


def _changed_files(
    request: Ask, options: SearchOptions, best: Recommendation, current: Recommendation
) -> tuple[ChangedFiles, Recommendation] | None:
    """Change the source's files to the best configuration; None where it has no file, or they cannot be read so changed."""
    from zeroplan.interop.readers import read_setups
    from zeroplan.search.from_setup import with_source
    from zeroplan.search.patched import patched

    def plan(alloc_conf: str) -> Recommendation:
        found = with_source(request.replace(alloc_conf=alloc_conf) if alloc_conf else request, options)[2]
        assert found is not None
        return found

    sources = list(options.source) if isinstance(options.source, list | tuple) else [options.source]
    try:
        theirs = read_setups(sources, options.program, training_of(request.task)).ask
        added = [
            (technique, value)
            for technique, value in techniques_of(best.workload)
            if any(one.name in request and one.name not in theirs and not one.found for one in technique.options)
        ]
        return patched(sources, options.program, best, current, plan, added)
    except BadInput:
        return None


def _of_other_engine(request: Ask, options: SearchOptions, best: Recommendation | None) -> Recommendation | None:
    """Return the best configuration of the other engine, where that is at least :data:`NOTABLE` faster or alone fits."""
    if not options.other_engine or options.goal == "memory":
        return None
    other = request.replace(engine=options.other_engine, optimizer_kind=None, precision=None)
    try:
        resolved = resolve_search(other, options)
        space = candidates_of(resolved, other, options)
        memory = Memory(resolved.engine, resolved.spec, resolved.cluster, depth=request.depth)
        cost = CostModel(resolved.engine, resolved.spec, resolved.cluster, resolved.rates)
        ranking = search(space, memory, cost, shown=1, most=WHAT_IF, strict=best is not None).ranking
    except BadInput:
        return None
    if not ranking:
        return None
    found = recommendation(resolved.engine, ranking[0], 0, resolved.cluster.layout)
    if best is None or found.plan.verdict.rank < best.plan.verdict.rank:
        return found
    faster = found.tokens_per_second >= NOTABLE * best.tokens_per_second
    return found if faster and found.plan.verdict is best.plan.verdict else None


def _ranked(given: Sequence[Candidate], resolved: ResolvedSearch, memory: Memory, cost: CostModel) -> list[Recommendation]:
    """Rank the given candidates, best first, each under its own engine."""
    alike: dict[Engine, list[Candidate]] = {}
    for candidate in given:
        alike.setdefault(candidate.engine or resolved.engine, []).append(candidate)
    ranked = []
    for engine, own in alike.items():
        if engine is resolved.engine:
            ranked += rank_all(own, memory, cost)
            continue
        apart = Memory(engine, resolved.spec, resolved.cluster, depth=memory.depth)
        ranked += rank_all(own, apart, CostModel(engine, resolved.spec, resolved.cluster, resolved.rates))
        memory.simulated += apart.simulated
        if not memory.no_tape:
            memory.no_tape, memory.remedy = apart.no_tape, apart.remedy
    ranked.sort(key=order_of)
    return [recommendation(resolved.engine, r, i, resolved.cluster.layout) for i, r in enumerate(ranked)]


def _listed(given: Sequence[Candidate] | str, resolved: ResolvedSearch, request: Ask) -> Sequence[Candidate]:
    if not isinstance(given, str):
        return given
    from zeroplan.search.candidates_file import read_candidates

    return read_candidates(given, resolved, request)


def _judged_by(resolved: ResolvedSearch) -> str:
    if resolved.spec.has_shapes:
        return "an analytic estimate of activations"
    return "the activations of a model of usual shape"


def _answer(
    resolved: ResolvedSearch,
    request: Ask,
    options: SearchOptions,
    ranking: tuple[Recommendation, ...],
    memory: Memory,
    *,
    considered: int,
) -> SearchResult:
    shown = ((one, Case(resolved.spec, one.workload, resolved.cluster, one.zero)) for one in ranking)
    remarks = (one.engine.remark(case) for one, case in shown)
    warnings = [*options.notes, *resolved.warnings, *dict.fromkeys(text for text in remarks if text)]
    if memory.no_tape:  # the first, since it decides more than the others
        text = f"formula depth: {memory.no_tape}; what may fit is judged by {_judged_by(resolved)}, and nothing is known to fit"
        warnings.insert(0, text)
    spec = resolved.spec
    return SearchResult(
        model={"name": spec.name, "params": spec.params, "trainable": spec.trainable, "source": spec.source},
        workload=resolved.workload,
        cluster=resolved.cluster,
        ranking=ranking,
        warnings=tuple(warnings),
        considered=considered,
        simulated=memory.simulated,
        goal=options.goal,
        global_batch=options.global_batch,
        rates=resolved.rates.as_dict(),
        loaded=model_of(request.model, spec),
        training=options.training,
    )
