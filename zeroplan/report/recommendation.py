"""A recommendation for the terminal: the ranked table, the reasons, and what to do when nothing fits. No formulas here."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from zeroplan.core.plan import Verdict
from zeroplan.core.sizes import format_bytes, format_count, format_gib
from zeroplan.core.workload import Workload
from zeroplan.ds_config.writer import dump_ds_config
from zeroplan.engines.words import engine_title, stage_header, stage_text
from zeroplan.planner.describe import describe_cluster
from zeroplan.report.plans import fits_text, notes, offload_text, plan_record, unmodelled_notes
from zeroplan.report.screen import LIST, counted_notes, first_screen
from zeroplan.report.sheet import Sheet
from zeroplan.report.table import Table, render
from zeroplan.report.terminal import PLAIN, Terminal
from zeroplan.report.verdict import edge_text, fit_text, host_share, lacks_of, peak_sentence, unknown_text
from zeroplan.report.verdict import name_of as plan_name
from zeroplan.report.words import machine_text, model_text
from zeroplan.search.files import Files
from zeroplan.search.policy import EQUAL
from zeroplan.search.reasons import CHOICES, name_of
from zeroplan.search.results import Recommendation, SearchResult

_LEGEND = "GiB per GPU; host per node. up to: the upper end of the interval. Speeds within 0.1 % are equal."
_SHORT_LEGEND = "GPU: GiB that nvidia-smi would show, at most. host: GiB of a node. --wide shows all columns."


def answer_text(
    answer: SearchResult,
    style: str = "plain",
    *,
    files: Files | None = None,
    terminal: Terminal = PLAIN,
    quiet: bool = False,
    next_command: Sequence[str] = (),
) -> str:
    """Write the whole answer: verdict, table, reasons, files and notes.

    Args:
        answer: what was found.
        style: plain, github, html or csv; html and csv are the table alone.
        files: what was written, and how to start it.
        terminal: where it goes. Without a width, the table has all columns.
        quiet: the verdict alone.
        next_command: the words of the command that writes the files, where they were not written.

    Raises:
        BadInput: an unknown `style`.
    """
    if style in ("csv", "html"):
        return ranking_table(answer.ranking, style)
    if style != "plain":
        terminal = Terminal(width=None)
    best, sheet = answer.best, answer_sheet(answer, files)
    (_, lines), *sentences = sheet.blocks(terminal)
    if quiet:
        return "\n".join(lines)
    following = terminal.command("Next: ", next_command) if next_command and files is None and best is not None else []
    peak = [line for _, part in sentences for line in part]
    asked = ["", *terminal.wrap(sheet.request)]
    wide = style != "plain" or terminal.width is None
    table, legend, reasons = list[str](), list[str](), list[str]()
    if answer.ranking:
        rows = ranking_table(answer.ranking, style) if wide else narrow_ranking(answer.ranking, terminal)
        table = ["", *rows.splitlines()]
        legend = ["", *map(terminal.dim, terminal.wrap(_LEGEND if wide else _SHORT_LEGEND))]
    if best is not None and best.reasons:
        name = name_of(best.plan.engine, best.zero, best.workload)
        reasons = ["", terminal.bold(f"Why {name}"), *terminal.items(best.reasons)]
    other = ["", *terminal.wrap(_of_the_other(answer, answer.other_engine))] if answer.other_engine is not None else []
    instead = change_texts(answer) if best is not None else []
    difference: list[str] = []
    if best is None:
        difference = ["", *_changes(answer, terminal)]
    elif answer.current is not None:
        difference = ["", *_difference(answer, best, answer.current, terminal)]
    started = ["", *files_text(files, terminal)] if files is not None else []
    said = sheet.notes
    counted = f"({answer.considered} configurations, {answer.simulated} simulated)"
    if terminal.full:
        offers = ["", *terminal.items(instead)] if instead else []
        parts = [lines, peak, following, asked, table, legend, reasons, offers]
        parts += [other, difference, started, notes(said, terminal)]
        return "\n".join([*(line for part in parts for line in part), terminal.dim(counted)])
    more = [what for what, there in (("reasons", reasons), (counted_notes(said), said)) if there]
    end = terminal.wrap(f"{counted} {' and '.join(more).capitalize()}: --why" if more else counted)
    of_files = answer.current is not None and best is not None
    choices = [text for text in (best.reasons if best is not None else ()) if text.startswith(CHOICES)]
    choices.sort(key=lambda text: next(at for at, begins in enumerate(CHOICES) if text.startswith(begins)))
    blocks = [
        (0, lines),
        *sentences,
        (0, following),
        (0 if answer.cluster.held else 3 if of_files else 2, asked),
        (4 if of_files else 0, table),
        *_item_blocks(choices, terminal, first=1),
        *_item_blocks(instead, terminal, first=0),
        (6, legend),
        (1, other),
        (0, difference),
        (0, started),
        (0, ["", *map(terminal.dim, end)]),
    ]
    return "\n".join(first_screen(blocks, LIST))


def _item_blocks(texts: Sequence[str], terminal: Terminal, *, first: int) -> Iterator[tuple[int, list[str]]]:
    """Yield a block for each text, the first of the given rank and below an empty line, the others of rank 1."""
    for at, text in enumerate(texts):
        yield (1, terminal.items([text])) if at else (first, ["", *terminal.items([text])])


def answer_sheet(answer: SearchResult, files: Files | None = None) -> Sheet:
    """Return what the answer says, of the best configuration or of the nearest; `files` have notes of their own."""
    best, nearest = answer.best, answer.nearest
    left_out = unmodelled_notes([one.plan for one in answer.ranking[:1]])
    return Sheet(
        name=str(answer.model["name"]),
        request=request_text(answer),
        verdict=verdict(answer),
        fits=None if best is not None and best.fits is None else best is not None,
        plan=best.plan if best is not None else None if nearest is None else nearest.plan,
        sentences=() if best is None else ((5, peak_sentence(best.plan)),),
        remarks=(*left_out, *answer.warnings, *(files.notes if files is not None else ())),
    )


def verdict(answer: SearchResult) -> str:
    """Return the answer in a sentence or two: the best configuration with its speed and memory, or what is nearest."""
    best, current = answer.best, answer.current
    if best is None:
        if answer.nearest is None:
            return "Nothing fits."
        plan = answer.nearest.plan
        lacks = " and ".join(lacks_of(plan, describe_cluster(answer.cluster))) or "which lacks memory"
        cheapest = f" Cheapest change: {answer.changes[0].what}." if answer.changes else ""
        return f"Nothing fits: nearest is {described(answer.nearest)}, {lacks}.{cheapest}"
    engine = engine_title(best.plan.engine)
    name = described(best)
    name = name if name.startswith(engine) else f"{engine} {name}"
    text = f"{name}, {best.tokens_per_second:,.0f} tokens/s, {fit_text(best.plan)}"
    if best.plan.verdict is Verdict.MAY_FIT:
        return f"May fit: {text}{host_share(best.plan, describe_cluster(answer.cluster))}. {edge_text(best.plan)}"
    if best.plan.undecided:
        return f"Unknown: nothing is known to fit; best may be {text}. {unknown_text(best.plan)}"
    head = "Least memory" if answer.goal == "memory" else "Fastest" if best.fits is None else "Best"
    compared = ""
    if current is not None and current.fits is False:
        compared = " What is in use does not fit."
    elif current is not None and current.tokens_per_second:
        compared = f" {best.tokens_per_second / current.tokens_per_second:.2f} × as fast as what is in use."
    return f"{head}: {text}{host_share(best.plan, describe_cluster(answer.cluster))}.{compared}"


def _of_the_other(answer: SearchResult, other: Recommendation) -> str:
    """Say what the other engine gains over the one that is kept."""
    best, title = answer.best, engine_title(other.plan.engine)
    gain = ""
    if best is not None and other.plan.verdict is best.plan.verdict:
        gain = f", {other.tokens_per_second / best.tokens_per_second:.2f} × as fast"
    return f"{title} beside it (--engine {other.plan.engine}): {_sentence(other)}{gain}."


def described(one: Recommendation) -> str:
    """Name a configuration: ``"ZeRO-2, optimizer on cpu, checkpointing, micro batch 4 × 8 accumulated"``."""
    work = one.workload
    text = plan_name(one.plan) + (", checkpointing" if work.gradient_checkpointing else "")
    text += f", {work.compile} compiled" if work.compile is not None else ""
    return f"{text}, micro batch {work.batch.micro_batch}" + (
        f" × {work.batch.grad_accum} accumulated" if work.batch.grad_accum > 1 else ""
    )


def files_text(files: Files, terminal: Terminal = PLAIN) -> list[str]:
    """Say what was written, with the command, and what the user's own program must do."""
    if not files.texts:
        return terminal.wrap("Nothing is written: nothing in your files changes.")
    start = files.start.shell()
    lines = terminal.wrap(f"Wrote {', '.join(files.texts)}.{' Start it:' if start else ''}")
    lines += ["", *terminal.shell("  ", start)] if start else []
    if files.program_must:
        lines += ["", terminal.bold("Your program must" if start else "Left to you"), *terminal.items(files.program_must)]
    return lines


