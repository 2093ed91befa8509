"""Plans in sentences: whether one fits, what its peak is made of, and what would lower it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zeroplan.core.buffers import Buffer
from zeroplan.core.plan import MemoryPlan, Relief, Report, Verdict
from zeroplan.core.sizes import GIB, MIB, TIB, format_bytes
from zeroplan.core.unmodelled import UNMEASURED, Effect
from zeroplan.engines.words import sharding_text
from zeroplan.planner.fit import ACTIVATIONS, LIMIT

#: Parts of the peak, knobs, and keys that the figures leave out, that a sentence names.
_PARTS, _KNOBS, _KEYS = 3, 3, 3
#: How the origin of an item begins that no formula gives.
_NO_FORMULA = ("measured", "traced", "simulated")


def name_of(plan: MemoryPlan) -> str:
    """Return ``"ZeRO-3, optimizer and parameters on cpu"``."""
    if plan.capture is not None and plan.capture.way == "loop":
        return "the script as it runs"
    return sharding_text(plan.engine, plan.stage, plan.offload_optimizer, plan.offload_param)


def verdict(report: Report) -> str:
    """Return one sentence whose first words, up to the colon, are the verdict; the others are the figures behind it."""
    plan = report.decisive
    if plan is None:
        return _without_limit(report)
    name = name_of(plan)
    if plan.verdict is Verdict.MAY_FIT:
        return f"May fit: {name}, {fit_text(plan)}{host_share(plan, report.cluster)}. {edge_text(plan)}"
    if plan.undecided:
        return f"Unknown: {name}, {fit_text(plan)}{host_share(plan, report.cluster)}. {unknown_text(plan)}"
    if plan.fits is None:
        return f"Needs {need(plan)} a GPU: {name}. No limit is given: add --gpu H100 or --vram 80G."
    if not plan.fits:
        says = "Does not fit" if len(report.plans) == 1 else "Nothing fits"
        lacks = " and ".join(lacks_of(plan, report.cluster))
        return f"{says}: {'' if len(report.plans) == 1 else 'nearest is '}{name}, {lacks}."
    return f"Fits: {name}, {fit_text(plan)}{host_share(plan, report.cluster)}."


def edge_text(plan: MemoryPlan) -> str:
    """Return what decides about a plan that may fit, and what would settle it."""
    return f"What decides: {plan.decides}. To settle it, {plan.settle}."


def host_share(plan: MemoryPlan, cluster: Mapping[str, Any]) -> str:
    """Return ``"; host 300 of 502.0 GiB a node"`` where the plan takes more than half of the host; else nothing."""
    usable = cluster["usable_cpu_ram"]
    if not usable or 2 * plan.cpu.per_node <= usable:
        return ""
    assumed = " assumed" if cluster["cpu_ram_assumed"] else ""
    return f"; host {_of(plan.cpu.per_node, usable)}{assumed} a node"


def unknown_text(plan: MemoryPlan) -> str:
    """Return why it is unknown whether a plan fits, and what would tell."""
    lacking = [one for one in plan.unmodelled if one.effect is not Effect.NONE and one.key != LIMIT]
    first = lacking[0] if lacking else None
    if first is not None and len(lacking) == 1 and first.key != ACTIVATIONS:
        if first.flag:
            return f"{first.says[0].upper()}{first.says[1:]}."
        key = "" if first.key == UNMEASURED else f" ({first.key})"
        return f"What decides{key}: {first.says}. To settle it, {plan.settle}."
    keys = [one.key for one in lacking]
    shown = ", ".join(keys[:_KEYS]) + (f" and {len(keys) - _KEYS} more" if len(keys) > _KEYS else "")
    return (f"Not in the figures: {shown}. " if keys else "") + f"To settle it, {plan.settle}."


def _bound(plan: MemoryPlan) -> str:
    """Return ``", up to 76.9 with activations"`` where an estimate of them is known."""
    return f", up to {plan.gpu.bound / GIB:.1f} with activations in 19 of 20 models" if plan.gpu.bound else ""


def _without_limit(report: Report) -> str:
    """Say what several plans need where no limit says which of them fit."""
    if not report.plans:
        return "Nothing to plan: the engine runs none of these."
    small, large = (choose(report.plans, key=lambda plan: plan.gpu.needed) for choose in (min, max))
    text = f"Needs {need(small)} a GPU at least: {name_of(small)}"
    if small is not large:
        text += f"; at most {need(large)}: {name_of(large)}"
    return f"{text}. No limit is given: add --gpu H100 or --vram 80G."


def need(plan: MemoryPlan) -> str:
    """Return ``"52.7 GiB (51.2 to 54.3)"``, or ``"28.1 GiB and activations"`` where those are not known."""
    gpu = plan.gpu
    if gpu.total is None:
        return f"{_size(gpu.needed)} and activations"
    return _size(gpu.total) + (f" ({gpu.interval[0] / GIB:.1f} to {gpu.interval[1] / GIB:.1f})" if gpu.interval else "")


def fit_text(plan: MemoryPlan) -> str:
    """Return ``"54.7 of 79.4 GiB a GPU (at most 56.4), 29 % spare"``; the bound in place of what is spare if nothing fits."""
    return of_usable(plan) + (_bound(plan) if plan.undecided else _spare(plan) if plan.fits else "")


def of_usable(plan: MemoryPlan) -> str:
    """Return ``"54.7 of 79.4 GiB a GPU (at most 56.4)"``."""
    gpu = plan.gpu
    if gpu.usable is None:
        return f"{need(plan)} a GPU"
    text = f"{gpu.needed / GIB:.1f} of {_size(gpu.usable)} a GPU"
    return f"{text} (at most {gpu.interval[1] / GIB:.1f})" if gpu.interval else text


def _spare(plan: MemoryPlan) -> str:
    gpu = plan.gpu
    if gpu.usable is None or gpu.interval is None:
        return ""
    return f", {100 * (gpu.usable - gpu.interval[1]) / gpu.usable:.0f} % spare"


def lacks_of(plan: MemoryPlan, cluster: Mapping[str, Any]) -> list[str]:
    """Return what is short, each with what is needed and what there is, for a cluster as the report's JSON holds it."""
    gpu, found = plan.gpu, []
    if "gpu" in plan.misfits and gpu.usable is not None:
        over = gpu.at_most - gpu.usable
        found.append(f"{of_usable(plan)}, {_size(over)} too much")
    for key, held, what in (("cpu", plan.cpu.per_node, "host memory"), ("nvme", plan.nvme.per_node, "disk")):
        if key in plan.misfits:
            limit = cluster["usable_cpu_ram" if key == "cpu" else "nvme"]
            assumed = "assumed " if key == "cpu" and cluster["cpu_ram_assumed"] else ""
            found.append(f"{_of(held, limit)} of {assumed}{what} a node")
    return found


