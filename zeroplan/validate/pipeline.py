"""Holds the ranks of a run against their plans: those of a pipeline each against the plan of its own stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zeroplan.validate.compare import compare
from zeroplan.validate.measured import measurement_of
from zeroplan.validate.planned import Planned
from zeroplan.validate.results import Comparison

#: What every rank of a run wrote about it.
Results = Sequence[Mapping[str, Any]]


def compare_ranks(
    planned: Planned, results: Results, tolerance: float, *, device: str, ranks: int, nodes: int = 1, failure: str = ""
) -> Comparison:
    """Compare a configuration's plan with what its ranks measured.

    Args:
        planned: the prediction.
        results: the result of each rank that wrote one.
        tolerance: a fraction of the planned total.
        device: ``cuda`` or ``cpu``.
        ranks: the number of ranks that were started.
        nodes: the number of nodes, which have equally many ranks.
        failure: the launcher's message about a run that ended early.

    Raises:
        BadInput: when a rank refused the run.
    """
    whole = measurement_of(results, device=device, ranks=ranks, nodes=nodes, failure=failure)
    if not planned.stages:
        return compare(planned, whole, tolerance)
    layout = planned.case.layout
    if whole.failure:
        return compare(planned, whole, tolerance)
    if whole.out_of_memory is not None:
        place = layout.pipeline_rank(whole.out_of_memory.rank)
        return compare(planned.stages[place], whole, tolerance).model_copy(update={"pp_rank": place})
    found: list[Comparison] = []
    for place, one in enumerate(planned.stages):
        own = [result for result in results if layout.pipeline_rank(result["rank"]) == place]
        measured = measurement_of(own, device=device, ranks=len(own), nodes=max(1, len(own) * nodes // ranks))
        found.append(compare(one, measured, tolerance).model_copy(update={"pp_rank": place}))
    shown = next((one for one in found if not one.within), None) or max(found, key=_used)
    plan = shown.plan.model_copy(update={"stages": planned.plan.stages})
    return shown.model_copy(
        update={
            "plan": plan,
            "within": all(one.within for one in found),
            "verdict": f"pipeline rank {shown.pp_rank} of {len(found)}: {shown.verdict}",
            "stages": tuple(found),
        }
    )


def _used(one: Comparison) -> int:
    """Return the bytes that a rank used at its peak, as far as they are known."""
    measured = one.measurement
    return measured.total or measured.peak_reserved or measured.peak_allocated or sum(row.bytes for row in measured.rows)
