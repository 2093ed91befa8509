"""The prediction side of a verification: a plan for this machine, with the rows that the run can be held against."""

from __future__ import annotations

from dataclasses import dataclass

from zeroplan.core.buffers import Buffer, Phase, Place
from zeroplan.core.layout import runtime_buffers
from zeroplan.core.plan import MemoryPlan
from zeroplan.engines.base import Case, Engine
from zeroplan.engines.runtime.checkpoints import host_buffers
from zeroplan.engines.runtime.engine import Runtime
from zeroplan.engines.simulation import phase_of_mark
from zeroplan.planner.formula import formula_plan
from zeroplan.planner.simulated import simulated_plan
from zeroplan.planner.tapes import ExpandedTapes, NoTapeError
from zeroplan.simulate.timeline import Timeline

#: A row's key: buffer, unit, place.
Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Planned:
    """One configuration, predicted.

    `owned` are the buffers that the runtime allocates, by unit; None for other engines. `passing` names those of them that
    come and go. Without the caching allocator's
    rounding, `requested` is the most that lives at once in training (forward, backward, step) and `requested_live` what lives
    between two steps; both None at formula depth, where `undone` says why nothing deeper could be had. `drops` says that the
    model has dropout, whose masks and attention kernels differ between a CPU and CUDA, or other modules that do.
    """

    case: Case
    plan: MemoryPlan
    owned: dict[Key, int] | None
    requested: int | None = None
    requested_live: int | None = None
    undone: str = ""
    drops: bool = False
    passing: frozenset[str] = frozenset()


def predict(engine: Engine, case: Case, streams: ExpandedTapes) -> Planned:
    """The deepest plan that can be had; `streams` are those of the cases that are verified together."""
    owned, passing = None, frozenset[str]()
    if isinstance(engine, Runtime):
        rows = runtime_buffers(engine.layout(case))
        owned = {(row.buffer.value, row.unit, row.place.value): row.bytes for row in rows}
        standing = {row.buffer for row in rows if row.stands}
        passing = frozenset(row.buffer.value for row in rows if row.buffer not in standing)
    formula = formula_plan(engine, case)
    try:
        stream = streams.of(case)
    except NoTapeError as error:
        return Planned(case, formula, owned, undone=str(error), passing=passing)
    if owned is not None and isinstance(engine, Runtime):
        buffer, place = Buffer.ACTIVATION_CHECKPOINT.value, Place.PINNED.value
        owned |= {(buffer, unit, place): count for unit, count in host_buffers(engine.moved(case, stream)).items()}
    run = simulated_plan(formula, engine, case, stream)
    live = _training(run.simulation.timeline)
    return Planned(
        case, run.plan, owned, *live, drops=_has_dropout(case) if streams.differs is None else streams.differs, passing=passing
    )


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
