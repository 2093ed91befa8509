"""The answer of ``recommend`` without a model, as text and JSON: the largest models that the machine can train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from zeroplan.core.plan import MemoryPlan
from zeroplan.core.sizes import format_count, format_gib
from zeroplan.report.plans import notes, offload_text
from zeroplan.report.recommendation import files_text
from zeroplan.report.recommendation import verdict as best_verdict
from zeroplan.report.screen import LIST, first_screen
from zeroplan.report.table import render
from zeroplan.report.terminal import PLAIN, Terminal
from zeroplan.report.words import machine_text
from zeroplan.search.catalog import Overview, fits_by_bound
from zeroplan.search.files import Files
from zeroplan.search.results import Recommendation

_LEGEND = (
    "The largest models of the catalog that fit, one sequence a GPU, with checkpointing. GPU: GiB that nvidia-smi would show."
    " host: GiB of a node."
)


def overview_text(
    found: Overview,
    style: str = "plain",
    *,
    files: Files | None = None,
    terminal: Terminal = PLAIN,
    quiet: bool = False,
    next_command: Sequence[str] = (),
) -> str:
    """Write the whole answer: the largest model by method, a row for each model, and the best for the largest in full.

    Args:
        style: plain, github, html or csv; html and csv are the table alone.
        files: what was written, and how to start it.
        terminal: where it goes.
        quiet: the verdict alone.
        next_command: the words of the command that answers for the largest full fine-tune.

    Raises:
        BadInput: an unknown `style`.
    """
    if style in ("csv", "html"):
        return overview_table(found, style)
    if style != "plain":
        terminal = Terminal(width=None)
    lines = terminal.verdict(verdict(found), any(row.found for row in found.rows))
    if quiet:
        return "\n".join(lines)
    lines += terminal.command("Next: ", next_command) if next_command and found.best is not None else []
    if not terminal.full:
        return "\n".join(_first_screen(found, files, terminal, lines))
    lines += ["", *terminal.wrap(machine_text(found.cluster)), ""]
    if any(row.found for row in found.rows):
        wide = style != "plain" or terminal.width is None
        table = overview_table(found, style).splitlines() if wide else _by_method(found, terminal)
        lines += [*table, "", *map(terminal.dim, terminal.wrap(_legend(found)))]
    if found.best is not None:
        lines += ["", *terminal.wrap(f"{found.best.model['name']} in full. {best_verdict(found.best)}")]
    if files is not None:
        lines += ["", *files_text(files, terminal)]
    return "\n".join([*lines, *notes((*found.warnings, *(files.notes if files is not None else ())), terminal)])


def _first_screen(found: Overview, files: Files | None, terminal: Terminal, lines: list[str]) -> list[str]:
    """Return the verdict's lines with the largest model of each method."""
    largest = tuple(replace(row, found=row.found[:1]) for row in found.rows)
    table = (
        overview_table(replace(found, rows=largest), width=terminal.width).splitlines() if any(r.found for r in largest) else []
    )
    best = f"{found.best.model['name']} in full. {best_verdict(found.best)}" if found.best is not None else ""
    blocks = [
        (0, lines),
        (2, ["", *terminal.wrap(machine_text(found.cluster))]),
        (0, ["", *table]),
        (1, ["", *terminal.wrap(best)] if best else []),
        (0, ["", *files_text(files, terminal)] if files is not None else []),
        (0, [terminal.dim("More models, and what the columns mean: --why")]),
    ]
    return first_screen(blocks, LIST)


def _legend(found: Overview) -> str:
    """Return what the columns mean, and what the command of an unusual row needs."""
    rows = [(row.method, one) for row in found.rows for _, _, one in row.found]
    bound = " ≤: not simulated, 19 of 20 models need no more." if any(fits_by_bound(one.plan) for _, one in rows) else ""
    quantized = {f"--quantize {m.quantize} --engine {one.engine.name}" for m, one in rows if m.quantize is not None}
    how = "".join(f" QLoRA: {words}." for words in quantized)
    return f"{_LEGEND}{bound}{how}"


