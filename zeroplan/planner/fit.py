"""Whether a plan fits its limits: yes, no, or unknown where something that decides is in no figure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from zeroplan.core.buffers import Phase
from zeroplan.core.curriculum import CURRICULUM_LEARNING
from zeroplan.core.layer_drop import LAYER_DROP
from zeroplan.core.parallel import DEGREES
from zeroplan.core.plan import Verdict
from zeroplan.core.saving import Saving
from zeroplan.core.sizes import format_bytes
from zeroplan.core.unmodelled import UNMEASURED, Effect, Unmodelled, may_add, may_save
from zeroplan.engines.base import Engine
from zeroplan.engines.case import Case
from zeroplan.techniques.base import Facts
from zeroplan.techniques.table import techniques_of

if TYPE_CHECKING:
    from zeroplan.simulate.allocator.config import AllocatorConfig
    from zeroplan.tape.expanded import ExpandedTape

#: The key of what no formula counts.
ACTIVATIONS = "activations"
#: The key of what decides at a card's limit.
LIMIT = "limit"
#: Boards take this many times the host memory that nodes of their kind usually have, and no more.
_MOST_HOST = 4
_WITHIN = "the card's limit lies within the figures' error"
#: What measures a run whose plan leaves something out, and what does where its peak comes late.
_A_FEW_STEPS = "measure a few steps of the program itself"
_LATE_PEAKS = {
    CURRICULUM_LEARNING: "train until the curriculum's longest step, and read torch.cuda.max_memory_reserved",
    LAYER_DROP: "train until theta is low, and read torch.cuda.max_memory_reserved",
}
#: What settles a plan at its card's limit.
_ROOM = "leave the card more room (a smaller micro batch, a shorter length, more GPUs), or try a few steps"


def left_out(engine: Engine, case: Case, *, tape: ExpandedTape | None = None) -> tuple[Unmodelled, ...]:
    """Return the settings that no figure of a plan holds, each key once: of the case's files, and of what the engine does not
    model. `tape` is what the figures were simulated with: it holds the evaluation and other lengths of batches, where they are.
    """
    found = {one.key: one for one in (*case.unmodelled, *engine.unmodelled(case))}
    if (case.workload.objective.reference is not None or case.workload.objective.kl_batch) and not engine.answers_reference(
        case
    ):
        what = (
            "a reference model beside the trained one"
            if case.workload.objective.reference is not None
            else "a second forward for KTO"
        )
        says = f"{what} is not modelled under {engine.name} stage {case.zero.stage}"
        found.setdefault("reference", Unmodelled("reference", Effect.MORE, says))
    work = case.workload
    facts = Facts(engine, work, case.spec, case.cluster, {name: getattr(case.layout, name) for name in DEGREES})
    for technique, value in techniques_of(work):
        for one in technique.left_out(value, facts, tape):
            found.setdefault(one.key, one)
    if tape is not None and case.cluster.gpu.amd:
        says = "what ROCm and RCCL take beside torch's allocator was measured on no AMD card; CUDA's and NCCL's stand for it"
        found.setdefault(UNMEASURED, Unmodelled(UNMEASURED, Effect.UNKNOWN, says))
    if work.has(Saving) and (says := engine.unsaved(case)):
        found.setdefault("saving", Unmodelled("saving", Effect.MORE, says))
    return tuple(found.values())


def unsure_at_limit(engine: Engine, case: Case, phase: str) -> tuple[Unmodelled, ...]:
    """Return what the figures leave out of a run at its card's limit, where the allocator empties its cache to get through.

    There fragments decide that no figure holds: those of batches of other lengths, and of engines and phases whose fragments
    no measured run has shown.

    Args:
        phase: in which it peaks.
    """
    if case.workload.batch.dynamic_padding:
        says = "batches are padded to lengths that nothing tells, and fragments of theirs can be too much; give --lengths"
    elif not engine.measured:
        says = f"no run of {engine.name} at the limit of its card was measured"
    elif phase in (Phase.SAVE.value, Phase.EVALUATION.value):
        says = f"no {phase} at the limit of the card was measured"
    else:
        return ()
    return (Unmodelled(LIMIT, Effect.MORE, f"the run fills the card, and gets through by emptying its cache: {says}"),)


def unsure_of_fragments(config: AllocatorConfig | None, *, waiting: bool = False) -> tuple[Unmodelled, ...]:
    """Return what decides about a run whose card has room for all that it allocates, but not for the planned fragments, or
    for freed blocks that wait for the GPU.
    """
    what, less = "fragments of the allocator", "has fewer"
    if waiting:
        what, less = "freed blocks that wait for a GPU far behind its host", "lets the allocator return more of them"
    says = f"only {what} are too much for the card"
    if config is None or not config.expandable_segments:
        says += f"; PYTORCH_ALLOC_CONF=expandable_segments:True {less}"
    return (Unmodelled(LIMIT, Effect.LESS, says),)


def misfits(case: Case, *, gpu: int, cpu: int, nvme: int) -> tuple[str, ...]:
    """The names of the limits that these bytes exceed: gpu, cpu, nvme. `gpu` is of one GPU, the others are of one node."""
    cluster = case.cluster
    limits = {"gpu": (gpu, cluster.usable_vram), "cpu": (cpu, cluster.usable_cpu_ram), "nvme": (nvme, cluster.nvme)}
    return tuple(name for name, (need, limit) in limits.items() if limit is not None and need > limit)


def judged(
    case: Case, unmodelled: Iterable[Unmodelled], *, gpu: tuple[int, int], cpu: int, nvme: int, simulate: str = ""
) -> dict[str, Any]:
    """Return the fields of a plan that say whether it fits: `verdict`, `fits`, `decides`, `misfits`, `unmodelled`, `settle`.

    It fits if every upper bound is within its limit and nothing that is left out adds memory. It does not fit if a lower bound
    exceeds a limit that was given, and nothing that is left out saves memory. It may fit if the limit lies between the bounds,
    if just fragments of the allocator decide, if the limit that is exceeded is an assumed size of the host (by no more than
    boards take), or if swap files need a disk and none was named. Else that is unknown.

    Args:
        unmodelled: what the figures leave out.
        gpu: the lower and the upper bound of one GPU's bytes; at formula depth, the bytes that formulas tell, twice.
        cpu: bytes of a node's host memory.
        nvme: bytes of a node's swap files.
        simulate: how to get figures with activations, where they are left out.
    """
    unmodelled = tuple(unmodelled)
    low, high = gpu
    broken = misfits(case, gpu=high, cpu=cpu, nvme=nvme)
    certain = misfits(case, gpu=low, cpu=round(cpu / _MOST_HOST) if case.cluster.assumes_host else cpu, nvme=nvme)
    cluster = case.cluster
    return decided(
        unmodelled,
        limited=any(limit is not None for limit in (cluster.vram, cluster.cpu_ram, cluster.nvme)),
        certain=bool(certain),
        broken=broken,
        edge=_edge(case, broken, nvme),
        simulate=simulate,
    )


def decided(
    unmodelled: tuple[Unmodelled, ...],
    *,
    limited: bool,
    certain: bool,
    broken: tuple[str, ...],
    edge: tuple[str, str] | None = None,
    simulate: str = "",
) -> dict[str, Any]:
    """Return the fields of :func:`judged`.

    Args:
        unmodelled: what the figures leave out.
        limited: whether any limit is given.
        certain: whether a lower bound exceeds its limit.
        broken: the names of the limits that upper bounds exceed.
        edge: what decides beside the card about a plan that may fit, and what would settle it.
        simulate: how to get figures with activations, where they are left out.
    """
    keys = tuple(one for one in unmodelled if one.key != LIMIT)  # fragments may decide, and are no unknown
    fragments = next((one.says for one in unmodelled if one.key == LIMIT), "")
    decides = settle = ""
    if not limited:
        verdict, decides = Verdict.UNKNOWN, "no limit is given"
    elif may_save(keys) if certain else may_add(keys) or (bool(broken) and may_save(keys)):
        verdict, decides = Verdict.UNKNOWN, ", ".join(one.key for one in keys if one.effect is not Effect.NONE)
        settle = _settle(keys, simulate)
    elif certain:
        verdict = Verdict.DOES_NOT_FIT
    elif broken or fragments or edge:
        verdict = Verdict.MAY_FIT
        card = fragments or _WITHIN
        decides, settle = edge if edge and ("cpu" in broken or not fragments) else (card, _ROOM)
        decides += f", and {card}" if "cpu" in broken and "gpu" in broken else ""
    else:
        verdict = Verdict.FITS
    return {
        "verdict": verdict,
        "fits": verdict.fits,
        "decides": decides,
        "misfits": broken,
        "unmodelled": unmodelled,
        "settle": settle,
    }


def _edge(case: Case, broken: tuple[str, ...], nvme: int) -> tuple[str, str] | None:
    """Return what decides about a plan whose card has room, and what would settle it; None where only the card decides."""
    if "cpu" in broken:
        assumed = format_bytes(case.cluster.cpu_ram or 0, digits=0)
        return f"the host's memory, which is assumed to be {assumed} a node", "give --cpu-ram"
    if nvme and case.cluster.nvme is None and "gpu" not in broken:
        return f"a disk with {format_bytes(nvme, digits=0)} free a node, which was not named", "give --nvme"
    return None


def _settle(unmodelled: Iterable[Unmodelled], simulate: str) -> str:
    """Return the action that would tell whether a plan fits that leaves this out."""
    unmodelled = tuple(unmodelled)
    keys = {one.key for one in unmodelled if not one.flag} - {ACTIVATIONS}
    until = [words for key, words in _LATE_PEAKS.items() if key in keys]  # a few steps would be too few
    parts = [f"give {flag}" for flag in dict.fromkeys(one.flag for one in unmodelled) if flag]
    parts += [simulate] if simulate else []
    parts += until or [_A_FEW_STEPS] if keys else []
    return "; ".join(parts)
