"""The answer of ``estimate`` as text: the verdict, a table of the plans that fits the terminal, and the details of one plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zeroplan.core.buffers import Buffer
from zeroplan.core.gpus import GPUS
from zeroplan.core.plan import MemoryPlan, Report, Verdict
from zeroplan.core.sizes import format_bytes, format_gib
from zeroplan.core.unmodelled import Effect
from zeroplan.engines.words import stage_header, stage_text
from zeroplan.report.host import host_table
from zeroplan.report.screen import LIST, ONE, counted_notes, first_screen
from zeroplan.report.sheet import Sheet
from zeroplan.report.table import Table, render
from zeroplan.report.terminal import PLAIN, Terminal
from zeroplan.report.verdict import adapters_sentence, name_of, peak_sentence, relief_sentence, stages_sentence, verdict
from zeroplan.report.words import machine_text, model_text, work_text

_FITS = {True: "yes", False: "no", None: "-"}
#: Parts of the peak that are smaller than this part of it are summed up.
LEAST_SHARE = 0.005


def report_text(
    report: Report, style: str = "plain", *, terminal: Terminal = PLAIN, quiet: bool = False, next_command: Sequence[str] = ()
) -> str:
    """Return the whole answer: verdict, table, details of a single plan, and the notes.

    Args:
        style: plain, github, html or csv. But for plain, tables have all columns; csv and html are the table alone.
        terminal: where it goes. Without a width, tables have all columns as well.
        quiet: the verdict alone.
        next_command: the words of the command that a user would run next, or nothing.

    Raises:
        BadInput: an unknown `style`.
    """
    if style in ("csv", "html"):
        return plans_table(report.plans, style)
    if style != "plain":
        terminal = Terminal(width=None)
    sheet = plans_sheet(report)
    blocks = _blocks(report, sheet, terminal, next_command=next_command)
    if quiet:
        return "\n".join(blocks[0][1])
    one, said = len(report.plans) == 1, sheet.notes
    if not terminal.full:
        hidden = 0
        if not one:
            table = _table(report.plans, style, terminal)
            held = sum(len(lines) for rank, lines in blocks if rank == 0) + 2
            some = [plan for plan in report.plans if plan.fits is not False or plan is report.decisive]
            if held + len(table) > LIST:
                hidden, table = len(report.plans) - len(some), _table(some, style, terminal)
            blocks += [(0, ["", *table]), (5, ["", *_legend(report, style, terminal)])]
        there = [f"{hidden} that do not fit"] if hidden else []
        there += [what for what, has in (("tables", one), (counted_notes(said), said)) if has]
        more = [terminal.dim(f"{' and '.join(there).capitalize()}: --why")] if there else []
        return "\n".join(first_screen([*blocks, (0, more)], ONE if one else LIST))
    lines = [line for _, part in blocks for line in part] + [""]
    if one:
        lines += _details(report.plans[0], style, terminal, knobs(report, terminal))
    else:
        lines += [*_table(report.plans, style, terminal), "", *_legend(report, style, terminal)]
    lines += notes(said, terminal)
    return "\n".join(lines)


#: Flags by which a command keeps to a layout.
_DEGREES = frozenset(("--tp", "--sp", "--cp", "--pp", "--vpp", "--ep", "--etp", "--schedule", "--dp-replicate"))


def brief_text(report: Report, terminal: Terminal = PLAIN, *, quiet: bool = False, next_command: Sequence[str] = ()) -> str:
    """Return the answer without its tables of memory: verdict, peak, knobs and notes."""
    sheet = plans_sheet(report)
    blocks = _blocks(report, sheet, terminal, next_command=next_command)
    if not quiet and not terminal.full:
        return "\n".join(first_screen(blocks, ONE))
    lines = [line for _, part in (blocks[:1] if quiet else blocks) for line in part]
    return "\n".join(lines if quiet else [*lines, *knobs(report, terminal), *notes(sheet.notes, terminal)])


def plans_sheet(report: Report) -> Sheet:
    """Return what the answer says: of the plan that decides, else of the first."""
    decisive = report.decisive
    plan = decisive or (report.plans[0] if report.plans else None)
    peak = ((2, peak_sentence(plan)), (3, stages_sentence(plan))) if plan else ()
    return Sheet(
        name=report.model.name,
        request=request_text(report),
        verdict=verdict(report),
        fits=None if decisive is None else decisive.fits,
        plan=decisive,
        sentences=(*peak, (1, relief_sentence(report.reliefs)), (0, adapters_sentence(report.reliefs))),
        remarks=tuple(report_notes(report)),
    )


def _blocks(report: Report, sheet: Sheet, terminal: Terminal, *, next_command: Sequence[str]) -> list[tuple[int, list[str]]]:
    """Return what comes before any table, each with its rank on the first screen: verdict, peak, knobs, the command to go on
    with, and what was asked for.
    """
    blocks = sheet.blocks(terminal)
    lines: list[str] = []
    if next_command and report.cluster.get("layout"):
        search = "The fastest with it:" if _DEGREES.intersection(next_command) else "Without it:"
        lines += terminal.wrap(f"Next: your own program starts this layout, no file that recommend writes does. {search}")
        lines += terminal.command("  ", next_command)
    elif next_command:
        lines += terminal.command("Next: ", next_command)
    asked = ["", *terminal.wrap(sheet.request)]
    return [*blocks, (0, lines), (0 if report.cluster.get("held") else 1, asked)]


def knobs(report: Report, terminal: Terminal) -> list[str]:
    """Return a table of the options that lower the plan's memory, the cheapest in speed first; nothing if there is none."""
    if not report.reliefs:
        return []
    head, *others = knob_rows(report).text(width=terminal.width).splitlines()
    return ["", terminal.bold(head), *others]


