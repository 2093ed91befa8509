"""``recommend --from``: the user's own files, changed to what is recommended, and planned as they then are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from zeroplan.core.plumbing.files import as_if
from zeroplan.interop.edits.changes import Wanted, ask_for, edits_for
from zeroplan.interop.edits.places import ACCELERATE, DS_CONFIG, places_of
from zeroplan.interop.edits.written import ChangedFiles
from zeroplan.search.policy import EQUALLY_FAST
from zeroplan.search.results import Recommendation
from zeroplan.techniques.base import Technique


def patched(
    sources: Sequence[Any],
    program: str | None,
    best: Recommendation,
    current: Recommendation,
    plan: Callable[[str], Recommendation],
    added: Sequence[tuple[Technique[Any], Any]] = (),
) -> tuple[ChangedFiles, Recommendation] | None:
    """Change the files to a recommendation by the fewest changes with which they are predicted to fit and to run as fast.

    The user's buckets and the like stay unless the run would then not fit, or be slower.

    Args:
        sources: paths of the files; without a file among them there is nothing to change.
        program: the program that owns them; None to find out.
        best: the recommendation.
        current: the files as they are.
        plan: plans the files as they are read at the time of the call, under these settings of the allocator.
        added: techniques that flags ask for and the files do not, with their values.

    Returns:
        The changed files, and what they are predicted to need and to do.
    """
    places = places_of(sources, program)
    if not places:
        return None
    work = best.workload
    conf = best.alloc_conf if best.alloc_conf != current.alloc_conf else ""
    wanted = Wanted(
        best.zero, work.batch.micro_batch, work.batch.grad_accum, work.gradient_checkpointing, best.ds_config(), conf
    )
    arguments = [one for one in places if one.program not in (DS_CONFIG, ACCELERATE)]
    in_script = any(one.kind == "shell" for one in places)
    for whole in (False, True):
        edits = edits_for(places, wanted, current.workload, whole=whole)
        ask_for(edits, arguments, added)
        with as_if(edits.texts):
            run = plan("" if in_script else conf)
        as_good = run.plan.verdict.rank <= best.plan.verdict.rank
        if as_good and run.tokens_per_second >= (1 - EQUALLY_FAST) * best.tokens_per_second:
            break
        if best.ds_config() is None:
            break
    edits.left += [f"set {what} in your program" for what in _missed(best, run)]
    return ChangedFiles(tuple(places), edits, conf), run


def _missed(best: Recommendation, run: Recommendation) -> list[str]:
    """Name what the changed files still say otherwise than the recommendation."""
    ours, theirs = best.workload.batch, run.workload.batch
    found = []
    if ours.micro_batch != theirs.micro_batch:
        found.append(f"a micro batch of {ours.micro_batch}")
    if ours.grad_accum != theirs.grad_accum:
        found.append(f"{ours.grad_accum} accumulated")
    if best.workload.gradient_checkpointing is not run.workload.gradient_checkpointing:
        found.append(f"gradient checkpointing {'on' if best.workload.gradient_checkpointing else 'off'}")
    devices = [(one.zero.stage, one.zero.offload_optimizer.device, one.zero.offload_param.device) for one in (best, run)]
    if devices[0] != devices[1]:
        found.append(f"the sharding and offload of {best.plan.label}")
    return found
