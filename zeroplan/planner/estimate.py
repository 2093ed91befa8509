"""estimate(): the plans of a request, each at the deepest depth that can be had."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zeroplan.core.errors import BadInput
from zeroplan.core.plan import ModelInfo, Report
from zeroplan.core.units import format_bytes
from zeroplan.engines.base import Case
from zeroplan.planner.bound import activation_bound
from zeroplan.planner.formula import FORMULA, formula_plan
from zeroplan.planner.request import Request, Resolved, describe_cluster, describe_workload, resolve

if TYPE_CHECKING:
    from zeroplan.planner.simulated import Simulated


@dataclass(frozen=True, slots=True)
class Estimate:
    """A report with the simulated run behind each plan, None where a plan is of formula depth."""

    report: Report
    runs: tuple[Simulated | None, ...]


def estimate_report(request: Request) -> Report:
    """Every plan of the request, with what it was asked for.

    Raises:
        BadInput: a value that cannot be used.
    """
    return estimate_runs(request).report


def estimate_runs(request: Request) -> Estimate:
    """The same, with the simulated runs.

    Raises:
        BadInput: a value that cannot be used.
    """
    resolved = resolve(request)
    warnings = list(resolved.warnings)
    runs = _simulated(resolved, request.alloc_conf, warnings)
    plans = [
        formula_plan(resolved.engine, case) if run is None else run.plan for case, run in zip(resolved.cases, runs, strict=True)
    ]
    spec = resolved.spec
    report = Report(
        model=ModelInfo(name=spec.name, params=spec.params, trainable=spec.trainable, source=spec.source),
        workload=describe_workload(resolved.workload),
        cluster=describe_cluster(resolved.cluster),
        warnings=tuple(warnings),
        plans=tuple(plans),
    )
    return Estimate(report, tuple(runs))


def _simulated(resolved: Resolved, alloc_conf: str, warnings: list[str]) -> list[Simulated | None]:
    """By case the simulated plan, or None where formula depth was asked for or, with a warning, the model cannot be traced.

    Raises:
        BadInput: when simulated depth was asked for by name and cannot be had, or the allocator's settings cannot be read.
    """
    config = None
    if alloc_conf:
        from zeroplan.simulate.allocator.config import AllocatorConfig

        config = AllocatorConfig.parse(alloc_conf, where="--alloc-conf")
    if resolved.depth == FORMULA:
        return [None] * len(resolved.cases)
    from zeroplan.planner.simulated import SIMULATED, simulated_plan
    from zeroplan.planner.tapes import ExpandedTapes, NoTapeError

    streams = ExpandedTapes(resolved.engine)
    runs: list[Simulated | None] = []
    for case in resolved.cases:
        try:
            runs.append(simulated_plan(resolved.engine, case, streams.of(case), config))
        except NoTapeError as error:
            if resolved.depth == SIMULATED:
                raise BadInput(str(error), where="--depth simulated", remedy="use --depth formula") from None
            _warn(str(error), case, warnings)
            runs.append(None)
    return runs


def _warn(reason: str, case: Case, warnings: list[str]) -> None:
    bound = activation_bound(case.spec, case.workload)
    text = f"formula depth: {reason}"
    if bound is not None:
        text += f"; activations should stay below {format_bytes(bound)} (analytic bound), which no figure here holds"
    if text not in warnings:
        warnings.append(text)
