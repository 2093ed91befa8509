"""The Python API of the search: :func:`recommend`, and :func:`answer`, which holds what the command line shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from zeroplan.engines.base import Engine
from zeroplan.planner.request import Request
from zeroplan.search.answer import Answer, Change, Recommendation, recommendation
from zeroplan.search.candidates_file import read_candidates
from zeroplan.search.cost import CostModel
from zeroplan.search.from_setup import inherit
from zeroplan.search.memory import Memory
from zeroplan.search.problem import Problem, Wish, problem_of, space_of
from zeroplan.search.reasons import points, reasons_for, what_more_buys
from zeroplan.search.recommend import SHOWN, least_memory, order_of, rank_all, search
from zeroplan.search.space import Candidate
from zeroplan.search.suggestions import cheapest_changes, nearest_miss


def recommend(model: Any = None, **options: Any) -> list[Recommendation]:
    """The fastest configurations that fit, best first.

    Args:
        model: as for :func:`zeroplan.estimate`.
        options: the fields of :class:`~zeroplan.planner.request.Request` and of :class:`Wish`: ``vram="24G"``, ``gpus=4``,
            ``global_batch=128``, …

    Returns:
        One recommendation a stage, offload and checkpointing that fits; empty when nothing does.

    Raises:
        BadInput: a value that cannot be used, with the remedy.
        TypeError: an option that does not exist.
    """
    wishes = {f.name for f in fields(Wish)}
    wish = Wish(**{name: value for name, value in options.items() if name in wishes})
    rest = {name: value for name, value in options.items() if name not in wishes}
    return list(answer(Request(model=model, **rest), wish).ranking)


def answer(request: Request, wish: Wish | None = None) -> Answer:
    """Everything that ``zeroplan recommend`` tells of a request.

    Raises:
        BadInput: a value that cannot be used.
    """
    wish = wish or Wish()
    current = None
    if wish.source is not None:
        request, wish, current = inherit(request, wish)
    problem = problem_of(request, wish)
    if current is not None and current.engine.name == problem.engine.name:
        problem = replace(problem, engine=current.engine)  # with the settings of its own that the source has
    memory = Memory(problem.engine, problem.spec, problem.cluster, depth=request.depth)
    cost = CostModel(problem.engine, problem.spec, problem.cluster, problem.rates)
    layout = problem.cluster.layout
    if wish.given is not None:
        found = _ranked(_given(wish.given, problem, request), problem, memory, cost)
        return _answer(problem, wish, tuple(found), memory, considered=len(found))
    space = space_of(problem, request, wish)
    outcome = (least_memory if wish.goal == "memory" else search)(space, memory, cost, shown=SHOWN)
    ranking = [recommendation(problem.engine, r, i, layout) for i, r in enumerate(outcome.ranking)]
    nearest: Recommendation | None = None
    changes: tuple[Change, ...] = ()
    if not ranking:
        miss = nearest_miss(space, memory, cost)
        nearest = recommendation(problem.engine, miss, 0, layout)
        changes = tuple(cheapest_changes(problem, request, wish, nearest, memory))
    elif wish.explain:
        said = reasons_for(outcome.ranking[0], space, memory, cost)
        if wish.goal == "throughput":
            said += what_more_buys(problem, request, wish, outcome.ranking[0], memory)
        ranking[0] = replace(ranking[0], reasons=tuple(said))
    return replace(
        _answer(problem, wish, tuple(ranking), memory, considered=outcome.considered),
        nearest=nearest,
        changes=changes,
        current=current,
        points=tuple(points(space, outcome, memory, cost)) if wish.explain else (),
    )


def _ranked(given: Sequence[Candidate], problem: Problem, memory: Memory, cost: CostModel) -> list[Recommendation]:
    """The given candidates, best first, each under its own engine."""
    alike: dict[Engine, list[Candidate]] = {}
    for candidate in given:
        alike.setdefault(candidate.engine or problem.engine, []).append(candidate)
    ranked = []
    for engine, own in alike.items():
        if engine is problem.engine:
            ranked += rank_all(own, memory, cost)
            continue
        apart = Memory(engine, problem.spec, problem.cluster, depth=memory.depth)
        ranked += rank_all(own, apart, CostModel(engine, problem.spec, problem.cluster, problem.rates))
        memory.simulated += apart.simulated
        memory.problem = memory.problem or apart.problem
    ranked.sort(key=order_of)
    return [recommendation(problem.engine, r, i, problem.cluster.layout) for i, r in enumerate(ranked)]


def _given(given: Sequence[Candidate] | str, problem: Problem, request: Request) -> Sequence[Candidate]:
    if not isinstance(given, str):
        return given
    return read_candidates(given, problem, request)


def _judged_by(problem: Problem) -> str:
    if problem.spec.has_shapes:
        return "an analytic bound on activations"
    return "the activations of a model of usual shape"


def _answer(problem: Problem, wish: Wish, ranking: tuple[Recommendation, ...], memory: Memory, *, considered: int) -> Answer:
    warnings = [*wish.notes, *problem.warnings]
    if memory.problem:
        warnings.append(f"formula depth: {memory.problem}; what fits is judged by {_judged_by(problem)}")
    spec = problem.spec
    return Answer(
        model={"name": spec.name, "params": spec.params, "trainable": spec.trainable, "source": spec.source},
        workload=problem.workload,
        cluster=problem.cluster,
        ranking=ranking,
        warnings=tuple(warnings),
        considered=considered,
        simulated=memory.simulated,
        goal=wish.goal,
        global_batch=wish.global_batch,
        rates=problem.rates.as_dict(),
    )
