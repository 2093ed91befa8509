"""The answer of ``scale`` as text: verdict, one row for each number of GPUs, and where a GPU gets faster among more."""

from __future__ import annotations

from collections.abc import Sequence

from zeroplan.core.plan import Verdict
from zeroplan.core.sizes import format_bytes, format_gib
from zeroplan.planner.describe import describe_cluster
from zeroplan.report.plans import notes, offload_text, unmodelled_notes
from zeroplan.report.recommendation import compiled_cells, compiled_header, described
from zeroplan.report.screen import LIST, counted_notes, first_screen
from zeroplan.report.sheet import Sheet
from zeroplan.report.table import Table
from zeroplan.report.terminal import PLAIN, Terminal
from zeroplan.report.verdict import edge_text, fit_text, lacks_of, unknown_text
from zeroplan.report.words import gpus_text, model_text
from zeroplan.search.results import Recommendation
from zeroplan.search.scaling import ScalePoint, Scaling
from zeroplan.search.whole_training import WholeTraining

_LEGEND = (
    "The fastest that fits on so many GPUs. states, GPU: GiB of one GPU, its model states and at most in all."
    " most: the largest micro batch that fits. tokens/s: of one GPU. speed: over the first row that fits."
)

_OF_A_TRAINING = (
    "days, GPU hours: of the whole training, failures included, at the rate of BLOOM's. goodput: the part in which new tokens"
    " are trained on, with checkpoints as often as loses the least. MWh: of the GPUs' boards at full power."
)


def scaling_text(
    found: Scaling,
    style: str = "plain",
    *,
    terminal: Terminal = PLAIN,
    quiet: bool = False,
    next_command: Sequence[str] = (),
) -> str:
    """Write the whole answer.

    Args:
        style: plain, github, html or csv; html and csv are the table alone.
        terminal: where it goes.
        quiet: the verdict alone.
        next_command: the words of the command that answers for the number of GPUs at which one is fastest.

    Raises:
        BadInput: an unknown `style`.
    """
    if style in ("csv", "html"):
        return scaling_table(found, style)
    if style != "plain":
        terminal = Terminal(width=None)
    sheet = scaling_sheet(found)
    (_, lines), (_, growth) = sheet.blocks(terminal)
    if quiet:
        return "\n".join(lines)
    following = terminal.command("Next: ", next_command) if next_command and found.first is not None else []
    asked = ["", *terminal.wrap(sheet.request)]
    table = ["", *scaling_table(found, style, width=terminal.width).splitlines()]
    legend = ["", *map(terminal.dim, terminal.wrap(_LEGEND))]
    of_training = [] if found.budget is None else [*map(terminal.dim, terminal.wrap(_OF_A_TRAINING + _of_nodes(found)))]
    said = sheet.notes
    if terminal.full:
        parts = (lines, growth, following, asked, table, legend, of_training, notes(said, terminal))
        return "\n".join(line for part in parts for line in part)
    more = ["", terminal.dim(f"{' and '.join(['What the columns mean', *([counted_notes(said)] if said else [])])}: --why")]
    return "\n".join(first_screen([(0, lines), (1, growth), (0, following), (2, asked), (0, table), (0, more)], LIST))


def scaling_sheet(found: Scaling) -> Sheet:
    """Return what the answer says: of the fewest GPUs on which the model fits."""
    best = None if found.first is None else found.first.best
    left_out = unmodelled_notes([point.shown.plan for point in found.points[:1]])
    return Sheet(
        name=str(found.model["name"]),
        request=heading(found),
        verdict=scaling_verdict(found),
        fits=False if best is None else best.fits,
        plan=found.points[-1].shown.plan if best is None else best.plan,
        sentences=((1, growth_sentence(found)),),
        remarks=(*left_out, *found.warnings),
    )


