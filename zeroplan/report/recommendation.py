"""A recommendation for the terminal: the ranked table, the reasons, and what to do when nothing fits. No formulas here."""

from __future__ import annotations

import difflib

from zeroplan.core.units import format_bytes, format_count, format_gib
from zeroplan.ds_config.writer import dump_ds_config
from zeroplan.report.plans import fits_text
from zeroplan.report.table import render
from zeroplan.report.verdict import unknown_text
from zeroplan.report.words import gpus_text, host_text, model_text
from zeroplan.report.wrap import wrap
from zeroplan.search.files import Files
from zeroplan.search.reasons import name_of
from zeroplan.search.recommend import HEADROOM
from zeroplan.search.results import Recommendation, SearchResult
from zeroplan.search.suggestions import shortfalls

#: Columns of what is read; the command stays on one line, to be copied.
_WIDTH = 80
_LEGEND = (
    "GiB per GPU; host per node. up to: the upper end of the interval. The first keeps"
    f" {100 * HEADROOM:.0f} % of a GPU free beyond it, if any does."
)


def answer_text(answer: SearchResult, style: str = "plain", *, files: Files | None = None) -> str:
    """Write the whole answer.

    Args:
        answer: what was found.
        style: plain, github, html or csv.
        files: what was written, and how to start it.
    """
    if style in ("csv", "html"):
        return ranking_table(answer.ranking, style)
    parts = [_heading(answer), ""]
    if answer.current is not None:
        parts += [f"In use: {_sentence(answer.current)}", ""]
    if answer.ranking:
        parts += [ranking_table(answer.ranking, style), "", _LEGEND]
    best = answer.best
    if best is not None and best.plan.undecided:
        parts += ["", f"Nothing is known to fit. {unknown_text(best.plan)}"]
    if best is not None and best.reasons:
        parts += ["", f"Why {name_of(best.zero, best.workload.gradient_checkpointing)}:", *(f"- {r}" for r in best.reasons)]
    if best is None:
        parts += _nothing(answer)
    elif answer.current is not None:
        parts += ["", *_difference(answer.current, best)]
    if files is not None:
        parts += ["", *files_text(files)]
    parts += [f"warning: {text}" for text in answer.warnings]
    parts.append(f"({answer.considered} configurations, {answer.simulated} simulated)")
    return "\n".join(parts)


def files_text(files: Files) -> list[str]:
    """Write what was written, the command, what the user's own program must do, and what else to know."""
    lines = [*wrap(f"Wrote {', '.join(files.texts)}. Start it:", _WIDTH, hang="  "), "", f"  {files.start.shell()}"]
    if files.program_must:
        lines += ["", "Your program must:"]
        lines += [line for text in files.program_must for line in wrap(text, _WIDTH, indent="- ", hang="  ")]
    notes = [line for text in files.notes for line in wrap(f"note: {text}", _WIDTH, hang="  ")]
    return [*lines, *(["", *notes] if notes else [])]


def ranking_table(ranking: tuple[Recommendation, ...], style: str = "plain") -> str:
    """Return one row a configuration, best first."""
    headers = [
        "",
        "stage",
        "offload",
        "micro × accum",
        "ckpt",
        "tokens/s",
        "s a step",
        "total",
        "up to",
        "host",
        "fits",
        "buckets",
    ]
    rows = []
    for place, one in enumerate(ranking, 1):
        plan, work = one.plan, one.workload
        rows.append(
            [
                str(place),
                str(one.zero.stage),
                _offload(one),
                f"{work.micro_batch} × {work.grad_accum}",
                "yes" if work.gradient_checkpointing else "no",
                f"{one.tokens_per_second:,.0f}",
                f"{one.step_seconds:.3g}",
                format_gib(plan.gpu.total),
                format_gib(plan.gpu.interval[1] if plan.gpu.interval else None),
                format_gib(plan.cpu.per_node, digits=0)
                + (f" + disk {format_gib(plan.nvme.per_node, digits=0)}" if plan.nvme.per_node else ""),
                fits_text(plan),
                _knobs(one),
            ]
        )
    return render(headers, rows, style)


def _offload(one: Recommendation) -> str:
    parts = []
    if one.zero.offload_optimizer:
        parts.append(f"optimizer {one.zero.offload_optimizer.device}")
    if one.zero.offloads_param:
        parts.append(f"parameters {one.zero.offload_param.device}")
    return ", ".join(parts) or "none"


