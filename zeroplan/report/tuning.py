"""The answer of ``tune`` as text: the fastest measured, a table of candidates, and what died."""

from __future__ import annotations

from zeroplan.core.sizes import format_gib
from zeroplan.report.plans import notes, offload_text
from zeroplan.report.recommendation import compiled_cells, compiled_header, described
from zeroplan.report.table import render
from zeroplan.report.terminal import PLAIN, Terminal
from zeroplan.search.results import Recommendation
from zeroplan.tuning.results import Tuned, Tuning


def tuning_text(found: Tuning, terminal: Terminal = PLAIN, *, quiet: bool = False) -> str:
    """Return the verdict, a row for each candidate, why some died, and the notes."""
    lines = terminal.verdict(verdict(found), found.best is not None)
    if quiet:
        return "\n".join(lines)
    machine, params = found.machine, found.model["params"]
    lines += ["", *terminal.wrap(f"{found.model['name']}: {params:,} parameters · {machine['ranks']} × {machine['name']}"), ""]
    chosen = [one.recommendation for one in found.ranking]
    headers = ["ZeRO", "offload", "batch", "ckpt", *compiled_header(chosen)]
    headers += [*(["predicted"] if found.predicted else []), "measured", "GPU", "run"]
    rows = [_row(one, chosen, predicted=found.predicted) for one in found.ranking]
    table = render(headers, rows, "plain", width=terminal.width).splitlines()
    lines += [terminal.bold(table[0]), *table[1:], ""]
    begin = "predicted, " if found.predicted else "No speed is predicted for this machine: its rates are not known. "
    lines += map(terminal.dim, terminal.wrap(f"{begin}measured: tokens/s. GPU: GiB that the process held."))
    died = [f"{described(one.recommendation)}: {one.trial.says}" for one in found.ranking if one.trial and one.trial.says]
    return "\n".join([*lines, *notes((*died, *found.warnings), terminal)])


def verdict(found: Tuning) -> str:
    """Return the fastest that was measured, and what it is beside the one that was predicted to be fastest."""
    best = found.best
    if best is None or best.tokens_per_second is None:
        return f"Nothing ran: none of {found.runs} configurations came to its end."
    text = f"Best measured: {described(best.recommendation)}, {best.tokens_per_second:,.0f} tokens/s, of {found.runs} runs."
    if not found.predicted:
        return text
    first = max(found.ranking, key=lambda one: one.recommendation.tokens_per_second)
    if first is best:
        return f"{text} It was predicted to be."
    if first.tokens_per_second is None:
        return f"{text} The one predicted to be {'was not run' if first.trial is None else 'did not run to its end'}."
    gain = best.tokens_per_second / first.tokens_per_second
    return f"{text} {gain:.2f} × as fast as the one predicted to be."


def _row(one: Tuned, ranking: list[Recommendation], *, predicted: bool) -> list[str]:
    chosen, trial, measured = one.recommendation, one.trial, one.tokens_per_second
    return [
        str(chosen.zero.stage),
        offload_text(chosen.plan),
        f"{chosen.workload.batch.micro_batch} × {chosen.workload.batch.grad_accum}",
        "yes" if chosen.workload.gradient_checkpointing else "no",
        *compiled_cells(chosen.workload, ranking),
        *([f"{chosen.tokens_per_second:,.0f}"] if predicted else []),
        "" if measured is None else f"{measured:,.0f}",
        "" if trial is None or trial.total is None else format_gib(trial.total, digits=1),
        "not run" if trial is None else trial.outcome.value,
    ]
