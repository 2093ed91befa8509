"""Options that lower a plan's GPU memory, each with the bytes that it saves when it is changed alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from zeroplan.core.errors import BadInput
from zeroplan.core.families import Family
from zeroplan.core.plan import MemoryPlan, Relief
from zeroplan.core.zero_config import OffloadDevice, OffloadOptimizer, ZeroConfig
from zeroplan.engines.base import Engine
from zeroplan.engines.case import Case
from zeroplan.engines.words import higher_stage
from zeroplan.planner.formula import formula_plan
from zeroplan.planner.simulated import Simulated, simulated_plan
from zeroplan.planner.tapes import tape_at_hand
from zeroplan.simulate.allocator.config import AllocatorConfig
from zeroplan.tape.expanded import ExpandedTape
from zeroplan.techniques.chunked_head import ChunkedHeadTechnique

#: An option that saves less than this part of the total is not listed.
LEAST = 0.02
#: The part of the peak from which logits and loss are worth a knob of their own.
LARGE = 0.2
_EXPANDABLE = "expandable_segments:True"


@dataclass(frozen=True, slots=True)
class _Change:
    """One option: its name, its flags on the command line, and the case with it."""

    what: str
    flags: str
    case: Case
    config: AllocatorConfig | None


def find_reliefs(
    engine: Engine,
    case: Case,
    run: Simulated,
    config: AllocatorConfig | None,
    listed: Mapping[ZeroConfig, MemoryPlan],
    program: str = "",
) -> tuple[Relief, ...]:
    """Find the options that lower a plan's total, in the order of their cost in speed, the cheapest first.

    The order is: a fused head and loss where these are large, expandable segments, a higher stage, gradient checkpointing, a
    smaller micro batch, the optimizer in host memory. An option that needs a tape which is neither shipped nor cached is left
    out; nothing is traced for it.

    Args:
        config: the plan's allocator settings.
        listed: plans of the same workload that are known already, by their ZeroConfig.
        program: whose keys are named where no flag is.
    """
    before = run.plan.gpu.total or 0
    found = []
    for change in (*_fused_head(engine, case, run, config, program), *_changes(engine, case, config)):
        plan = listed.get(change.case.zero) if (change.case.workload, change.config) == (case.workload, config) else None
        plan = plan or _plan(engine, change, case, run.tape)
        if plan is None or plan.gpu.total is None or before - plan.gpu.total < LEAST * before:
            continue
        total = plan.gpu.total
        found.append(Relief(what=change.what, flags=change.flags, saves=before - total, total=total, fits=plan.fits))
    return tuple(found)


def _plan(engine: Engine, change: _Change, case: Case, tape: ExpandedTape) -> MemoryPlan | None:
    """The plan after a change of `case`, which has this tape; None as of :func:`stored_plan`."""
    same = change.case.workload == case.workload and engine.trace_options(change.case) == engine.trace_options(case)
    return stored_plan(engine, change.case, change.config, tape if same else None)


def stored_plan(
    engine: Engine, case: Case, config: AllocatorConfig | None, tape: ExpandedTape | None = None
) -> MemoryPlan | None:
    """The plan of a case by its tape; None where the engine refuses it or its tape is neither shipped nor cached."""
    try:
        engine = engine.for_workload(case.workload)
        engine.require_runnable(case.zero)
        engine.require_workload(case)
        if tape is None:
            tape = tape_at_hand(engine, case)  # refused where it was traced for other numbers
            if tape is None:
                return None
        return simulated_plan(formula_plan(engine, case), engine, case, tape, config).plan
    except BadInput:  # or its head is another than the engine's tiles take
        return None


def _fused_head(engine: Engine, case: Case, run: Simulated, config: AllocatorConfig | None, program: str) -> Iterator[_Change]:
    """Yield the head in tiles where logits and loss are a large part of the peak.

    Its tape is an edit of the run's own, so that it is offered wherever the run can be simulated. Liger's and cut
    cross-entropy keep about as little; their tapes are traced, and so they are left to their own flags.
    """
    head = ChunkedHeadTechnique()
    if not keeps_logits(run.plan) or not head.available(engine, case.workload) or case.parallel is not None:
        return
    tiled = case.workload.with_techniques(head.under(engine))
    key = head.key(engine, program)
    what = f"head and loss in tiles ({key})" if key else "head and loss in tiles"
    yield _Change(what, head.where, replace(case, workload=tiled), config)


def keeps_logits(plan: MemoryPlan) -> bool:
    """Return whether logits and loss are a large part of a plan's peak."""
    peak = plan.gpu.at_peak
    return sum(one.bytes for one in peak if one.what == Family.LOSS) >= LARGE * sum(one.bytes for one in peak) > 0


def _changes(engine: Engine, case: Case, config: AllocatorConfig | None) -> Iterator[_Change]:
    zero, work = case.zero, case.workload
    if config is None and _EXPANDABLE in engine.alloc_confs:
        yield _Change("expandable segments", f"--alloc-conf {_EXPANDABLE}", case, AllocatorConfig.parse(_EXPANDABLE))
    offload = f" --offload-optimizer {zero.offload_optimizer.device}" if zero.offload_optimizer else ""
    stages = sorted({option.stage for option in engine.options() if option.stage > zero.stage})
    for stage in stages if case.layout.world_size > 1 else ():
        sharded = engine.for_optimizer(replace(zero, stage=stage), work.numerics.optimizer)
        name = higher_stage(engine.name, stage)
        yield _Change(name, f"--stage {stage}{offload}", replace(case, zero=sharded), config)
    if not work.gradient_checkpointing:
        again = work.checkpointed()
        yield _Change("gradient checkpointing", "--gradient-checkpointing", replace(case, workload=again), config)
    if work.batch.micro_batch > 1:
        half = work.but(micro_batch=work.batch.micro_batch // 2)
        yield _Change(
            f"micro batch {half.batch.micro_batch}",
            f"--micro-batch {half.batch.micro_batch}",
            replace(case, workload=half),
            config,
        )
    if not zero.offload_optimizer and zero.stage:
        away = replace(zero, offload_optimizer=OffloadOptimizer(OffloadDevice.CPU))
        flags = f"--stage {zero.stage} --offload-optimizer cpu"
        yield _Change("optimizer on cpu", flags, replace(case, zero=away), config)
