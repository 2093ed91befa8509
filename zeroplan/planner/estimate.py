"""estimate(): the plans of a request, each at the deepest depth that can be had."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zeroplan.core.errors import BadInput
from zeroplan.core.plan import MemoryPlan, ModelInfo, Report
from zeroplan.core.units import format_bytes
from zeroplan.core.unmodelled import Unmodelled, may_add, may_save
from zeroplan.engines.base import Case, Engine
from zeroplan.planner.bound import activation_bound
from zeroplan.planner.describe import describe_cluster, describe_setup, describe_workload
from zeroplan.planner.formula import FORMULA, formula_plan
from zeroplan.planner.request import Request
from zeroplan.planner.resolve import Resolved, resolve

if TYPE_CHECKING:
    from zeroplan.planner.simulated import Simulated
    from zeroplan.planner.tapes import ExpandedTapes
    from zeroplan.simulate.allocator.config import AllocatorConfig


@dataclass(frozen=True, slots=True)
class Estimate:
    """A report with the simulated run behind each plan; None for a plan at formula depth."""

    report: Report
    runs: tuple[Simulated | None, ...]


def estimate_report(request: Request) -> Report:
    """Every plan of the request, with what it was asked for.

    Raises:
        BadInput: a value that cannot be used.
    """
    return estimate_runs(request).report


def estimate_runs(request: Request) -> Estimate:
    """The report of :func:`estimate_report`, and the simulated run behind each plan.

    Raises:
        BadInput: a value that cannot be used; or ``--depth simulated`` where a model cannot be traced.
    """
    setup = None
    if request.files:
        from zeroplan.planner.from_files import with_files

        request, setup = with_files(request)
    resolved = resolve(request)
    engine, spec = resolved.engine, resolved.spec
    config = allocator_config(request.alloc_conf)
    tapes = None if resolved.depth == FORMULA else _tapes(engine)
    shallow: list[str] = []  # why a plan is at formula depth: the first of the warnings
    plans: list[MemoryPlan] = []
    runs: list[Simulated | None] = []
    for case in resolved.cases:
        plan = formula_plan(engine, case)
        run = None if tapes is None else _simulated(plan, resolved, case, tapes, config, shallow)
        plan = plan if run is None else run.plan
        plans.append(plan.model_copy(update={"fits": honest_fit(plan.fits, resolved.unmodelled)}))
        runs.append(run)
    report = Report(
        model=ModelInfo(name=spec.name, params=spec.params, trainable=spec.trainable, source=spec.source),
        workload=describe_workload(resolved.workload),
        cluster=describe_cluster(resolved.cluster),
        setup=None if setup is None else describe_setup(setup),
        warnings=(*shallow, *(f"{one.key}: {one.says}" for one in resolved.unmodelled), *resolved.warnings),
        plans=tuple(plans),
    )
    return Estimate(_with_reliefs(report, resolved, runs, config), tuple(runs))


def _with_reliefs(report: Report, resolved: Resolved, runs: list[Simulated | None], config: AllocatorConfig | None) -> Report:
    """The report with the options that would lower the memory of its decisive plan, if that was simulated."""
    plan = report.decisive
    at = next((index for index, one in enumerate(report.plans) if one is plan), None)
    run = None if at is None else runs[at]
    if at is None or run is None:
        return report
    from zeroplan.planner.relief import find_reliefs

    listed = {case.zero: one for case, one in zip(resolved.cases, report.plans, strict=True)}
    found = find_reliefs(resolved.engine, resolved.cases[at], run, config, listed)
    return report.model_copy(update={"reliefs": found})


def honest_fit(fits: bool | None, left_out: Iterable[Unmodelled]) -> bool | None:
    """Whether the run fits, as far as figures tell that leave keys out: None where those may turn the answer."""
    left_out = tuple(left_out)
    return None if (fits and may_add(left_out)) or (fits is False and may_save(left_out)) else fits


def allocator_config(alloc_conf: str) -> AllocatorConfig | None:
    """The settings of ``--alloc-conf``; None where nothing is set.

    Raises:
        BadInput: a setting that torch does not take.
    """
    if not alloc_conf:
        return None
    from zeroplan.simulate.allocator.config import AllocatorConfig

    return AllocatorConfig.parse(alloc_conf, where="--alloc-conf")


def _tapes(engine: Engine) -> ExpandedTapes:
    from zeroplan.planner.tapes import ExpandedTapes

    return ExpandedTapes(engine)


def _simulated(
    plan: MemoryPlan,
    resolved: Resolved,
    case: Case,
    tapes: ExpandedTapes,
    config: AllocatorConfig | None,
    warnings: list[str],
) -> Simulated | None:
    """The simulated run, or None with a warning where the model cannot be traced.

    Raises:
        BadInput: when the model cannot be traced and the user asked for simulated depth by name.
    """
    from zeroplan.planner.simulated import SIMULATED, simulated_plan
    from zeroplan.planner.tapes import NoTapeError

    try:
        return simulated_plan(plan, resolved.engine, case, tapes.of(case), config)
    except NoTapeError as error:
        if resolved.depth == SIMULATED:
            raise BadInput(str(error), where="--depth simulated", remedy="use --depth formula") from None
        _warn(str(error), case, warnings)
        return None


def _warn(reason: str, case: Case, warnings: list[str]) -> None:
    bound = activation_bound(case.spec, case.workload)
    text = f"formula depth: {reason}"
    if bound is not None:
        text += f"; activations should stay below {format_bytes(bound)} (analytic bound), which no figure here holds"
    if text not in warnings:
        warnings.append(text)
