"""estimate(): the plans of a request, each at the deepest depth that can be had."""

from __future__ import annotations

from dataclasses import dataclass

from zeroplan.core.errors import BadInput
from zeroplan.core.plan import MemoryPlan, ModelInfo, Report
from zeroplan.core.units import format_bytes
from zeroplan.engines.base import Case
from zeroplan.planner.bound import activation_bound
from zeroplan.planner.formula import FORMULA, formula_plan
from zeroplan.planner.request import Request, Resolved, describe_cluster, describe_workload, resolve
from zeroplan.planner.simulated import SIMULATED, Simulated, simulated_plan
from zeroplan.planner.tapes import NoTapeError, Streams
from zeroplan.simulate.allocator_config import AllocatorConfig


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
    config = AllocatorConfig.parse(request.alloc_conf, where="--alloc-conf") if request.alloc_conf else None
    warnings = list(resolved.warnings)
    plans: list[MemoryPlan] = []
    runs: list[Simulated | None] = []
    streams = Streams(resolved.engine)
    for case in resolved.cases:
        run = None if resolved.depth == FORMULA else _simulated(resolved, case, config, streams, warnings)
        runs.append(run)
        plans.append(run.plan if run is not None else formula_plan(resolved.engine, case))
    spec = resolved.spec
    report = Report(
        model=ModelInfo(name=spec.name, params=spec.params, trainable=spec.trainable, source=spec.source),
        workload=describe_workload(resolved.workload),
        cluster=describe_cluster(resolved.cluster),
        warnings=tuple(warnings),
        plans=tuple(plans),
    )
    return Estimate(report, tuple(runs))


def _simulated(
    resolved: Resolved, case: Case, config: AllocatorConfig | None, streams: Streams, warnings: list[str]
) -> Simulated | None:
    """The simulated plan, or None with a warning where the model cannot be traced.

    Raises:
        BadInput: when simulated depth was asked for by name and cannot be had.
    """
    try:
        stream = streams.of(case)
    except NoTapeError as error:
        if resolved.depth == SIMULATED:
            raise BadInput(str(error), where="--depth simulated", remedy="use --depth formula") from None
        _warn(str(error), case, warnings)
        return None
    return simulated_plan(resolved.engine, case, stream, config)


def _warn(reason: str, case: Case, warnings: list[str]) -> None:
    bound = activation_bound(case.spec, case.workload)
    text = f"formula depth: {reason}"
    if bound is not None:
        text += f"; activations should stay below {format_bytes(bound)} (analytic bound), which no figure here holds"
    if text not in warnings:
        warnings.append(text)