def narrow_ranking(ranking: tuple[Recommendation, ...], terminal: Terminal) -> str:
    """Return one row a configuration, best first, in columns that fit the terminal."""
    table = ranking_rows(ranking).text(width=terminal.width)
    return terminal.judged(table, [(fits_text(one.plan), one.fits) for one in ranking])


def ranking_rows(ranking: Sequence[Recommendation]) -> Table:
    """Return the headers and the rows of :func:`narrow_ranking`."""
    rows = []
    for place, one in enumerate(ranking, 1):
        gpu, work = one.plan.gpu, one.workload
        rows.append(
            [
                str(place),
                stage_text(one.plan),
                offload_text(one.plan),
                f"{work.batch.micro_batch} × {work.batch.grad_accum}",
                "yes" if work.gradient_checkpointing else "no",
                *compiled_cells(work, ranking),
                f"{one.tokens_per_second:,.0f}",
                format_gib(gpu.at_most, digits=1),
                format_gib(one.plan.cpu.per_node, digits=0),
                fits_text(one.plan),
            ]
        )
    header = ["", stage_header({one.plan.engine for one in ranking}), "offload", "batch", "ckpt", *compiled_header(ranking)]
    return Table([*header, "tokens/s", "GPU", "host", "fits"], rows)


def compiled_header(ranking: Iterable[Recommendation]) -> list[str]:
    """The header of what is compiled, for a table of which some row has anything."""
    return ["compiled"] if any(one.workload.compile is not None for one in ranking) else []


