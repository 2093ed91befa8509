"""A run that failed, beside its plan: what was expected, what the log says otherwise, and the smallest change that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

from zeroplan.core.errors import BadInput
from zeroplan.core.gpus import DRIVER_RESERVE
from zeroplan.core.plan import MemoryPlan, Relief, Report
from zeroplan.core.sizes import GIB
from zeroplan.core.zero_config import OffloadDevice
from zeroplan.engines.registry import DEFAULT_ENGINE
from zeroplan.logs.events import Stated
from zeroplan.logs.phases import LOSS
from zeroplan.models.load import load_model
from zeroplan.planner.estimate import estimate_report
from zeroplan.run.ask import OPTIONS, Ask

if TYPE_CHECKING:
    from zeroplan.interop.setups import Setup

#: GiB by which a message's rounded size is off at most.
_ROUNDED = 0.005


@dataclass(frozen=True, slots=True)
class FailedRunPlan:
    """The plan of the run that a log is of.

    Attributes:
        request: what was planned: the user's request, with what the log states.
        report: its plan, with the knobs that lower its memory.
        taken: what was taken from the log, as ``"micro batch 4"``.
        differs: what the log states otherwise than the flags or the files.
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


def plan_of_log(
    request: Ask,
    stated: Stated,
    *,
    card: int | None,
    allowed: int | None,
    tried: int | None = None,
    phase: str | None = None,
) -> FailedRunPlan:
    """Plan a run, with what its log states in place of what flags and files leave open.

    Where a file says another value than the log, the log's is planned: it is of the run that failed.

    Args:
        request: the model, or files that name it, and whatever else the user says.
        stated: sizes that the log gives.
        card: bytes of the GPU as torch reports them.
        allowed: bytes that ``set_per_process_memory_fraction`` left to the process.
        tried: bytes of the allocation that failed. Where they are fp32 logits and the traceback ends in the loss, they tell the
            length; the number alone could be any other tensor's.
        phase: of training in which the traceback ends.

    Raises:
        BadInput: a request that cannot be planned.
    """
    filled, setup = _filled(request)
    news, taken, differs = dict[str, object](), list[str](), list[str]()
    tokens = _tokens_of_logits(filled, tried) if phase == LOSS else None
    micro = stated.micro_batch or filled.micro_batch
    if tokens is not None and micro is not None and filled.seq_len is None and tokens % micro == 0:
        news["seq_len"] = tokens // micro
        taken.append(f"sequence {tokens // micro}, whose fp32 logits are what did not fit")
    elif tokens is not None and tokens != (micro or 1) * (filled.seq_len or 1):
        planned = (
            f"where the plan has {micro or 1} × {filled.seq_len}" if filled.seq_len else "so give --micro-batch and --seq-len"
        )
        differs.append(f"logits of {tokens:,} tokens a GPU, {planned}")
    for name, words in (("micro_batch", "micro batch"), ("grad_accum", "accumulation"), ("dtype", "precision")):
        logged, planned = getattr(stated, name), filled.value(name)
        if logged is None or (request.ds_config is not None and setup is None):
            continue
        if planned is None or (setup is not None and name not in request):
            news[name] = logged
        if planned is None:
            taken.append(f"{words} {logged}")
        elif planned != logged:
            who = setup.files[0] if setup is not None and name not in request else "the plan"
            differs.append(f"{words} {logged}, where {who} has {planned}")
    changes, others = _engine_and_machine(request, filled, stated, card=card, allowed=allowed, taken=taken)
    differs += others
    decided = filled.replace(**news, **changes)
    report, asked = _planned(request, decided, request.replace(**changes))
    if stated.trainable is not None and stated.trainable not in (report.model.trainable, report.model.params):
        differs.append(f"{stated.trainable:,} trainable parameters, where the plan has {report.model.trainable:,}")
    plan = report.decisive
    relief = None
    if plan is not None and plan.fits is not True and plan.gpu.usable is not None:
        knobs = [one for one in report.reliefs if not one.adapters]
        relief = next((one for one in knobs if one.fits), None) or _together(decided, plan, knobs)
        relief = relief or next((one for one in report.reliefs if one.adapters), None)
    return FailedRunPlan(asked, report, tuple(taken), tuple(differs), relief)


