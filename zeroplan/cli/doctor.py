"""``zeroplan doctor``: what a log says went wrong; or what this machine is, what is in use on it, and how fast it is."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zeroplan.cli import flags
from zeroplan.cli.main import show, show_json, verb
from zeroplan.core.errors import BadInput
from zeroplan.core.plumbing.progress import watched, working
from zeroplan.run.ask import Ask

if TYPE_CHECKING:
    from zeroplan.logs.diagnose import Diagnosis
    from zeroplan.planner.failed_run import FailedRunPlan

Log = Annotated[
    str | None,
    typer.Argument(metavar="LOG", help="What a run printed, or a torch memory snapshot. [none: this machine]"),
]


@verb(
    "zeroplan doctor train.log meta-llama/Llama-3.1-8B --ds-config ds_config.json",
    "zeroplan doctor --calibrate --nvme-path /local_nvme",
)
@flags.takes_run("doctor")
def doctor(
    request: Ask,
    log: Log = None,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Measure this machine's rates and keep them.")] = False,
    output: Annotated[str | None, typer.Option("-o", "--output", help="Where to keep them. [the user's config folder]")] = None,
    report: Annotated[bool, typer.Option("--report", help="Show this machine as Markdown for an issue.")] = False,
    folder: Annotated[str, typer.Option("--nvme-path", help="The folder whose disk is measured.")] = ".",
    why: flags.Why = False,
    quiet: flags.Quiet = False,
    as_json: flags.Json = False,
) -> None:
    """Say what went wrong in a run by its LOG; or show this machine.

    With MODEL, the log's run is held against its plan. With --calibrate, the rates of this machine are measured, which
    recommend then uses.
    """
    if log is not None:
        if calibrate or output is not None or report:
            flag = "--report" if report else "--calibrate"
            raise BadInput("a log is read, and nothing measured", where=flag, remedy="leave LOG out, or this")
        _of_log(log, request, as_json=as_json, quiet=quiet, why=why)
    elif request.values:
        raise BadInput(
            "there is no log to hold the plan against", where="LOG", remedy="give the file, or use zeroplan estimate"
        )
    else:
        _of_machine(calibrate=calibrate, output=output, folder=folder, as_json=as_json, quiet=quiet, report=report)


def _of_log(path: str, request: Ask, *, as_json: bool, quiet: bool, why: bool) -> None:
    from zeroplan.logs.snapshot import is_snapshot
    from zeroplan.report.terminal import Terminal

    terminal = Terminal.here(why=why)
    planned_of = request.model is not None or request.params is not None or bool(request.files)
    if not planned_of:
        _without_a_plan(request)
    if is_snapshot(path):
        if planned_of:
            raise BadInput("a memory snapshot is held against no plan", where=path, remedy="leave MODEL and --from out")
        from zeroplan.logs.snapshot import read_snapshot
        from zeroplan.report.diagnosis import snapshot_json, snapshot_text

        snapshot = read_snapshot(path)
        text = snapshot_text(snapshot, terminal)
        if as_json:
            show_json(snapshot_json(snapshot))
        else:
            show(text.partition("\n\n")[0] if quiet else text)
        return
    from zeroplan.logs.diagnose import diagnose
    from zeroplan.logs.reader import read_log
    from zeroplan.report.diagnosis import diagnosis_json, diagnosis_text

    found = diagnose(read_log(path), stage=request.stage)
    if quiet and not as_json:
        show("\n".join(terminal.verdict(found.verdict, not found.failed)))
        return
    planned, following = None, list[str]()
    if request.files and (captured := _captured(request, found)) is not None:
        planned, following = captured, ["zeroplan", "recommend", "--from", str(request.files[0])] if found.failed else []
    elif planned_of:
        from zeroplan.planner.failed_run import plan_of_log

        card, allowed, tried = (found.sizes.get(name) for name in ("total", "allowed", "tried"))
        planned = plan_of_log(request, found.stated, card=card, allowed=allowed, tried=tried, phase=found.phase)
        following = flags.recommend_words(planned.request) if found.failed else []
    elif found.about_gpu_memory:
        following = ["zeroplan", "doctor", path, "MODEL"]
    if as_json:
        show_json(diagnosis_json(found, planned))
    else:
        show(diagnosis_text(found, planned, following, terminal))


def _without_a_plan(request: Ask) -> None:
    """Refuse options of a plan where none is made; of a log alone the stage is read, for what to try next."""
    from zeroplan.planner.resolve import require_stage

    if request.stage is not None:
        require_stage(request.stage)
    if others := [name for name in request.values if name != "stage"]:
        what = "is of a run that is planned, and no model is named to plan it"
        raise BadInput(what, where=f"--{others[0].replace('_', '-')}", remedy="name the model after LOG, or leave this out")


def _captured(request: Ask, found: Diagnosis) -> FailedRunPlan | None:
    """Return the plan of the kept capture that the request is of, on the card of the log; None for another request."""
    from zeroplan.capturing.kept import kept_capture, kept_run
    from zeroplan.planner.failed_run import FailedRunPlan, card_of_log

    if kept_capture(request.files) is None:
        return None
    taken: list[str] = []
    request = request.replace(**card_of_log(request, found.sizes.get("total"), found.sizes.get("allowed"), taken))
    run = kept_run(request)
    assert run is not None
    report, stated, differs = run.report, found.stated, list[str]()
    ranks = report.cluster["ranks"]
    if stated.world_size not in (None, ranks):
        differs.append(f"{stated.world_size} ranks, where {ranks} were captured")
    if stated.trainable is not None and stated.trainable not in (report.model.trainable, report.model.params):
        differs.append(f"{stated.trainable:,} trainable parameters, where the captured model has {report.model.trainable:,}")
    return FailedRunPlan(request, report, tuple(taken), tuple(differs), None)


def _of_machine(*, calibrate: bool, output: str | None, folder: str, as_json: bool, quiet: bool, report: bool) -> None:
    if output is not None and not calibrate:
        raise BadInput("nothing is measured that could be kept", where="--output", remedy="give --calibrate as well")
    if output is not None and os.path.isdir(os.path.dirname(output) or "."):  # else the folder is made
        flags.writable(output)
    if not os.path.isdir(folder):
        raise BadInput(f"{folder} is no folder", where="--nvme-path", remedy="give a folder on the disk to measure")
    from zeroplan.report.machine import MachineReport, issue_text, machine_json, machine_text
    from zeroplan.report.terminal import Terminal
    from zeroplan.search.calibrate import Calibration, earlier_rates, store
    from zeroplan.search.calibrate import calibrate as measure
    from zeroplan.search.calibrate_network import NOTE, measure_network, spans_nodes
    from zeroplan.search.machine import look

    machine = look(folder)
    kernels, problem = _kernels()
    if calibrate and spans_nodes():
        rank, between = measure_network()
        if rank:
            return
        earlier = earlier_rates(output)
        rates = Calibration(earlier | between, note=NOTE)
        kept = store(rates, machine, output)
        found = MachineReport(machine, kernels, problem, rates.rates, kept, rates.ranks, rates.together, rates.note)
    elif calibrate:
        rates = measure(machine, folder, _silent if quiet else _say)
        kept = store(rates, machine, output)
        found = MachineReport(machine, kernels, problem, rates.rates, kept, rates.ranks, rates.together, rates.note)
    else:
        found = MachineReport(machine, kernels, problem)
    if report:
        from zeroplan import __version__

        show(issue_text(found, __version__, os.environ, os.path.expanduser("~")))
    else:
        if as_json:
            show_json(machine_json(found))
        else:
            show(machine_text(found, Terminal.here(), quiet=quiet))


def _say(text: str) -> None:
    if watched():
        working(f"measuring {text}")
    else:
        print(f"measuring {text} …", file=sys.stderr)


def _silent(_: str) -> None:
    """Say nothing."""


def _kernels() -> tuple[tuple[dict[str, Any], ...], str]:
    """Return the runtime's kernels, one row for each device, or no row and the reason."""
    try:
        from zeroplan_runtime.kernels import backend_report
    except ImportError as error:
        return (), f"the runtime needs torch ({error})"
    return tuple(backend_report()), ""