def compiled_cells(work: Workload, ranking: Iterable[Recommendation]) -> list[str]:
    """A row's cell below :func:`compiled_header`."""
    return ["no" if work.compile is None else work.compile.value for _ in compiled_header(ranking)]


def record(one: Recommendation) -> dict[str, Any]:
    """Return a configuration's figures by name: one row of a data frame. Sizes are bytes, times seconds."""
    work = one.workload
    return {
        "tokens_per_second": one.tokens_per_second,
        "step_seconds": one.step_seconds,
        "micro_batch": work.batch.micro_batch,
        "grad_accum": work.batch.grad_accum,
        "gradient_checkpointing": work.gradient_checkpointing,
        **({} if work.compile is None else {"compile": work.compile.value}),
        "alloc_conf": one.alloc_conf,
        **plan_record(one.plan),
    }


def recommendation_text(one: Recommendation, terminal: Terminal = PLAIN) -> str:
    """Return one configuration in one screen: what it is, its peak, why, and its ds_config."""
    lines = terminal.verdict(f"{described(one)}: {one.tokens_per_second:,.0f} tokens/s, {fit_text(one.plan)}.", one.fits)
    lines += terminal.wrap(peak) if (peak := peak_sentence(one.plan)) else []
    if one.alloc_conf:
        lines += [f"PYTORCH_ALLOC_CONF={one.alloc_conf}"]
    lines += ["", *terminal.items(one.reasons)] if one.reasons else []
    config = one.ds_config()
    return "\n".join(lines if config is None else [*lines, "", dump_ds_config(config).rstrip()])


