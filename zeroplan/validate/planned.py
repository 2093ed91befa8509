"""The prediction side of a verification: a plan for this machine, with the rows that the run can be held against."""

from __future__ import annotations

from dataclasses import dataclass

from zeroplan.core.buffers import Phase
from zeroplan.core.plan import MemoryPlan
from zeroplan.engines.base import Case, Engine
from zeroplan.engines.simulation import phase_of_mark
from zeroplan.engines.verification import OwnedBuffers
from zeroplan.planner.formula import formula_plan
from zeroplan.planner.simulated import simulated_plan
from zeroplan.planner.tapes import ExpandedTapes, NoTapeError
from zeroplan.simulate.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Planned:
    """One configuration, predicted.

    Attributes:
        case: the configuration.
        plan: at the deepest depth that can be had.
        owned: what the engine's own account must say after a run; None for an engine without one.
        context: bytes of the CUDA context; None at formula depth.
        requested: the most bytes that live at once in training (forward, backward, step), without the caching allocator's
            rounding; None at formula depth.
        requested_live: likewise what lives between two steps.
        undone: at formula depth, why nothing deeper could be had.
        drops: whether the model has dropout, whose masks and attention kernels differ between a CPU and CUDA, or other modules
            that do.
    """

    case: Case
    plan: MemoryPlan
    owned: OwnedBuffers | None
    context: int | None = None
    requested: int | None = None
    requested_live: int | None = None
    undone: str = ""
    drops: bool = False


def predict(engine: Engine, case: Case, tapes: ExpandedTapes) -> Planned:
    """The deepest plan that can be had; `tapes` are those of the cases that are verified together."""
    formula = formula_plan(engine, case)
    try:
        tape = tapes.of(case)
    except NoTapeError as error:
        return Planned(case, formula, engine.owned_buffers(case, None), undone=str(error))
    run = simulated_plan(formula, engine, case, tape)
    requested, live = _training(run.simulation.timeline)
    drops = _has_dropout(case) if tapes.differs is None else tapes.differs
    return Planned(case, run.plan, engine.owned_buffers(case, tape), run.outside.context, requested, live, drops=drops)


def _has_dropout(case: Case) -> bool:
    """Whether the config, with transformers' defaults, drops anything out."""
    from zeroplan.trace.build import full_config

    values = full_config(case.spec.config).items()
    return any(("drop" in key) and isinstance(value, float) and value > 0 for key, value in values)


def _training(timeline: Timeline) -> tuple[int, int]:
    """Bytes requested: training's peak, and what is alive after the last step."""
    marks = list(zip(timeline.marks, timeline.requested(), strict=True))
    peaks = [peak for mark, (peak, _) in marks if phase_of_mark(mark.name) not in (Phase.LOAD, Phase.INIT)]
    return max(peaks, default=0), marks[-1][1][1] if marks else 0
