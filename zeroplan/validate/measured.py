"""Makes one Measurement of all ranks' figures: the largest of each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.validate.compare import compare
from zeroplan.validate.planned import Planned
from zeroplan.validate.results import Comparison, MeasuredRow, Measurement, RankOutOfMemory

#: How gloo and NCCL say that another rank is gone.
_PEER_IS_GONE = ("Timed out waiting", "Connection reset", "Connection closed", "Broken pipe", "remote process exited")
_FIGURES = ("live_after_step", "peak_allocated", "peak_reserved", "context", "total", "step_seconds", "steps")


def measurement_of(
    results: Sequence[Mapping[str, Any]], *, device: str, ranks: int, nodes: int = 1, failure: str = ""
) -> Measurement:
    """Merge the ranks' results into the measurement of one job.

    Args:
        results: the result of each rank that wrote one.
        device: ``cuda`` or ``cpu``.
        ranks: the number of ranks that were started.
        nodes: the number of nodes, which have equally many ranks.
        failure: the launcher's message about a job that ended early.

    Raises:
        BadInput: when a rank refused the job.
    """
    for result in results:
        if "bad_input" in result:
            raise BadInput(**result["bad_input"])
    ran_out = next((result for result in results if "out_of_memory" in result), None)
    first: Mapping[str, Any] = results[0] if results else {}
    return Measurement(
        device=device,
        ranks=ranks,
        rows=_worst_rows(results),
        owned=bool(first.get("owned")),
        tensors_counted=bool(first.get("tensors_counted")),
        total_source=str(first.get("total_source", "")),
        phases=_most_by_phase(results),
        host=sum(int(result.get("host", 0)) for result in results) // nodes,
        host_before=sum(int(result.get("host_before", 0)) for result in results) // nodes,
        host_phases=_sums_by_phase(results, nodes),
        pinned=sum(result["pinned"] for result in results) // nodes if all("pinned" in result for result in results) else None,
        files=_most(results, "files"),
        out_of_memory=None if ran_out is None else RankOutOfMemory(rank=ran_out["rank"], **ran_out["out_of_memory"]),
        failure="" if ran_out is not None else _failure(results, ranks, failure),
        versions=dict(first.get("versions", {})),
        **{name: _most(results, name) for name in _FIGURES if _most(results, name) is not None},
    )


def _failure(results: Sequence[Mapping[str, Any]], ranks: int, launcher: str) -> str:
    """Return why ranks gave no figures; an empty string where all did."""
    errors = [f"rank {result['rank']} failed: {result['error']}" for result in results if "error" in result]
    if not errors and len(results) >= ranks:
        return ""
    silent = ", ".join(f"rank {rank}" for rank in range(ranks) if rank not in {result.get("rank") for result in results})
    failure = next(iter(errors), launcher or f"{ranks - len(results)} of {ranks} ranks gave no result")
    if errors and silent and any(word in failure for word in _PEER_IS_GONE):
        return f"{silent} ended or hung without a result; {failure}"
    return failure


def _most(results: Sequence[Mapping[str, Any]], name: str) -> Any:
    return max((result[name] for result in results if result.get(name) is not None), default=None)


def _worst_rows(results: Sequence[Mapping[str, Any]]) -> tuple[MeasuredRow, ...]:
    most: dict[tuple[str, str, str], int] = {}
    for result in results:
        for buffer, unit, place, count in result.get("rows", ()):
            key = (buffer, unit, place)
            most[key] = max(most.get(key, 0), count)
    return tuple(MeasuredRow(buffer=b, unit=u, place=p, bytes=count) for (b, u, p), count in most.items())


def _sums_by_phase(results: Sequence[Mapping[str, Any]], nodes: int) -> dict[str, int]:
    """A node's resident memory by phase: the sum of its ranks' peaks, which need not be reached at once."""
    phases: dict[str, int] = {}
    for result in results:
        for phase, peak in result.get("host_phases", {}).items():
            phases[phase] = phases.get(phase, 0) + peak
    return {phase: peak // nodes for phase, peak in phases.items()}


def _most_by_phase(results: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    phases: dict[str, int] = {}
    for result in results:
        for phase, peak in result.get("phases", {}).items():
            phases[phase] = max(phases.get(phase, 0), peak)
    return phases


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
