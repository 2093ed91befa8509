"""estimate(): the plans of a request, each at the deepest depth that can be had."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from zeroplan.core.errors import BadInput
from zeroplan.core.plan import MemoryPlan, ModelInfo, Report, StageMemory, Verdict
from zeroplan.core.plumbing.progress import working
from zeroplan.core.workload import DType
from zeroplan.engines.base import Engine
from zeroplan.engines.case import Case
from zeroplan.planner.describe import describe_cluster, describe_setup, describe_workload
from zeroplan.planner.formula import FORMULA, formula_plan, how_to_simulate
from zeroplan.planner.resolve import Resolved, resolve
from zeroplan.run.ask import Ask
from zeroplan.techniques.ppo import PpoTechnique
from zeroplan.techniques.quantized_base import QuantizedBaseTechnique

if TYPE_CHECKING:
    from zeroplan.interop.setups import Setup
    from zeroplan.planner.simulated import Simulated
    from zeroplan.planner.tapes import ExpandedTapes
    from zeroplan.simulate.allocator.config import AllocatorConfig


@dataclass(frozen=True, slots=True)
class Estimate:
    """A report with the simulated run behind each plan; None for a plan at formula depth."""

    report: Report
    runs: tuple[Simulated | None, ...]


def estimate_report(request: Ask) -> Report:
    """Return every plan of the request, with the question. Raises BadInput: a value that cannot be used."""
    return estimate_runs(request).report


def estimate_runs(request: Ask, each: Callable[[Estimate, int], None] | None = None, *, relief: bool = True) -> Estimate:
    """Return the report of :func:`estimate_report`, and the simulated run behind each plan.

    Args:
        each: called as each plan is done, in the order of the report: with the estimate so far, which has no reliefs yet, and
            the number of plans that it will have.
        relief: whether to look for what would lower the decisive plan, which takes most of the time of a single plan.

    Raises:
        BadInput: a value that cannot be used; or ``--depth simulated`` where a model cannot be traced.
    """
    setup = None
    if request.files:
        from zeroplan.planner.merge import with_files

        request, setup = with_files(request)
        if setup.ask.lit_model is not None:
            from zeroplan.planner.live_module import with_own_code

            request = with_own_code(request, setup)
        if setup.ask[PpoTechnique.ppo] is not None and request.depth != FORMULA:
            from zeroplan.planner.ppo import with_ppo

            request = with_ppo(request, setup)
    if request.inputs is not None:
        from zeroplan.planner.live_module import with_shape

        request = with_shape(request)
    resolved = resolve(request)
    engine = resolved.engine
    config = allocator_config(request.alloc_conf)
    tapes = None if resolved.depth == FORMULA else _tapes(engine, request)
    shallow: list[str] = []  # why a plan is at formula depth: the first of the warnings
    plans: list[MemoryPlan] = []
    runs: list[Simulated | None] = []
    for done, case in enumerate(resolved.cases):
        working(f"planning {case.zero.label}", done, len(resolved.cases))
        plan, run = plan_case(formula_plan(resolved.engine, case), case, resolved, tapes, config, shallow)
        plans.append(plan)
        runs.append(run)
        if each is not None:
            each(Estimate(_report(resolved, setup, shallow, plans), tuple(runs)), len(resolved.cases))
    report = _report(resolved, setup, shallow, plans)
    return Estimate(_with_reliefs(report, request, resolved, runs, config) if relief else report, tuple(runs))


def _report(resolved: Resolved, setup: Setup | None, shallow: list[str], plans: list[MemoryPlan]) -> Report:
    """Return the question with these plans; arguments as in :func:`estimate_runs`."""
    spec = resolved.spec
    return Report(
        model=ModelInfo(name=spec.name, params=spec.params, trainable=spec.trainable, source=spec.source),
        workload=describe_workload(resolved.workload),
        cluster=describe_cluster(resolved.cluster, resolved.cases[0].parallel if resolved.cases else None),
        setup=None if setup is None else describe_setup(setup),
        warnings=(*shallow, *resolved.warnings, *_without_arithmetic(resolved)),
        plans=tuple(plans),
    )


def _without_arithmetic(resolved: Resolved) -> tuple[str, ...]:
    """Return a warning where the card cannot compute in the dtype; ``recommend`` takes another one then."""
    gpu = resolved.cluster.gpu
    if resolved.workload.numerics.dtype is not DType.BF16 or gpu.bf16:
        return ()
    return (f"{gpu.name} has no bf16 arithmetic: torch emulates it, slowly; --dtype fp16 is what it runs",)


def _with_reliefs(
    report: Report, request: Ask, resolved: Resolved, runs: list[Simulated | None], config: AllocatorConfig | None
) -> Report:
    """The report with the options that would lower the memory of its decisive plan, if that was simulated; and with adapters,
    where none of them makes it fit.
    """
    plan = report.decisive
    at = next((index for index, one in enumerate(report.plans) if one is plan), None)
    run = None if at is None else runs[at]
    if at is None or run is None or plan is None or plan.stages:
        return report
    from zeroplan.planner.relief import find_reliefs

    working("what would lower it")
    listed = {case.zero: one for case, one in zip(resolved.cases, report.plans, strict=True)}
    program = report.setup["program"] if report.setup else ""
    found = find_reliefs(resolved.engine, resolved.cases[at], run, config, listed, program)
    short = plan.verdict in (Verdict.MAY_FIT, Verdict.DOES_NOT_FIT) and not any(one.fits for one in found)
    if short and resolved.workload.lora_rank is None and not request.from_scratch:
        from zeroplan.planner.adapters import adapters_that_fit

        adapters = adapters_that_fit(request, config, plan.gpu.total or 0)
        found += () if adapters is None else (adapters,)
    return report.model_copy(update={"reliefs": found})


def allocator_config(alloc_conf: str) -> AllocatorConfig | None:
    """The settings of ``--alloc-conf``; None where nothing is set. Raises BadInput: a setting that torch does not take."""
    if not alloc_conf:
        return None
    from zeroplan.simulate.allocator.config import AllocatorConfig

    return AllocatorConfig.parse(alloc_conf, where="--alloc-conf")


def _tapes(engine: Engine, request: Ask) -> ExpandedTapes:
    if request.inputs is not None:
        from zeroplan.planner.live_module import ModuleTapes

        return ModuleTapes(engine, request.model, request.inputs, cut=request[QuantizedBaseTechnique.built])
    if request.recorded is not None:
        from zeroplan.planner.tapes import RecordedTapes

        return RecordedTapes(engine, request.recorded)
    from zeroplan.planner.tapes import ExpandedTapes

    return ExpandedTapes(engine)


def plan_case(
    plan: MemoryPlan,
    case: Case,
    resolved: Resolved,
    tapes: ExpandedTapes | None,
    config: AllocatorConfig | None,
    shallow: list[str],
    *,
    to_first_doubt: bool = False,
    most_stages: int | None = None,
) -> tuple[MemoryPlan, Simulated | None]:
    """Return the plan of one case with its simulated run; of a pipeline that of the stage that needs the most.

    Args:
        plan: the case's plan by formulas.
        resolved: the request that it is of.
        tapes: the tapes of its layouts; None for formula depth.
        config: the allocator's settings; None for torch's defaults.
        shallow: gets a warning where the plan stays at formula depth because the model cannot be traced.
        to_first_doubt: look at no further stage of a pipeline once one does not fit, or may not.
        most_stages: look at so many, from the first on.

    Raises:
        BadInput: when the model cannot be traced and the user asked for simulated depth by name.
    """
    if case.layout.pp == 1:
        return _simulated(plan, case, resolved, tapes, config, shallow)

    def planned(stage: Case) -> tuple[MemoryPlan, Simulated | None]:
        return _simulated(formula_plan(resolved.engine, stage), stage, resolved, tapes, config, shallow)

    return plan_stages(resolved.engine, case, planned, to_first_doubt=to_first_doubt, most=most_stages)


def _simulated(
    plan: MemoryPlan,
    case: Case,
    resolved: Resolved,
    tapes: ExpandedTapes | None,
    config: AllocatorConfig | None,
    shallow: list[str],
) -> tuple[MemoryPlan, Simulated | None]:
    """Return the formula's `plan` with its simulated run; at formula depth as it is, and so, with a warning in `shallow`,
    where the model cannot be traced.

    Raises:
        BadInput: when the model cannot be traced and the user asked for simulated depth by name.
    """
    if tapes is None:
        return plan, None
    from zeroplan.planner.simulated import SIMULATED, simulated_plan
    from zeroplan.planner.tapes import NoTapeError

    try:
        tape = tapes.of(case)
        if unreached := tape.parameters.unreached:
            case = replace(case, unreached=frozenset(tape.parameters.names[p] for p in unreached))
            plan = formula_plan(resolved.engine, case)
        run = simulated_plan(plan, resolved.engine, case, tape, config)
    except NoTapeError as error:
        if resolved.depth == SIMULATED:
            raise BadInput(str(error), where="--depth simulated", remedy="use --depth formula") from None
        if (text := f"formula depth: {error}") not in shallow:
            shallow.append(text)
        return plan.model_copy(update={"settle": plan.settle.replace(how_to_simulate(case), error.remedy)}), None
    return run.plan, run


Planned = tuple[MemoryPlan, "Simulated | None"]


def plan_stages(
    engine: Engine,
    case: Case,
    plan_one: Callable[[Case], Planned],
    *,
    to_first_doubt: bool = False,
    most: int | None = None,
) -> Planned:
    """Plan each pipeline stage; return the plan of the one that needs the most, with what all of them need.

    Args:
        engine: says which blocks a stage has.
        case: the run; its `pp_rank` does not matter.
        to_first_doubt: plan no further stage once one does not fit, or may not.
        most: plan so many stages, from the first on; None plans all.
    """
    planned: list[tuple[Planned, StageMemory]] = []
    for index in range(min(case.layout.pp, most or case.layout.pp)):
        one = replace(case, pp_rank=index)
        plan, run = plan_one(one)
        planned.append(((plan, run), _memory(engine, one, plan)))
        if to_first_doubt and plan.verdict in (Verdict.DOES_NOT_FIT, Verdict.MAY_FIT):
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