def _knobs(one: Recommendation) -> str:
    zero, parts = one.zero, []
    if one.engine.dialect is not None and zero.stage:
        parts.append(format_count(zero.reduce_bucket_size).replace(" ", ""))
    if zero.stage in (1, 2) and zero.overlap_comm:
        parts.append("overlap")
    if one.alloc_conf:
        parts.append("expandable" if one.alloc_conf == "expandable_segments:True" else one.alloc_conf)
    return ", ".join(parts) or "-"


def _heading(answer: SearchResult) -> str:
    model, work, cluster = answer.model, answer.workload, answer.cluster
    text = model_text(model["name"], model["params"], model["trainable"])
    text += f" · {gpus_text(cluster.nodes, cluster.gpus)}"
    text += f" of {format_bytes(cluster.vram, digits=0)} ({format_bytes(cluster.usable_vram, digits=1)} usable)"
    if cluster.cpu_ram:
        text += f", {host_text(cluster.cpu_ram, cluster.usable_cpu_ram or 0, cluster.host.name)}"
    batch = f"global batch {answer.global_batch} × " if answer.global_batch else "sequences of "
    text += f" · {batch}{work.seq_len} tokens · {work.dtype} {work.optimizer}"
    return text + (f" · LoRA rank {work.lora_rank}" if work.lora_rank else "")


def _sentence(one: Recommendation) -> str:
    gpu = one.plan.gpu
    need = f"{format_bytes(gpu.total)} a GPU" if gpu.total is not None else f"at least {format_bytes(gpu.needed)} a GPU"
    unknown = "whether it fits is unknown" if one.plan.undecided else "no limit given"
    fits = {True: "fits", False: "does not fit", None: unknown}[one.fits]
    work = one.workload
    return (
        f"{name_of(one.zero, work.gradient_checkpointing)}, {work.micro_batch} × {work.grad_accum}: {need}, {fits}, "
        f"{one.tokens_per_second:,.0f} tokens/s"
    )


def _nothing(answer: SearchResult) -> list[str]:
    parts = ["Nothing fits."]
    if answer.nearest is not None:
        cluster = answer.cluster
        lack = shortfalls(answer.nearest, cluster.usable_vram, cluster.usable_cpu_ram, cluster.nvme)
        parts.append(f"Nearest: {_sentence(answer.nearest)}; it lacks {' and '.join(lack) or 'memory'}.")
    if answer.changes:
        parts += ["", "What would make it fit, cheapest first:"]
        parts += [f"{i}. {change.what}: {_sentence(change.best)}" for i, change in enumerate(answer.changes, 1)]
    elif answer.nearest is not None:
        parts.append("No single change of sequence length, adapters, host memory, disk, GPUs or cards makes it fit.")
    return parts


def _difference(current: Recommendation, best: Recommendation) -> list[str]:
    """Return what to change to get from one to the other, as a diff of the ds_configs."""
    gain = best.tokens_per_second / current.tokens_per_second if current.tokens_per_second else 0.0
    if current.fits is not False and gain < 1.02:
        return ["What is in use is as good as anything that fits."]
    before, after = _lines(current), _lines(best)
    head = "It would be" if current.fits is not False else "What is in use does not fit. The best that does is"
    lines = [f"{head} {gain:.2f} × as fast with:"] if current.fits is not False else [f"{head}:"]
    lines += list(difflib.unified_diff(before, after, "in use", "recommended", lineterm="", n=1))
    if current.alloc_conf != best.alloc_conf:
        lines.append(f"PYTORCH_ALLOC_CONF={best.alloc_conf}")
    return lines


def _lines(one: Recommendation) -> list[str]:
    """Return the lines of a configuration that decide memory and speed: the rate and the like of an optimizer stay the user's
    own.
    """
    config, work = one.ds_config(), one.workload
    if config is None:
        lines = [f"engine: {one.plan.engine}", f"stage: {one.zero.stage}"]
        lines += [f"micro_batch: {work.micro_batch}", f"grad_accum: {work.grad_accum}"]
    else:
        optimizer = config.get("optimizer")
        own = {"optimizer": {"type": optimizer["type"]}} if isinstance(optimizer, dict) and "type" in optimizer else {}
        lines = dump_ds_config({**config, **own}).splitlines()
    return [*lines, f"gradient_checkpointing: {str(work.gradient_checkpointing).lower()}"]