def ranking_table(ranking: tuple[Recommendation, ...], style: str = "plain") -> str:
    """Return one row a configuration, best first."""
    headers = [
        "",
        "stage",
        "offload",
        "micro × accum",
        "ckpt",
        *compiled_header(ranking),
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
                offload_text(one.plan),
                f"{work.batch.micro_batch} × {work.batch.grad_accum}",
                "yes" if work.gradient_checkpointing else "no",
                *compiled_cells(work, ranking),
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


def _knobs(one: Recommendation) -> str:
    zero, parts = one.zero, []
    if one.engine.dialect is not None and zero.stage:
        parts.append(format_count(zero.buckets.reduce_bucket_size).replace(" ", ""))
    if zero.stage in (1, 2) and zero.buckets.overlap_comm:
        parts.append("overlap")
    if one.alloc_conf:
        parts.append("expandable" if one.alloc_conf == "expandable_segments:True" else one.alloc_conf)
    return ", ".join(parts) or "-"


def request_text(answer: SearchResult) -> str:
    """Return what was asked for: the model, the machine and the work."""
    model, work = answer.model, answer.workload
    text = model_text(model["name"], model["params"], model["trainable"])
    text += f" · {machine_text(describe_cluster(answer.cluster))}"
    batch = f"global batch {answer.global_batch} × " if answer.global_batch else "sequences of "
    text += f" · {batch}{work.batch.seq_len} tokens · {work.numerics.dtype} {work.numerics.optimizer}"
    text += f" · {work.compile} compiled" if work.compile is not None else ""
    return text + (f" · LoRA rank {work.lora_rank}" if work.lora_rank else "")


def _sentence(one: Recommendation) -> str:
    gpu = one.plan.gpu
    need = f"{format_bytes(gpu.total)} a GPU" if gpu.total is not None else f"at least {format_bytes(gpu.needed)} a GPU"
    unsure = "may fit" if one.plan.verdict is Verdict.MAY_FIT else "whether it fits is unknown"
    unknown = unsure if one.plan.undecided else "no limit given"
    fits = {True: "fits", False: "does not fit", None: unknown}[one.fits]
    work = one.workload
    return (
        f"{name_of(one.plan.engine, one.zero, work)}, {work.batch.micro_batch} × {work.batch.grad_accum}: {need}, {fits}, "
        f"{one.tokens_per_second:,.0f} tokens/s"
    )


def change_texts(answer: SearchResult) -> list[str]:
    """Return what would (surely) fit, the cheapest first, each with what could be run then; nothing if no change does."""
    return [f"{change.what}: {_sentence(change.best)}" for change in answer.changes]


def _changes(answer: SearchResult, terminal: Terminal) -> list[str]:
    """List what would make it fit, where nothing does."""
    if answer.changes:
        lines = [terminal.bold("What would make it fit, cheapest first")]
        for i, text in enumerate(change_texts(answer), 1):
            lines += terminal.items([text], mark=f"{i}. ")
        return lines
    if answer.nearest is None:
        return []
    return terminal.wrap("No change makes it fit, of adapters, length, host memory, disk, and up to 32 nodes of 8 GPUs.")


def _difference(answer: SearchResult, best: Recommendation, current: Recommendation, terminal: Terminal) -> list[str]:
    """Say what is in use, and what to change to get from it to the best: a diff of the files, or of ds_configs without any."""
    lines = terminal.wrap(f"In use: {_sentence(current)}.")
    gain = best.tokens_per_second / current.tokens_per_second if current.tokens_per_second else 0.0
    if current.fits is not False and gain < 1.02:
        return [*lines, "What is in use is as good as anything that fits."]
    if answer.changed is not None and (run := answer.changed_run) is not None:
        lines += [*answer.changed.diff, *terminal.items(answer.changed.edits.left)]
        if abs(run.tokens_per_second / best.tokens_per_second - 1) >= EQUAL or run.plan.gpu.needed != best.plan.gpu.needed:
            lines += terminal.wrap(f"With your other settings as they are: {_sentence(run)}.")
        return lines
    lines += difflib.unified_diff(_lines(current), _lines(best), "in use", "recommended", lineterm="", n=1)
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
        lines += [f"micro_batch: {work.batch.micro_batch}", f"grad_accum: {work.batch.grad_accum}"]
    else:
        optimizer = config.get("optimizer")
        own = {"optimizer": {"type": optimizer["type"]}} if isinstance(optimizer, dict) and "type" in optimizer else {}
        lines = dump_ds_config({**config, **own}).splitlines()
    compiled = [] if work.compile is None else [f"compile: {work.compile}"]
    return [*lines, f"gradient_checkpointing: {str(work.gradient_checkpointing).lower()}", *compiled]
