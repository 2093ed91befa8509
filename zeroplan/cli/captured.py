"""What verbs answer of a captured script, which ``--from capture.json`` names: no verb of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from zeroplan.capturing.kept import kept_capture, kept_run, recorded, refuse_captured
from zeroplan.cli.main import show, show_json
from zeroplan.core.errors import EXIT_BAD_INPUT, EXIT_DOES_NOT_FIT, EXIT_OK, BadInput
from zeroplan.report.terminal import Terminal
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
    from zeroplan.simulate.allocator.config import AllocatorConfig

    request = request.replace(files=tuple(source or ()))
    kept_run(request)  # refuses what cannot be varied
    captured, cluster = recorded(held, request, str(request.files[0]))
    conf = request.alloc_conf or captured.machine.get("alloc_conf", "")
    found = fitting_cards(captured, cluster, AllocatorConfig.parse(conf) if conf else None)
    if as_json:
        show_json(cards_json(found))
    else:
        show(cards_text(found, Terminal.here(), quiet=quiet))
    plan = found.run.report.plans[0]
    if found.first is None or (plan.gpu.usable is not None and not plan.fits):
        raise typer.Exit(EXIT_DOES_NOT_FIT)
    return True


def refuse_to_scale(source: str) -> None:
    """Refuse ``scale --from``: a recording holds for the number of ranks that it was made with."""
    held = kept_capture([source])
    if held is None:
        raise BadInput("is no captured run", where=source, remedy="name the model; recommend --from takes a program's files")
    _, cluster = recorded(held, Ask(), source)
    what = (
        f"was captured as one of {cluster.gpus * cluster.nodes} processes, and its allocations tell nothing of another number"
    )
    remedy = "capture the command with the other number, as by torchrun --nproc_per_node N, or name the model"
    raise BadInput(what, where=source, remedy=remedy)


def refuse_to_run(source: str) -> None:
    """Refuse ``tune --from``."""
    refuse_captured([source])
    raise BadInput("is no captured run", where=source, remedy="name the model; recommend --from takes a program's files")