def scaling_verdict(found: Scaling) -> str:
    """Return from how many GPUs on the model fits, and on how many one GPU is fastest."""
    first, peak = found.first, found.peak
    if first is None or peak is None or first.best is None or peak.best is None:
        last = found.points[-1]
        lacks = " and ".join(lacks_of(last.shown.plan, describe_cluster(last.cluster))) or "which lacks memory"
        return f"Nothing fits: on {_gpus(last)} the nearest is {described(last.shown)}, {lacks}."
    if first.best.plan.undecided:
        best = first.best
        if best.plan.verdict is Verdict.MAY_FIT:
            return f"May fit on {_gpus(first)}: {described(best)}, {fit_text(best.plan)}. {edge_text(best.plan)}"
        return f"Unknown: nothing is known to fit; {described(best)} may on {_gpus(first)}. {unknown_text(best.plan)}"
    text = f"Fits from {_gpus(first)} on: {described(first.best)}, {fit_text(first.best.plan)}."
    speed = f"{peak.rank_tokens_per_second:,.0f} tokens/s"
    if peak is first:
        return f"{text} There a GPU is fastest: {speed}."
    return f"{text} A GPU is fastest on {peak.ranks:,}: {speed}, {found.efficiency(peak):.2f} × as fast."


#: From this share of a GPU's speed on the fewest on, more GPUs are called as fast as they are many.
_LINEAR = 0.97


def growth_sentence(found: Scaling) -> str:
    """Return where the speed-up is superlinear and why, else what the most GPUs keep of a GPU's speed."""
    first, last = found.first, found.points[-1]
    if first is None or first.best is None or first.best.plan.undecided:
        return ""
    if not found.superlinear:
        kept = found.efficiency(last)
        if last is first or kept is None:
            return ""
        how = "Linear" if kept > _LINEAR else "Sublinear"
        return f"{how}: on {_gpus(last)} one GPU does {100 * kept:.0f} % of what it does on {first.ranks:,}."
    best = max(found.superlinear, key=lambda point: found.efficiency(point) or 0.0)
    assert best.best is not None  # only what fits has an efficiency
    before, after = first.best.plan.gpu.model_states, best.best.plan.gpu.model_states
    shrink = f"states shrink from {format_gib(before, digits=1)} to {format_gib(after, digits=1)} GiB a GPU"
    reasons = [shrink] if after < before else []  # else they came from the host, which is a change below
    if changes := _changes(first.best, best.best):
        reasons.append("; ".join(changes))
    times = best.ranks / first.ranks
    return (
        f"Superlinear on {_spans(found)} GPUs: {', so '.join(reasons)}. {times:g} × the GPUs are"
        f" {times * (found.efficiency(best) or 0.0):,.1f} × as fast."
    )


def _spans(found: Scaling) -> str:
    """``"32 to 256"``: the points that are superlinear, neighbours together."""
    flags = [point in found.superlinear for point in found.points]
    spans: list[list[int]] = []
    for at, (point, flag) in enumerate(zip(found.points, flags, strict=True)):
        if flag and at and flags[at - 1]:
            spans[-1].append(point.ranks)
        elif flag:
            spans.append([point.ranks])
    return ", ".join(f"{span[0]:,} to {span[-1]:,}" if len(span) > 1 else f"{span[0]:,}" for span in spans)


def _changes(before: Recommendation, after: Recommendation) -> list[str]:
    """What the room is used for: the settings that differ."""
    one, two = before.workload, after.workload
    found = []
    if one.batch.micro_batch != two.batch.micro_batch:
        found.append(f"micro batch {one.batch.micro_batch} becomes {two.batch.micro_batch}")
    if one.gradient_checkpointing != two.gradient_checkpointing:
        found.append("blocks are checkpointed" if two.gradient_checkpointing else "no block is recomputed")
    if one.compile != two.compile:
        found.append("no graph is compiled" if two.compile is None else f"{two.compile} are compiled")
    if (here := offload_text(before.plan)) != (there := offload_text(after.plan)):
        found.append(f"offload: {here} becomes {there}")
    if before.zero.stage != after.zero.stage:
        found.append(f"ZeRO-{before.zero.stage} becomes ZeRO-{after.zero.stage}")
    return found


def _gpus(point: ScalePoint) -> str:
    """``"16 GPUs"``."""
    return f"{point.ranks:,} GPU{'s' if point.ranks > 1 else ''}"


def scaling_table(found: Scaling, style: str = "plain", *, width: int | None = None) -> str:
    """Return one row for each number of GPUs, sizes in GiB. Raises BadInput: an unknown `style`."""
    return scaling_rows(found).text(style, width=width)