def peak_sentence(plan: MemoryPlan) -> str:
    """Return what the peak is made of, or where that is not known the largest buffer; empty if there is neither."""
    gpu = plan.gpu
    if gpu.at_peak:
        beside = [line for line in plan.lines if line.buffer == Buffer.ROLLOUT and gpu.peak_phase in line.phases]
        parts = [*(("vLLM", line.bytes) for line in beside), *((one.what, one.bytes) for one in gpu.at_peak)]
        parts = sorted(parts, key=lambda part: -part[1])[:_PARTS]
        shown = [part for part in parts if 100 * part[1] >= parts[0][1]]  # less would show as 0
        return f"Peak, in the {gpu.peak_phase}: {sizes_text(shown)}."
    return largest_item(plan)


def largest_item(plan: MemoryPlan) -> str:
    """Return the largest buffer on the GPU with its formula; empty if there is none."""
    on_gpu = [line for line in plan.lines if line.place == "hbm"]
    if not on_gpu:
        return ""
    top = max(on_gpu, key=lambda line: line.bytes)
    why = f", {top.formula}" if top.formula.startswith(_NO_FORMULA) else f" = {top.formula} bytes"
    return f"Largest: {top.buffer}, {format_bytes(top.bytes)}{why}."


def relief_sentence(reliefs: Sequence[Relief]) -> str:
    """Return what each of the cheapest knobs saves; empty if there is none."""
    knobs = [(one.what, one.saves) for one in reliefs if not one.adapters][:_KNOBS]
    return f"Cheapest relief: {sizes_text(knobs, sign='−')}." if knobs else ""


def adapters_sentence(reliefs: Sequence[Relief]) -> str:
    """Return which adapters fit in place of all weights; empty where none are known to, or are needed."""
    found = next((one for one in reliefs if one.adapters), None)
    return "" if found is None else f"{found.what} fit, in {_size(found.total)} a GPU ({found.flags})."


def sizes_text(named: Sequence[tuple[str, int]], *, sign: str = "") -> str:
    """Return ``"gradients 16.9 GiB, parameters 15.0"``: names with sizes, all in the unit that the first one names."""
    unit, name = (GIB, "GiB") if max(size for _, size in named) >= GIB else (MIB, "MiB")
    parts = [f"{what} {sign}{size / unit:.{1 if unit == GIB else 0}f}" for what, size in named]
    parts[0] += f" {name}"
    return ", ".join(parts)


def _of(held: int, limit: int) -> str:
    """Return ``"172.3 of 502.0 GiB"``: both in the unit that the limit is written in."""
    size = _size(limit)
    unit = TIB if size.endswith("TiB") else GIB
    return f"{held / unit:.1f} of {size}"


def _size(count: int) -> str:
    """Return the bytes with one digit: ``"52.7 GiB"``."""
    return format_bytes(count, digits=1)


def reserved_sentence(plan: MemoryPlan) -> str:
    """Return how the verdict's figure follows from what a timeline's line shows; empty where no peak is known."""
    gpu = plan.gpu
    if gpu.peak_reserved is None or gpu.total is None:
        return ""
    beside = gpu.total - gpu.peak_reserved
    return (
        f"The line is what torch's allocator reserves, its cache included: {_size(gpu.peak_reserved)} at most. With"
        f" {_size(beside)} of CUDA context, kernels and NCCL beside it, nvidia-smi shows the verdict's {_size(gpu.total)}."
    )


def stages_sentence(plan: MemoryPlan) -> str:
    """Return what each pipeline stage needs, the worst first: ``"Stages: 0 needs 7.7 GiB, 1 7.2, …"``; empty without stages."""
    if not plan.stages:
        return ""
    needs = [(one.stage, one.model_states if one.total is None else one.total) for one in plan.stages]
    of = "of model states" if plan.stages[0].total is None else "a GPU"
    return f"Stages: {', '.join(f'{stage} needs {format_bytes(size, digits=1)}' for stage, size in needs)} {of}."
