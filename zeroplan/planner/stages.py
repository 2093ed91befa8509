"""The plan of a pipeline: every stage is planned, and the plan is that of the stage that needs the most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from zeroplan.core.plan import MemoryPlan, StageMemory
from zeroplan.engines.base import Case, Engine

if TYPE_CHECKING:
    from zeroplan.planner.simulated import Simulated

Planned = tuple[MemoryPlan, "Simulated | None"]


def plan_stages(
    engine: Engine,
    case: Case,
    plan_one: Callable[[Case], Planned],
    *,
    to_first_miss: bool = False,
    most: int | None = None,
) -> Planned:
    """Plan each pipeline stage; return the plan of the one that needs the most, with what all of them need.

    Args:
        engine: says which blocks a stage has.
        case: the run; its `pp_rank` does not matter.
        to_first_miss: plan no further stage once one does not fit.
        most: plan so many stages, from the first on; None plans all.
    """
    planned: list[tuple[Planned, StageMemory]] = []
    for index in range(min(case.layout.pp, most or case.layout.pp)):
        one = replace(case, pp_rank=index)
        plan, run = plan_one(one)
        planned.append(((plan, run), _memory(engine, one, plan)))
        if to_first_miss and plan.fits is False:
            break
    planned.sort(key=lambda item: item[0][0].gpu.needed, reverse=True)
    (worst, run), _ = planned[0]
    return worst.model_copy(update={"stages": tuple(memory for _, memory in planned)}), run


def _memory(engine: Engine, case: Case, plan: MemoryPlan) -> StageMemory:
    gpu = plan.gpu
    return StageMemory(
        stage=case.pp_rank,
        blocks=engine.blocks(case),
        model_states=gpu.model_states,
        peak_allocated=gpu.peak_allocated,
        peak_reserved=gpu.peak_reserved,
        total=gpu.total,
        verdict=plan.verdict,
        fits=plan.fits,
    )