def _together(asked: Ask, plan: MemoryPlan, reliefs: Sequence[Relief]) -> Relief | None:
    """Return the fewest knobs that fit together, the cheapest in speed first; None where all of them do not."""
    by_flag = {option.where: name for name, option in OPTIONS.items() if option.help}
    for count in range(2, len(reliefs) + 1):
        for some in combinations(reliefs, count):
            values = {flag: value for one in some for flag, value in _flags(one.flags).items()}
            flags = " ".join(f"{flag} {value}".rstrip() for flag, value in values.items())
            kinds = {flag: OPTIONS[by_flag[flag]].kind for flag in values}
            changes = {by_flag[flag]: not value or kinds[flag](value) for flag, value in values.items()}
            try:
                found = estimate_report(asked.replace(**changes)).decisive
            except BadInput:
                continue
            if found is not None and found.fits and found.gpu.total is not None:
                saves = (plan.gpu.total or 0) - found.gpu.total
                *most, last = (one.what for one in some)
                what = f"{', '.join(most)} and {last}"
                return Relief(what=what, flags=flags, saves=saves, total=found.gpu.total, fits=True)
    return None


def _flags(text: str) -> dict[str, str]:
    """Return the values of flags by their names, empty for a switch."""
    found: dict[str, str] = {}
    for word in text.split():
        if word.startswith("--"):
            found[word] = ""
        else:
            found[next(reversed(found))] = word
    return found


def _filled(request: Ask) -> tuple[Ask, Setup | None]:
    """Return the request with what its files say, and what they are; as it is where no file is named."""
    if not request.files:
        return request, None
    from zeroplan.planner.merge import with_files

    filled, setup = with_files(request)
    return filled.replace(files=None), setup


def _planned(request: Ask, filled: Ask, changed: Ask) -> tuple[Report, Ask]:
    """Plan the run as the log has it; where its files cannot be changed so, as they say. Returns what to ask next, too."""
    if not request.files:
        return estimate_report(filled), filled
    try:
        return estimate_report(filled), changed
    except BadInput:
        return estimate_report(changed), changed


def _tokens_of_logits(request: Ask, tried: int | None) -> int | None:
    """Return how many tokens have fp32 logits of the bytes that did not fit; None where no whole number of 256 tokens does.

    A message rounds its bytes to 0.01 of their unit.
    """
    if tried is None or tried < GIB or request.model is None:
        return None
    try:
        config = load_model(request.model, offline=request.offline, token=request.token).config or {}
    except BadInput:
        return None
    vocabulary = config.get("vocab_size")
    if not isinstance(vocabulary, int):
        return None
    tokens = 256 * round(tried / (vocabulary * 4 * 256))
    return tokens if abs(tokens * vocabulary * 4 - tried) <= _ROUNDED * GIB else None


def _engine_and_machine(
    request: Ask, filled: Ask, stated: Stated, *, card: int | None, allowed: int | None, taken: list[str]
) -> tuple[dict[str, object], list[str]]:
    """Return what the log tells of the stage, the version and the machine where nothing else does, and what it contradicts."""
    changes, differs = dict[str, object](), list[str]()
    if stated.stage is not None and filled.stage is None and filled.ds_config is None:
        changes["stage"] = stated.stage
        taken.append(f"stage {stated.stage}")
        for name in ("offload_optimizer", "offload_param"):
            if filled.value(name) is None:
                changes[name] = OffloadDevice.NONE.value
    if stated.deepspeed is not None and filled.engine == DEFAULT_ENGINE and filled.deepspeed_version is None:
        changes["deepspeed_version"] = stated.deepspeed
        taken.append(f"DeepSpeed {stated.deepspeed}")
    ranks = filled.gpus * filled.nodes
    if stated.world_size is not None and ranks != stated.world_size:
        if ranks == 1:
            changes["gpus"] = stated.world_size
            taken.append(f"{stated.world_size} ranks")
        else:
            differs.append(f"{stated.world_size} ranks, where the plan has {ranks}")
    return changes | card_of_log(request, card, allowed, taken), differs


def card_of_log(request: Ask, card: int | None, allowed: int | None, taken: list[str]) -> dict[str, object]:
    """Return the card's memory that the log tells of where the request names none, and add it to `taken`."""
    limit = min((one for one in (card, allowed) if one), default=None)
    if limit is None or request.vram is not None or request.gpu is not None:
        return {}
    taken.append(f"a card of {limit / GIB:.1f} GiB")
    return {"vram": f"{(limit + DRIVER_RESERVE) / GIB:.2f}G"}
