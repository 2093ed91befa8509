"""estimate(): the plans of a request, each at the deepest depth that can be had."""

from __future__ import annotations

from zeroplan.core.plan import MemoryPlan, ModelInfo, Report
from zeroplan.planner.formula import formula_plan
from zeroplan.planner.request import Request, describe_cluster, describe_workload, resolve


def estimate_report(request: Request) -> Report:
    """Every plan of the request, with what it was asked for.

    Raises:
        BadInput: a value that cannot be used.
    """
    resolved = resolve(request)
    plans: list[MemoryPlan] = [formula_plan(resolved.engine, case) for case in resolved.cases]
    spec = resolved.spec
    return Report(
        schema_version=1,
        model=ModelInfo(name=spec.name, params=spec.params, trainable=spec.trainable, source=spec.source),
        workload=describe_workload(resolved.workload),
        cluster=describe_cluster(resolved.cluster),
        warnings=resolved.warnings,
        plans=tuple(plans),
    )
