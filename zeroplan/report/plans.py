"""Plans as tables for the terminal, GitHub, HTML and CSV, and the sentences below them. No formulas here."""

from __future__ import annotations

from zeroplan.core.plan import MemoryPlan, Report
from zeroplan.core.units import format_bytes, format_gib
from zeroplan.report.host import host_table
from zeroplan.report.table import render
from zeroplan.report.words import gpus_text, model_text, work_text

_FITS = {True: "yes", False: "no", None: "-"}


def _offload(plan: MemoryPlan) -> str:
    optimizer, param = plan.offload_optimizer, plan.offload_param
    if optimizer == param == "none":
        return "none"
    if param == "none":
        return f"optimizer {optimizer}"
    return f"optimizer, params {param}" if optimizer == param else f"optimizer {optimizer}, params {param}"


def fits_text(plan: MemoryPlan) -> str:
    """Whether a plan fits, and which limits it breaks."""
    return _FITS[plan.fits] + (f" ({', '.join(plan.misfits)})" if plan.misfits else "")


def _host(plan: MemoryPlan) -> str:
    return format_gib(plan.cpu.per_node) + (f" ({format_gib(plan.cpu.pinned)})" if plan.cpu.pinned else "")


def plans_table(plans: tuple[MemoryPlan, ...] | list[MemoryPlan], style: str = "plain") -> str:
    """One row a plan, sizes in GiB."""
    simulated = any(plan.gpu.peak_allocated is not None for plan in plans)
    headers = ["stage", "offload", "states"]
    headers += ["activations", "allocated", "reserved", "total", "peak in"] if simulated else ["fixed"]
    headers += ["host (pinned)", "disk", "fits", "DeepSpeed says"]
    rows = []
    for plan in plans:
        gpu = plan.gpu
        row = [str(plan.stage), _offload(plan), format_gib(gpu.model_states)]
        if simulated:
            row += [format_gib(v) for v in (gpu.activations, gpu.peak_allocated, gpu.peak_reserved, gpu.total)]
            row.append(gpu.peak_phase or "-")
        else:
            row.append(format_gib(gpu.fixed_buffers))
        peer = plan.deepspeed_estimator
        row += [
            _host(plan),
            format_gib(plan.nvme.per_node) if plan.nvme.per_node else "-",
            fits_text(plan),
            f"{format_gib(peer.gpu)} / {format_gib(peer.cpu)}" if peer else "-",
        ]
        rows.append(row)
    return render(headers, rows, style)


def report_text(report: Report, style: str = "plain") -> str:
    """The whole answer: a heading, the table, what decides, and the warnings."""
    table = plans_table(report.plans, style)
    if style in ("csv", "html"):
        return table
    parts = [_heading(report), "", table, "", *_legend(report), "", *_host_part(report, style), *decides(report)]
    parts += [f"warning: {text}" for text in report.warnings]
    return "\n".join(parts)


_HOST_LEGEND = (
    "Host memory of a node, in GiB. Not in the total: saving and resuming, and weights, which is load where pretrained ones are"
    " read into host memory."
)


def _host_part(report: Report, style: str) -> list[str]:
    """The host by phase, where there is one plan to tell of."""
    table = host_table(report.plans[0], style) if len(report.plans) == 1 else ""
    return [table, "", _HOST_LEGEND, ""] if table else []


def _heading(report: Report) -> str:
    model, work, cluster = report.model, report.workload, report.cluster
    text = f"{model_text(model.name, model.params, model.trainable)} · {gpus_text(cluster['nodes'], cluster['gpus'])}"
    if cluster["vram"]:
        text += f" of {format_bytes(cluster['vram'], digits=0)} ({format_bytes(cluster['usable_vram'], digits=1)} usable)"
    return f"{text} · {work_text(work)}"


def _legend(report: Report) -> list[str]:
    lines = ["GiB per GPU; host and disk per node. DeepSpeed says: its own estimator, per GPU / per node's host."]
    if any(plan.depth == "simulated" for plan in report.plans):
        lines.append("total: reserved by torch's allocator, and what the context, kernels and NCCL take beside it.")
        lines.append("fits: the upper end of total's interval against what is usable.")
    if any(plan.depth == "formula" for plan in report.plans):
        lines.append("states: parameters, gradients, optimizer. fixed: the engine's buffers. Activations are not counted here.")
    return lines


#: How the origin of an item begins that no formula gives.
_NO_FORMULA = ("measured", "traced", "simulated")


def decides(report: Report) -> list[str]:
    """What decides: the largest item, the first option that fits, and what would change it."""
    if not report.plans:
        return []
    out = []
    first = report.plans[0]
    on_gpu = [line for line in first.lines if line.place == "hbm"]
    if on_gpu:
        top = max(on_gpu, key=lambda line: line.bytes)
        why = f", {top.formula}" if top.formula.startswith(_NO_FORMULA) else f" = {top.formula} bytes"
        out.append(f"Largest item at {first.label}: {top.buffer}, {format_bytes(top.bytes)}{why}.")
    fitting = [plan for plan in report.plans if plan.fits]
    if any(plan.fits is not None for plan in report.plans):
        if fitting:
            out.append(f"First that fits: {fitting[0].label} ({_need(fitting[0])} a GPU).")
        else:
            nearest = min(report.plans, key=lambda plan: plan.gpu.needed)
            over = (nearest.gpu.needed) - (nearest.gpu.usable or 0)
            short = (
                f", {format_bytes(over)} too much" if "gpu" in nearest.misfits else f": {', '.join(nearest.misfits)} is short"
            )
            out.append(f"Nothing fits. Nearest: {nearest.label} ({_need(nearest)} a GPU{short}).")
    out += _would_change(report)
    return out


def _need(plan: MemoryPlan) -> str:
    return format_bytes(plan.gpu.needed)


def _would_change(report: Report) -> list[str]:
    if len(report.plans) < 2:
        return []
    small = min(report.plans, key=lambda plan: plan.gpu.needed)
    first = report.plans[0]
    if _need(small) == _need(first):
        return []
    return [f"What changes it most: {small.label} brings {_need(first)} down to {_need(small)} a GPU."]


def lines_table(plan: MemoryPlan, style: str = "plain") -> str:
    """One row a buffer, largest first within its place."""
    order = {"hbm": 0, "pinned": 1, "dram": 2, "nvme": 3}
    lines = sorted(plan.lines, key=lambda line: (order.get(line.place, 9), -line.bytes))
    rows = [[line.buffer, line.place, format_bytes(line.bytes), _phases(line.phases), line.formula] for line in lines]
    return render(["buffer", "place", "bytes", "phases", "formula"], rows, style)


def _phases(phases: tuple[str, ...]) -> str:
    return (
        "always"
        if len(phases) >= 4
        else "from the first step"
        if phases == ("forward", "backward", "step")
        else ", ".join(phases)
    )


def plan_text(plan: MemoryPlan) -> str:
    """One plan for a terminal: its row, its host and its buffers."""
    tables = [plans_table([plan]), host_table(plan), lines_table(plan)]
    return f"{plan.engine} {plan.engine_version}, {plan.label}\n" + "\n\n".join(table for table in tables if table)


def plan_html(plan: MemoryPlan) -> str:
    """One plan for a notebook."""
    heading = f"<p><b>{plan.engine} {plan.engine_version}, {plan.label}</b></p>"
    return heading + plans_table([plan], "html") + host_table(plan, "html") + lines_table(plan, "html")