def knob_rows(report: Report) -> Table:
    """Return the rows of :func:`knobs`."""
    rows = [
        [one.what, format_gib(one.saves, digits=1), format_gib(one.total, digits=1), _FITS[one.fits], one.flags]
        for one in report.reliefs
    ]
    return Table(["knob", "saves", "then GPU", "fits", "flags"], rows)


def notes(warnings: Sequence[str], terminal: Terminal) -> list[str]:
    """Return the warnings, each once, in their order, which is the most severe first."""
    found = list(dict.fromkeys(warnings))
    lines = [line for text in found for line in terminal.wrap(text, indent="note: ", hang="      ")]
    return ["", *lines] if lines else []


def report_notes(report: Report) -> list[str]:
    """Return what else to know, the most severe first: what no figure holds, then the warnings."""
    setup = [report.setup["says"]] if report.setup is not None else []
    return [*unmodelled_notes(report.plans), *setup, *report.warnings]


#: What a thing that the figures leave out does.
_EFFECTS = {
    Effect.MORE: "adds memory",
    Effect.LESS: "saves memory",
    Effect.NONE: "changes no memory",
    Effect.UNKNOWN: "may add or save memory",
}


def unmodelled_notes(plans: Sequence[MemoryPlan]) -> list[str]:
    """Return a line for each thing that the plans leave out: ``"not in the figures: activations (adds memory): …"``."""
    found = dict.fromkeys(
        f"not in the figures: {one.key} ({_EFFECTS[one.effect]}): {one.says}" for plan in plans for one in plan.unmodelled
    )
    return list(found)


def request_text(report: Report) -> str:
    """Return what was asked for: the model, the machine, the engine and the work."""
    model = report.model
    parts = [model_text(model.name, model.params, model.trainable), machine_text(report.cluster)]
    if report.plans:
        parts.append(f"{report.plans[0].engine} {report.plans[0].engine_version}")
    return " · ".join([*parts, work_text(report.workload)])