def verdict(found: Overview) -> str:
    """Return the largest model of each method in a sentence, and the methods by which nothing can be trained."""
    largest = [(row.method.how, *row.found[0]) for row in found.rows if row.found]
    nothing = [row.method.how for row in found.rows if not row.fits]
    if not largest:
        return "Nothing fits: no model of the catalog can be trained here, by any method."
    parts = [
        f"{_short(name)} ({format_count(params)}){' or larger' if fits_by_bound(one.plan) else ''} {how}"
        for how, name, params, one in largest
    ]
    without = f" Nothing of the catalog fits {' or '.join(nothing)}." if nothing else ""
    return f"Trains at most: {', '.join(parts)}.{without}"


def overview_table(found: Overview, style: str = "plain", *, width: int | None = None) -> str:
    """Return one row for each method and model, largest first, sizes in GiB. Raises BadInput: an unknown `style`."""
    rows = [[row.method.name, name, *_cells(params, one)] for row in found.rows for name, params, one in row.found]
    return render(["method", "model", *_COLUMNS], rows, style, width=width)


_COLUMNS = ("size", "ZeRO", "offload", "GPU", "host", "tokens/s")


def _cells(params: int, one: Recommendation) -> list[str]:
    plan = one.plan
    gpu = format_gib(plan.gpu.total, digits=1) if plan.gpu.total is not None else f"≤{format_gib(plan.gpu.bound, digits=1)}"
    sizes = [gpu, format_gib(plan.cpu.per_node, digits=0)]
    return [format_count(params).replace(" ", ""), str(plan.stage), _offload(plan), *sizes, f"{one.tokens_per_second:,.0f}"]


def _offload(plan: MemoryPlan) -> str:
    """Return ``"all cpu"`` where optimizer and parameters are offloaded to the same place: the rows are long."""
    return f"all {plan.offload_param}" if plan.offload_param == plan.offload_optimizer != "none" else offload_text(plan)


def _by_method(found: Overview, terminal: Terminal) -> list[str]:
    """Return the table for a terminal: below a line for each method its models, by the last part of their ids."""
    rows = [[_short(name), *_cells(params, one)] for row in found.rows for name, params, one in row.found]
    if terminal.width is not None:
        others = sum(2 + max(map(len, cells)) for cells in zip(_COLUMNS, *(row[1:] for row in rows), strict=True))
        rows = [[_cut(name, terminal.width - others), *cells] for name, *cells in rows]
    head, _, *lines = render(["model", *_COLUMNS], rows, "plain", width=terminal.width).splitlines()
    if len(lines) != len(rows):  # cells that go on below: the plain table says which method each row is of
        return overview_table(found, width=terminal.width).splitlines()
    shown = [terminal.bold(head)]
    for row in found.rows:
        if row.found:
            shown += ["", terminal.bold(f"Trained {row.method.how}"), *lines[: len(row.found)]]
            del lines[: len(row.found)]
    return shown


def _cut(name: str, most: int) -> str:
    """Return a name with its middle left out, where it is longer than `most` characters."""
    keep = max(most - 1, 8)
    return name if len(name) <= most else f"{name[: keep - keep // 2]}…{name[len(name) - keep // 2 :]}"


def _short(name: str) -> str:
    """Return the last part of an id, by which the catalog knows it too."""
    return name.rpartition("/")[2]


def overview_json(found: Overview) -> dict[str, Any]:
    """Return the same as one object that JSON can hold."""
    return {
        "schema": 1,
        "warnings": list(found.warnings),
        "methods": [
            {
                "method": row.method.name,
                "models": [{"model": name, "params": params, **one.to_dict()} for name, params, one in row.found],
            }
            for row in found.rows
        ],
        "best": None if found.best is None else found.best.to_dict(),
    }
