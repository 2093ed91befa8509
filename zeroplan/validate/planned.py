"""The plan of a configuration for this machine, with the rows that a measurement is compared with."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zeroplan.core.buffers import Phase
from zeroplan.core.plan import MemoryPlan
from zeroplan.engines.base import Engine
from zeroplan.engines.case import Case
from zeroplan.engines.simulation import phase_of_mark
from zeroplan.engines.verification import OwnedBuffers
from zeroplan.planner.estimate import plan_stages
from zeroplan.planner.formula import formula_plan
from zeroplan.planner.simulated import beyond_last_rank, simulated_plan
from zeroplan.planner.tapes import ExpandedTapes, NoTapeError
from zeroplan.simulate.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Planned:
    """The prediction for one configuration.

    Attributes:
        case: the configuration.
        plan: the plan, simulated where there is a tape.
        owned: the buffers that the engine accounts for itself, which must be equal; None for an engine without an account.
        context: bytes of the CUDA context; None at formula depth.
        requested: the peak of requested bytes in training (forward, backward, step), without the caching allocator's
            rounding; None at formula depth.
        requested_live: requested bytes alive between two steps; None at formula depth.
        not_simulated: at formula depth, the reason.
        cpu_differs: whether a CPU's kernels keep other tensors than CUDA's, as they do for dropout.
        beyond: how many bytes more than planned the worst rank may have, for a known reason.
        stages: the predictions for a pipeline's ranks, in its order; all of the above is then the one's that needs the most.
    """

    case: Case
    plan: MemoryPlan
    owned: OwnedBuffers | None
    context: int | None = None
    requested: int | None = None
    requested_live: int | None = None
    not_simulated: str = ""
    cpu_differs: bool = False
    beyond: int = 0
    stages: tuple[Planned, ...] = ()


def predict(engine: Engine, case: Case, tapes: ExpandedTapes) -> Planned:
    """The prediction for a case; `tapes` are those of the cases that are verified together."""
    if case.layout.pp == 1:
        return _predict(engine, case, tapes)
    by_rank: dict[int, Planned] = {}

    def plan_one(one: Case) -> tuple[MemoryPlan, None]:
        by_rank[one.pp_rank] = _predict(engine, one, tapes)
        return by_rank[one.pp_rank].plan, None

    plan, _ = plan_stages(engine, case, plan_one)
    worst = by_rank[plan.stages[0].stage]
    return replace(worst, plan=plan, stages=tuple(by_rank[rank] for rank in range(case.layout.pp)))


def _predict(engine: Engine, case: Case, tapes: ExpandedTapes) -> Planned:
    formula = formula_plan(engine, case)
    try:
        tape = tapes.of(case)
    except NoTapeError as error:
        return Planned(case, formula, engine.owned_buffers(case, None), not_simulated=str(error))
    run = simulated_plan(formula, engine, case, tape)
    requested, live = _training(run.simulation.timeline)
    differs = _has_dropout(case) if tapes.cpu_differs is None else tapes.cpu_differs
    owned = engine.owned_buffers(case, tape)
    beyond = beyond_last_rank(case)
    return Planned(case, run.plan, owned, run.outside.context, requested, live, cpu_differs=differs, beyond=beyond)


def _has_dropout(case: Case) -> bool:
    """Return whether the model has dropout by its config and transformers' defaults."""
    from zeroplan.trace.build import full_config

    values = full_config(case.spec.config).items()
    return any(("drop" in key) and isinstance(value, float) and value > 0 for key, value in values)


def _training(timeline: Timeline) -> tuple[int, int]:
    """Return the requested bytes at the peak of training, and those alive after the last step."""
    marks = list(zip(timeline.marks, timeline.requested(), strict=True))
    peaks = [peak for mark, (peak, _) in marks if phase_of_mark(mark.name) not in (Phase.LOAD, Phase.INIT)]
    return max(peaks, default=0), marks[-1][1][1] if marks else 0
