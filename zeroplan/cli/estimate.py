"""``zeroplan estimate``: the memory of one model at every stage and offload, or at the one asked for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from zeroplan.cli import flags
from zeroplan.cli.main import made_by, show, show_json, verb
from zeroplan.core.errors import EXIT_DOES_NOT_FIT, BadInput
from zeroplan.run.ask import Ask

if TYPE_CHECKING:
    from zeroplan.planner.estimate import Estimate

Check = Annotated[bool, typer.Option("--check", help="Exit with 1 when no listed plan fits.")]
Peak = Annotated[bool, typer.Option("--peak", help="List what is alive at each plan's peak, largest first.")]
Html = Annotated[
    str | None,
    typer.Option(
        "--html", metavar="FILE", callback=flags.writable, help="Write the whole report, with timelines, as one page."
    ),
]
Timeline = Annotated[
    str | None, typer.Option("--timeline", metavar="FILE", callback=flags.writable, help="Draw the one plan's timeline as SVG.")
]


@verb(
    "zeroplan estimate meta-llama/Llama-3.1-8B --gpus 8 --gpu H100",
    "zeroplan estimate ./my_model --vram 24 --ds-config ds_config.json",
)
@flags.takes_run("estimate")
def estimate(
    request: Ask,
    style: flags.Style = "plain",
    why: flags.Why = False,
    wide: flags.Wide = False,
    quiet: flags.Quiet = False,
    as_json: flags.Json = False,
    check: Check = False,
    peak: Peak = False,
    html: Html = None,
    timeline: Timeline = None,
) -> None:
    """Predict the GPU, host and disk memory of training MODEL.

    Every ZeRO stage and offload is listed that the options leave open.
    """
    from zeroplan.planner.estimate import estimate_runs

    if check and not any((request.gpu, request.vram, request.cpu_ram, request.nvme)):
        raise BadInput(
            "there is no limit to hold the plans against", where="--check", remedy="give --vram 24G or --gpu A100-80G"
        )
    if timeline is not None and not timeline.lower().endswith(".svg"):
        raise BadInput(f"{timeline} is drawn as SVG", where="--timeline", remedy="give a name that ends in .svg")
    if request.files:
        from zeroplan.cli.captured import estimated

        if estimated(request, check=check, quiet=quiet, as_json=as_json):
            return
    answer = estimate_runs(request)
    report = answer.report
    if html is not None:
        _write_html(answer, html)
    if timeline is not None:
        _write_timeline(answer, timeline)
    if as_json:
        show_json(_json(answer, peak=peak))
    else:
        from zeroplan.report.plans import report_text
        from zeroplan.report.terminal import Terminal
        from zeroplan.techniques.table import TABLE

        terminal = Terminal.here(wide=wide, why=why)
        unsearched = any(one.unsearched and one.shown in report.workload for one in TABLE)
        following = [] if unsearched else flags.recommend_words(request)
        show(report_text(report, style, terminal=terminal, quiet=quiet, next_command=following))
        if peak and not quiet:
            show("\n" + _peaks(answer, style, terminal.width))
    if check and not any(plan.fits for plan in report.plans):
        raise typer.Exit(EXIT_DOES_NOT_FIT)


def _json(answer: Estimate, *, peak: bool) -> str:
    if not peak:
        return answer.report.to_json()
    from zeroplan.report.peak import peak_json

    data = json.loads(answer.report.to_json())
    for plan, run in zip(data["plans"], answer.runs, strict=True):
        plan["peak"] = None if run is None else peak_json(run.simulation.timeline, run.tape)
    return json.dumps(data, indent=2)


def _peaks(answer: Estimate, style: str, width: int | None) -> str:
    """Tables of what is alive at each plan's peak, and of its host unless the report shows that."""
    from zeroplan.report.host import host_table
    from zeroplan.report.peak import peak_tables

    parts, several = [], len(answer.runs) > 1
    for plan, run in zip(answer.report.plans, answer.runs, strict=True):
        if run is None:
            parts.append(f"{plan.label}: no peak at formula depth")
        else:
            parts.append(f"{plan.label}: alive at the peak, in {plan.gpu.peak_phase}")
            parts.append(peak_tables(run.simulation.timeline, run.tape, sharded=plan.stage == 3, style=style, width=width))
            parts += [host_table(plan, style, width=width)] if several else []
    return "\n\n".join(parts)


def _write_html(answer: Estimate, path: str) -> None:
    from zeroplan.core.plumbing.files import write_atomic
    from zeroplan.report.plans_html import html_report
    from zeroplan.report.timeline import drawn

    runs = {index: drawn(run) for index, run in enumerate(answer.runs) if run is not None}
    write_atomic(path, html_report(answer.report, runs, made=made_by()))


def _write_timeline(answer: Estimate, path: str) -> None:
    from zeroplan.core.plumbing.files import write_atomic
    from zeroplan.report.timeline import drawn, timeline_svg

    runs = [(plan, run) for plan, run in zip(answer.report.plans, answer.runs, strict=True) if run is not None]
    if not runs:
        raise BadInput(
            "no plan has a timeline at formula depth", where="--timeline", remedy="give a model that can be simulated"
        )
    if len(runs) > 1:
        raise BadInput(f"{len(runs)} simulated plans", where="--timeline", remedy="name one by --stage and --offload-optimizer")
    plan, run = runs[0]
    title = f"{answer.report.model.name}, {plan.engine} {plan.label}"
    write_atomic(path, timeline_svg(drawn(run), title=title, limit=plan.gpu.usable))