def _table(plans: Sequence[MemoryPlan], style: str, terminal: Terminal) -> list[str]:
    """Return the table's lines, the verdict of each row in colour."""
    if style != "plain" or terminal.width is None:
        return plans_table(plans, style).splitlines()
    return terminal.judged(narrow_table(plans, terminal.width), [(fits_text(plan), plan.fits) for plan in plans]).splitlines()


def narrow_table(plans: Sequence[MemoryPlan], width: int = 80) -> str:
    """Return one row a plan in six columns, sizes in GiB."""
    return narrow_rows(plans).text(width=width)


def narrow_rows(plans: Sequence[MemoryPlan]) -> Table:
    """Return the headers and the rows of :func:`narrow_table`."""
    simulated = any(plan.gpu.at_peak for plan in plans)
    headers = [
        stage_header({plan.engine for plan in plans}),
        "offload",
        "GPU",
        "host",
        "largest at the peak" if simulated else "largest",
        "fits",
    ]
    rows = [
        [
            stage_text(plan),
            offload_text(plan),
            format_gib(plan.gpu.needed, digits=1),
            format_gib(plan.cpu.per_node, digits=1),
            _most(plan),
            fits_text(plan),
        ]
        for plan in plans
    ]
    return Table(headers, rows)


def plan_record(plan: MemoryPlan) -> dict[str, Any]:
    """Return the plan's figures by name: one row of a data frame. Sizes are bytes, None where they are not known."""
    gpu = plan.gpu
    return {
        "engine": plan.engine,
        "stage": plan.stage,
        "offload_optimizer": plan.offload_optimizer,
        "offload_param": plan.offload_param,
        "depth": plan.depth,
        "verdict": plan.verdict.value,
        "fits": plan.fits,
        "gpu_model_states": gpu.model_states,
        "gpu_activations": gpu.activations,
        "gpu_peak_allocated": gpu.peak_allocated,
        "gpu_peak_reserved": gpu.peak_reserved,
        "gpu_total": gpu.total,
        "gpu_at_most": gpu.interval[1] if gpu.interval else None,
        "peak_phase": gpu.peak_phase,
        "cpu_per_node": plan.cpu.per_node,
        "cpu_pinned": plan.cpu.pinned,
        "nvme_per_node": plan.nvme.per_node,
    }


def _most(plan: MemoryPlan) -> str:
    """Return the largest family at the peak, or at formula depth the largest buffer."""
    if plan.gpu.at_peak:
        top = plan.gpu.at_peak[0]
        return f"{top.what} {format_gib(top.bytes, digits=1)}"
    on_gpu = [line for line in plan.lines if line.place == "hbm"]
    if not on_gpu:
        return "-"
    largest = max(on_gpu, key=lambda line: line.bytes)
    return f"{largest.buffer} {format_gib(largest.bytes, digits=1)}"


def offload_text(plan: MemoryPlan) -> str:
    """Return what is offloaded and where to: ``"optimizer, params cpu"``."""
    optimizer, param = plan.offload_optimizer, plan.offload_param
    if optimizer == param == "none":
        return "none"
    if param == "none":
        return f"optimizer {optimizer}"
    return f"optimizer, params {param}" if optimizer == param else f"optimizer {optimizer}, params {param}"


def fits_text(plan: MemoryPlan) -> str:
    """Return whether a plan fits, and which limits it exceeds: ``"no (gpu, cpu)"``."""
    word = "may" if plan.verdict is Verdict.MAY_FIT else "unknown" if plan.undecided else _FITS[plan.fits]
    return word + (f" ({', '.join(plan.misfits)})" if plan.misfits else "")


