"""The answer of ``doctor LOG`` as text and JSON: the cause, the lines that show it, the plan beside it, what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from zeroplan.core.sizes import format_bytes
from zeroplan.logs.diagnose import Diagnosis
from zeroplan.report.terminal import PLAIN, Terminal
from zeroplan.report.verdict import fit_text, host_share, lacks_of, name_of, peak_sentence

if TYPE_CHECKING:
    from zeroplan.logs.snapshot import Snapshot
    from zeroplan.planner.failed_run import FailedRunPlan


#: Lines of the log that the first screen shows.
_EVIDENCE = 2


def diagnosis_text(
    found: Diagnosis, planned: FailedRunPlan | None, following: Sequence[str], terminal: Terminal = PLAIN
) -> str:
    """The answer in lines; `following` is the command to go on with."""
    lines = terminal.verdict(found.verdict, not found.failed)
    for event in found.evidence if terminal.full else found.evidence[:_EVIDENCE]:
        text = f"line {event.line}: {event.text}"
        shown = terminal.wrap(text, indent="  ", hang="    ")
        lines += map(terminal.dim, shown if terminal.full or len(shown) == 1 else [f"{shown[0]} …"])
    if planned is not None:
        lines += ["", *_plan_lines(planned, terminal)]
    if planned is None or planned.relief is None:
        lines += _advice_lines(found, planned, terminal)
    if following:
        lines += ["", *terminal.command("Next: ", following)]
    return "\n".join(lines)


def _advice_lines(found: Diagnosis, planned: FailedRunPlan | None, terminal: Terminal) -> list[str]:
    advice = [one for one in found.advice if planned is None or not _done(one.flags, planned)]
    lines = ["", terminal.bold("What to do, the first thing first")] if advice else []
    for number, one in enumerate(advice, 1):
        lines += terminal.wrap(f"{number}. {one.what}: {one.why}" if terminal.full else f"{number}. {one.what}", hang="   ")
    return [*lines, terminal.dim("Why, and what each costs: --why")] if lines and not terminal.full else lines


def _done(flags: str, planned: FailedRunPlan) -> bool:
    """Return whether the plan has what an advice's flags would switch on."""
    plan, work = planned.plan, planned.report.workload
    return (
        (flags.startswith("--stage") and plan is not None and plan.stage == 3)
        or (flags == "--gradient-checkpointing" and work.get("gradient_checkpointing"))
        or (flags == "--offload-optimizer cpu" and plan is not None and plan.offload_optimizer != "none")
        or (flags == "--micro-batch" and work.get("micro_batch") == 1)
    )


def _plan_lines(planned: FailedRunPlan, terminal: Terminal) -> list[str]:
    plan = planned.plan
    if plan is None:
        return terminal.wrap("The plan names no single configuration: give --stage, or --ds-config.")
    host = "" if plan.fits is False and "cpu" in plan.misfits else host_share(plan, planned.report.cluster)
    says = "" if plan.fits is None and not plan.undecided else f": {plan.verdict}"
    told = f"{name_of(plan)}, {fit_text(plan)}{host}{says}."
    if plan.misfits and plan.fits is False:
        told = f"{name_of(plan)} {plan.verdict}: {' and '.join(lacks_of(plan, planned.report.cluster))}."
    lines = terminal.wrap(f"Planned: {told} {peak_sentence(plan)}".rstrip())
    if planned.taken:
        lines += terminal.wrap(f"Taken from the log: {', '.join(planned.taken)}.")
    if planned.differs:
        lines += terminal.wrap(f"The log has {'; '.join(planned.differs)}.")
    relief = planned.relief
    if relief is not None:
        flags = "" if planned.request.files else f" ({relief.flags})"  # flags cannot say otherwise than files
        lines += terminal.wrap(
            f"Smallest change that fits: {relief.what}{flags}, which saves {format_bytes(relief.saves, digits=1)} "
            f"and needs {format_bytes(relief.total, digits=1)}."
        )
    elif plan.fits:
        lines += terminal.wrap(
            "The plan fits, so the run that died was not the planned one: compare lengths, precision, attention, and what "
            "else uses the GPU."
        )
    return lines


def diagnosis_json(found: Diagnosis, planned: FailedRunPlan | None) -> dict[str, Any]:
    """Return one object that JSON can hold; sizes are bytes."""
    plan = None if planned is None else planned.plan
    return {
        "schema": 1,
        "cause": found.cause.value,
        "verdict": found.verdict,
        "failed": found.failed,
        "phase": found.phase,
        "rank": found.rank,
        "sizes": dict(found.sizes),
        "evidence": [{"line": event.line, "kind": event.kind.value, "text": event.text} for event in found.evidence],
        "stated": asdict(found.stated),
        "advice": [asdict(one) for one in found.advice],
        "plan": None
        if planned is None
        else {
            "plan": None if plan is None else plan.model_dump(mode="json"),
            "taken": list(planned.taken),
            "differs": list(planned.differs),
            "relief": None if planned.relief is None else planned.relief.model_dump(mode="json"),
        },
    }


def snapshot_text(found: Snapshot, terminal: Terminal = PLAIN) -> str:
    """Write what a memory snapshot holds, in lines."""
    verdict = f"Out of GPU memory on GPU {found.device}" if found.oom else f"GPU {found.device}"
    tried = f", {format_bytes(found.oom[0])} more did not fit" if found.oom else ""
    held = f"{format_bytes(found.allocated)} allocated of {format_bytes(found.reserved)} reserved{tried}"
    lines = terminal.wrap(f"{verdict}: {held}.")
    lines += ["", terminal.bold("Largest, by the line that allocated it")] if found.largest else []
    lines += [f"  {format_bytes(size, digits=1):>10}  {place}" for place, size in found.largest]
    return "\n".join(lines)


def snapshot_json(found: Snapshot) -> dict[str, Any]:
    """Return one object that JSON can hold; sizes are bytes."""
    largest = [{"place": place, "bytes": size} for place, size in found.largest]
    return {
        "schema": 1,
        "cause": "gpu_memory" if found.oom else "nothing",
        "device": found.device,
        "reserved": found.reserved,
        "allocated": found.allocated,
        "largest": largest,
        "oom": list(found.oom),
    }
