"""What verbs answer of a captured script, which ``--from capture.json`` names: no verb of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from zeroplan.capturing.kept import config_of, kept_capture, kept_run, recorded, refuse_captured, refuse_chosen
from zeroplan.cli.main import show, show_json
from zeroplan.core.errors import EXIT_BAD_INPUT, EXIT_DOES_NOT_FIT, EXIT_OK, BadInput
from zeroplan.report.terminal import Terminal
from zeroplan.report.words import gpus_text
from zeroplan.run.ask import Ask

if TYPE_CHECKING:
    from zeroplan.capturing.answer import CapturedRun


def show_captured(run: CapturedRun, *, as_json: bool, quiet: bool) -> None:
    """Print the answer of ``capture`` and ``estimate``."""
    if as_json:
        show_json(run.report.to_json())
        return
    from zeroplan.report.captured import captured_text

    show(captured_text(run.report, Terminal.here(), quiet=quiet))


def estimated(request: Ask, *, check: bool, quiet: bool, as_json: bool) -> bool:
    """Answer ``estimate``; return whether the request is of a kept capture, as all of these functions do."""
    run = kept_run(request)
    if run is None:
        return False
    show_captured(run, as_json=as_json, quiet=quiet)
    if check and not any(plan.fits for plan in run.report.plans):
        raise typer.Exit(EXIT_DOES_NOT_FIT)
    return True


def explained(request: Ask, line: str | None, *, time: bool, quiet: bool, as_json: bool) -> bool:
    """Answer ``explain``."""
    if time and kept_capture(request.files) is not None:
        what = "a recording has allocations, and no times"
        raise BadInput(what, where="--time", remedy="name the model for its plan's step time")
    run = kept_run(request)
    if run is None:
        return False
    from zeroplan.report.captured import peak_lines_text, peak_rows

    if as_json:
        plan = run.report.plans[0]
        figures = {"phase": plan.gpu.peak_phase, "peak_allocated": plan.gpu.peak_allocated}
        held = {"plan": "the script as it runs", **figures, "lines": peak_rows(run, line)}
        show_json({"schema": 1, "plans": [held]})
    else:
        show(peak_lines_text(run, Terminal.here(), buffer=line, quiet=quiet))
    return True


def checked(request: Ask, files: list[str], *, quiet: bool, as_json: bool) -> bool:
    """Answer ``check``, with 2 where the script could not be run to its end."""
    run = kept_run(request.replace(files=tuple(files)))
    if run is None:
        return False
    if as_json:
        show_json(run.report.to_json())
    else:
        from zeroplan.report.captured import captured_text

        show(captured_text(run.report, Terminal.here(), quiet=quiet, phases=False))
    info = run.report.plans[0].capture
    raise typer.Exit(EXIT_OK if info is not None and info.stopped is None else EXIT_BAD_INPUT)


def recommended(request: Ask, source: list[str] | None, given: dict[str, Any], *, quiet: bool, as_json: bool) -> bool:
    """Answer ``recommend``: the cards on which the script runs.

    Args:
        request: the machine.
        source: the files of ``--from``.
        given: options of the search, by their flags, none of which a recording can vary.
        quiet: the verdict alone.
    """
    held = kept_capture(source or ())
    if held is None:
        return False
    for flag, value in given.items():
        if value:
            what = "cannot be searched in a captured run, whose tensors are the script's own"
            raise BadInput(what, where=flag, remedy="leave it out: the cards on which it runs are what recommend finds")
    from zeroplan.capturing.cards import fitting_cards
    from zeroplan.report.captured import cards_json, cards_text

    request = request.replace(files=tuple(source or ()))
    kept_run(request)  # refuses what cannot be varied
    captured, cluster = recorded(held, request, str(request.files[0]))
    found = fitting_cards(captured, cluster, config_of(captured, request, str(request.files[0])))
    if as_json:
        show_json(cards_json(found))
    else:
        show(cards_text(found, Terminal.here(), quiet=quiet))
    plan = found.run.report.plans[0]
    if found.first is None or (plan.gpu.usable is not None and not plan.fits):
        raise typer.Exit(EXIT_DOES_NOT_FIT)
    return True


def scaled(
    request: Ask, source: str, shapes: list[tuple[int, int]], given: dict[str, Any], *, quiet: bool, as_json: bool
) -> None:
    """Answer ``scale --from``: the memory of a run that calls an engine, among other numbers of processes.

    Args:
        request: the machine.
        source: the file.
        shapes: GPUs a node, and nodes, of each row.
        given: options of the search and of whole trainings, by their flags, for which a recording has no times.
        quiet: the table alone.
    """
    held = kept_capture([source])
    if held is None:
        raise BadInput("is no captured run", where=source, remedy="name the model; recommend --from takes a program's files")
    for flag, value in given.items():
        if value:
            raise BadInput("has no answer for a captured run, which has no times", where=flag, remedy="leave it out")
    refuse_chosen(request, source)
    captured, cluster = recorded(held, request, source)
    if not captured.engine:
        what = f"was captured on {gpus_text(cluster.nodes, cluster.gpus)} without an engine, and tells of no other number"
        remedy = "capture the command with the other number, as by torchrun --nproc_per_node N, or name the model"
        raise BadInput(what, where=source, remedy=remedy)
    from zeroplan.capturing.engines.planned import at_ranks
    from zeroplan.report.captured import ranks_json, ranks_text

    conf = str(request.alloc_conf or captured.machine.get("alloc_conf") or "")
    rows = list(zip(shapes, at_ranks(captured, cluster, shapes, conf), strict=True))
    if as_json:
        show_json(ranks_json(captured.command, rows))
    else:
        show(ranks_text(captured.command, rows, Terminal.here(), quiet=quiet))
    if not any(plan.fits for _, plan in rows):
        raise typer.Exit(EXIT_DOES_NOT_FIT)


def refuse_to_run(source: str) -> None:
    """Refuse ``tune --from``."""
    refuse_captured([source])
    raise BadInput("is no captured run", where=source, remedy="name the model; recommend --from takes a program's files")