def scaling_rows(found: Scaling) -> Table:
    """Return the rows of :func:`scaling_table`."""
    compiled = compiled_header([point.shown for point in found.points])
    headers = ["GPUs", "ZeRO", "offload", "ckpt", *compiled, "batch", "most", "states", "GPU", "tokens/s", "speed"]
    if found.budget is not None:
        headers += ["days", "GPU hours", "goodput", "MWh", *(["price"] if found.budget.prices else [])]
    return Table(headers, [_row(found, point) for point in found.points])


def _row(found: Scaling, point: ScalePoint) -> list[str]:
    one = point.shown
    gpu, work, efficiency = one.plan.gpu, one.workload, found.efficiency(point)
    return [
        f"{point.ranks:,}",
        str(one.zero.stage),
        offload_text(one.plan),
        "yes" if work.gradient_checkpointing else "no",
        *compiled_cells(work, [point.shown for point in found.points]),
        str(work.batch.micro_batch) + (f" × {work.batch.grad_accum}" if work.batch.grad_accum > 1 else ""),
        "-" if point.largest_micro_batch is None else str(point.largest_micro_batch),
        format_gib(gpu.model_states, digits=1),
        format_gib(gpu.at_most, digits=1),
        "does not fit" if point.rank_tokens_per_second is None else f"{point.rank_tokens_per_second:,.0f}",
        "-" if efficiency is None else f"{efficiency:.2f}",
        *_training_cells(found, point),
    ]


def _of_nodes(found: Scaling) -> str:
    """Say what nodes are worth in the training on the most GPUs; nothing where that is not known."""
    fitting = [point for point in found.points if point.best is not None]
    one = found.training(fitting[-1]) if fitting else None
    if one is None or one.next_node_days is None or one.slow_host_days is None:
        return ""
    return (
        f" On {fitting[-1].ranks:,} GPUs one more node would save {one.next_node_days:,.2g} days, a host that computes a tenth"
        f" longer cost {one.slow_host_days:,.2g} at most; {one.spare_nodes:,} spare nodes replace those that fail in a week."
    )


def _training_cells(found: Scaling, point: ScalePoint) -> list[str]:
    """The cells of a whole training; none without a budget of tokens."""
    if found.budget is None:
        return []
    one = found.training(point)
    figures = [
        (None if one is None else one.days, ",.1f"),
        (None if one is None else one.gpu_hours, ",.0f"),
        (None if one is None else one.goodput, ".1%"),
        (None if one is None else one.megawatt_hours, ",.1f"),
    ]
    cells = ["-" if figure is None else format(figure, style).replace("%", " %") for figure, style in figures]
    return [*cells, *(["-" if one is None or one.price is None else _money(one.price)] if found.budget.prices else [])]


def _money(price: float) -> str:
    return f"{price / 1e6:,.2f}M" if price >= 1e6 else f"{price:,.0f}"


def training_text(tokens: int, one: WholeTraining) -> str:
    """Say in a line what a budget of tokens takes by one configuration."""
    if one.days is None or one.gpu_hours is None or one.failures is None or one.goodput is None:
        return f"{tokens:,} tokens: failures would take more than half of the time."
    parts = [f"{one.days:,.1f} days", f"{one.gpu_hours:,.0f} GPU hours"]
    parts += [] if one.megawatt_hours is None else [f"{one.megawatt_hours:,.1f} MWh of the GPUs' boards"]
    parts += [] if one.price is None else [f"{_money(one.price)} by --price"]
    share = f"{one.goodput:.1%}".replace("%", " %")
    lost = f"failures included: {one.failures:,.0f}, a checkpoint every {one.save_seconds / 60:,.0f} minutes, {share} goodput"
    return f"{tokens:,} tokens: {', '.join(parts)}; {lost}."


def heading(found: Scaling) -> str:
    """Return what was asked for in a line: the model, the card, the workload."""
    model, work, cluster = found.model, found.workload, found.points[-1].cluster
    text = model_text(model["name"], model["params"], model["trainable"])
    text += f" · nodes of {gpus_text(1, cluster.gpus)}"
    text += f" of {format_bytes(cluster.vram, digits=0)} ({format_bytes(cluster.usable_vram, digits=1)} usable)"
    batch = f"global batch {found.global_batch} × " if found.global_batch else "sequences of "
    text += f" · {batch}{work.batch.seq_len} tokens · {work.numerics.dtype} {work.numerics.optimizer}"
    text += f" · {work.compile} compiled" if work.compile is not None else ""
    return text + (f" · LoRA rank {work.lora_rank}" if work.lora_rank else "")