def plans_table(plans: Sequence[MemoryPlan], style: str = "plain") -> str:
    """Return one row a plan with all columns, sizes in GiB. Raises BadInput: an unknown `style`."""
    simulated = any(plan.gpu.peak_allocated is not None for plan in plans)
    headers = ["stage", "offload", "states"]
    headers += ["activations", "allocated", "reserved", "total", "peak in"] if simulated else ["fixed"]
    headers += ["host (pinned)", "disk", "fits", "DeepSpeed says"]
    rows = []
    for plan in plans:
        gpu = plan.gpu
        row = [str(plan.stage), offload_text(plan), format_gib(gpu.model_states)]
        if simulated:
            row += [format_gib(v) for v in (gpu.activations, gpu.peak_allocated, gpu.peak_reserved, gpu.total)]
            row.append(gpu.peak_phase or "-")
        else:
            row.append(format_gib(gpu.fixed_buffers))
        peer = plan.deepspeed_estimator
        row += [
            format_gib(plan.cpu.per_node) + (f" ({format_gib(plan.cpu.pinned)})" if plan.cpu.pinned else ""),
            format_gib(plan.nvme.per_node) if plan.nvme.per_node else "-",
            fits_text(plan),
            f"{format_gib(peer.gpu)} / {format_gib(peer.cpu)}" if peer else "-",
        ]
        rows.append(row)
    return render(headers, rows, style)


def _amd(report: Report) -> bool:
    gpu = GPUS.get(str(report.cluster.get("gpu")).lower())
    return gpu is not None and gpu.amd


def _legend(report: Report, style: str, terminal: Terminal) -> list[str]:
    """Say what the columns are."""
    simulated = any(plan.depth == "simulated" for plan in report.plans)
    if style == "plain" and terminal.width is not None:
        shown = "what nvidia-smi would show" if not _amd(report) else "reserved by torch, with CUDA's context for ROCm's"
        gpu = shown if simulated else "states and the engine's buffers, without activations"
        lines = terminal.wrap(f"GiB. GPU: {gpu}, on the GPU that needs the most. host: of a node. --wide shows all columns.")
        return [terminal.dim(line) for line in lines]
    lines = ["GiB per GPU; host and disk per node. DeepSpeed says: its own estimator, per GPU / per node's host."]
    if simulated:
        lines.append("total: reserved by torch's allocator, and what the context, kernels and NCCL take beside it.")
        lines.append("fits: the upper end of total's interval against what is usable.")
    if any(plan.depth == "formula" for plan in report.plans):
        lines.append("states: parameters, gradients, optimizer. fixed: the engine's buffers. Activations are not counted here.")
    return lines


_HOST_LEGEND = (
    "Host memory of a node by phase, GiB. weights is load where pretrained weights are read into host memory. Not in the"
    " total: save and resume, and of load and weights the one that the run does not do (--from-scratch)."
)


def _details(plan: MemoryPlan, style: str, terminal: Terminal, more: Sequence[str] = ()) -> list[str]:
    """One plan's figures, what is alive at its peak, `more`, and its host by phase."""
    if style != "plain" or terminal.width is None:
        lines = [*plans_table([plan], style).splitlines(), ""]
    else:
        lines = [*_figures(plan, terminal), *_peak(plan, terminal)]
    lines += [*more[1:], ""] if more else []
    table = host_table(plan, style, width=terminal.width)
    if table:
        lines += [*map(terminal.dim, terminal.wrap(_HOST_LEGEND)), table]
    return lines


def figures(plan: MemoryPlan) -> list[tuple[str, int, str]]:
    """Return a plan's figures: the name of each, its bytes, and what it is. What is not known is left out."""
    gpu = plan.gpu
    known = [
        ("model states", gpu.model_states, "parameters, gradients, optimizer"),
        ("engine's buffers", gpu.fixed_buffers, "buckets and the like, at their largest"),
        ("activations", gpu.activations, "the most of one micro batch's own computation"),
        ("allocated", gpu.peak_allocated, f"max_memory_allocated, reached in the {gpu.peak_phase}"),
        ("reserved", gpu.peak_reserved, "max_memory_reserved: with the allocator's cache"),
        *(("vLLM", line.bytes, line.formula) for line in plan.lines if line.buffer == Buffer.ROLLOUT),
        ("total", gpu.total, "nvidia-smi: with CUDA context, kernels and NCCL"),
        (
            "host",
            plan.cpu.per_node,
            "of a node" + (f", {format_gib(plan.cpu.pinned, digits=1)} pinned" if plan.cpu.pinned else ""),
        ),
        ("disk", plan.nvme.per_node or None, "of a node"),
    ]
    return [(name, size, what) for name, size, what in known if size is not None]


