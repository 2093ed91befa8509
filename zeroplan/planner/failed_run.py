"""A run that failed, beside its plan: what was expected, what the log says otherwise, and the smallest change that fits."""

from __future__ import annotations

from dataclasses import dataclass

from zeroplan.core.gpus import DRIVER_RESERVE
from zeroplan.core.plan import MemoryPlan, Relief, Report
from zeroplan.core.units import GIB
from zeroplan.core.zero_config import OffloadDevice
from zeroplan.engines.registry import DEFAULT_ENGINE
from zeroplan.logs.events import Stated
from zeroplan.planner.estimate import estimate_report
from zeroplan.run.ask import Ask


@dataclass(frozen=True, slots=True)
class FailedRunPlan:
    """The plan of the run that a log is of.

    Attributes:
        request: what was planned: the user's request, with what the log states.
        report: its plan, with the knobs that lower its memory.
        taken: what was taken from the log, as ``"micro batch 4"``.
        differs: what the log states otherwise than the request.
        relief: the cheapest knob that makes it fit; None if none does by itself, or the plan fits as it is.
    """

    request: Ask
    report: Report
    taken: tuple[str, ...]
    differs: tuple[str, ...]
    relief: Relief | None

    @property
    def plan(self) -> MemoryPlan | None:
        """The plan that the report is about."""
        return self.report.decisive


def plan_of_log(request: Ask, stated: Stated, *, card: int | None, allowed: int | None) -> FailedRunPlan:
    """Plan a run, with what its log states in place of what the request leaves open.

    Args:
        request: the model and whatever else the user says.
        stated: sizes that the log gives.
        card: bytes of the GPU as torch reports them.
        allowed: bytes that ``set_per_process_memory_fraction`` left to the process.

    Raises:
        BadInput: a request that cannot be planned.
    """
    taken, differs = [], []
    fields = (
        ("micro_batch", "micro batch", request.micro_batch, stated.micro_batch),
        ("grad_accum", "accumulation", request.grad_accum, stated.grad_accum),
        ("dtype", "precision", request.dtype, stated.dtype),
    )
    changes: dict[str, object] = {}
    for name, words, asked, said in fields:
        if said is None or request.ds_config is not None:
            continue
        if asked is None:
            changes[name] = said
            taken.append(f"{words} {said}")
        elif asked != said:
            differs.append(f"{words} {said} in the log, {asked} in the plan")
    if stated.stage is not None and request.stage is None and request.ds_config is None:
        changes["stage"] = stated.stage
        taken.append(f"stage {stated.stage}")
        for name in ("offload_optimizer", "offload_param"):
            if getattr(request, name) is None:
                changes[name] = OffloadDevice.NONE.value
    if stated.deepspeed is not None and request.engine == DEFAULT_ENGINE and request.deepspeed_version is None:
        changes["deepspeed_version"] = stated.deepspeed
        taken.append(f"DeepSpeed {stated.deepspeed}")
    if stated.world_size is not None and request.gpus * request.nodes != stated.world_size:
        if request.gpus == request.nodes == 1:
            changes["gpus"] = stated.world_size
            taken.append(f"{stated.world_size} ranks")
        else:
            differs.append(f"{stated.world_size} ranks in the log, {request.gpus * request.nodes} in the plan")
    limit = min((one for one in (card, allowed) if one), default=None)
    if limit is not None and request.vram is None and request.gpu is None:
        changes["vram"] = f"{(limit + DRIVER_RESERVE) / GIB:.2f}G"
        taken.append(f"a card of {limit / GIB:.1f} GiB")
    request = request.replace(**changes)
    report = estimate_report(request)
    if stated.trainable is not None and stated.trainable not in (report.model.trainable, report.model.params):
        differs.append(f"{stated.trainable:,} trainable parameters in the log, {report.model.trainable:,} in the plan")
    plan = report.decisive
    fits = plan is not None and plan.fits is not False
    relief = None if fits else next((one for one in report.reliefs if one.fits), None)
    return FailedRunPlan(request, report, tuple(taken), tuple(differs), relief)