def _figures(plan: MemoryPlan, terminal: Terminal) -> list[str]:
    """Return one line a figure, sizes in GiB, each with what it is."""
    peer = plan.deepspeed_estimator
    rows = [f"{name:<20}{format_gib(size):>9}  {terminal.dim(what)}" for name, size, what in figures(plan)]
    if peer is not None:
        says = "its own estimator; host of a node " + format_gib(peer.cpu, digits=1)
        rows.append(f"{'DeepSpeed says':<20}{format_gib(peer.gpu):>9}  {terminal.dim(says)}")
    return [terminal.bold(f"{'GiB':<20}{'a GPU':>9}"), *rows, ""]


def peak_parts(plan: MemoryPlan) -> list[tuple[str, int, float]]:
    """Return what is alive at the peak, largest first: name, bytes, and share from 0 to 1. Small parts are summed up."""
    whole = sum(one.bytes for one in plan.gpu.at_peak)
    if not whole:
        return []
    shown = [one for one in plan.gpu.at_peak if one.bytes >= LEAST_SHARE * whole]
    rest = whole - sum(one.bytes for one in shown)
    parts = [(one.what, one.bytes) for one in shown] + ([("the rest", rest)] if rest else [])
    return [(what, size, size / whole) for what, size in parts]


def _peak(plan: MemoryPlan, terminal: Terminal) -> list[str]:
    """List what is alive at the peak, sizes in GiB and shares of the peak."""
    lines = [f"{what:<20}{format_gib(size):>9}  {100 * share:3.0f} %" for what, size, share in peak_parts(plan)]
    return [terminal.bold("At the peak"), *lines, ""] if lines else []


def lines_table(plan: MemoryPlan, style: str = "plain", *, width: int | None = None) -> str:
    """Return one row a buffer, largest first within its place."""
    return line_rows(plan).text(style, width=width)


def line_rows(plan: MemoryPlan) -> Table:
    """Return the rows of :func:`lines_table`."""
    order = {"hbm": 0, "pinned": 1, "dram": 2, "nvme": 3}
    lines = sorted(plan.lines, key=lambda line: (order.get(line.place, 9), -line.bytes))
    rows = [[line.buffer, line.place, format_bytes(line.bytes), _phases(line.phases), line.formula] for line in lines]
    return Table(["buffer", "place", "bytes", "phases", "formula"], rows)


def _phases(phases: tuple[str, ...]) -> str:
    if len(phases) >= 4:
        return "always"
    return "from the first step" if phases == ("forward", "backward", "step") else ", ".join(phases)


def plan_text(plan: MemoryPlan, terminal: Terminal = PLAIN) -> str:
    """Return one plan for a terminal: its figures, its host and its buffers."""
    heading = f"{plan.engine} {plan.engine_version}, {name_of(plan)}"
    lines = [*terminal.wrap(heading), "", *_details(plan, "plain", terminal), "", lines_table(plan, width=terminal.width)]
    return "\n".join([*lines, *notes(unmodelled_notes([plan]), terminal)])


def plan_html(plan: MemoryPlan) -> str:
    """Return one plan for a notebook."""
    from html import escape

    heading = f"<p><b>{plan.engine} {plan.engine_version}, {name_of(plan)}</b></p>"
    left_out = "".join(f"<p>{escape(text)}</p>" for text in unmodelled_notes([plan]))
    return heading + plans_table([plan], "html") + host_table(plan, "html") + lines_table(plan, "html") + left_out
