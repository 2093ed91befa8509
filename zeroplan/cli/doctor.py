"""``zeroplan doctor``: what this machine is, what is in use on it and why, and, on request, how fast it is."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated, Any

import typer

from zeroplan.cli import flags
from zeroplan.cli.main import verb
from zeroplan.core.errors import BadInput


@verb("zeroplan doctor", "zeroplan doctor --calibrate --nvme-path /local_nvme")
def doctor(
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Measure this machine's rates and keep them.")] = False,
    output: Annotated[str | None, typer.Option("-o", "--output", help="Where to keep them. [the user's config folder]")] = None,
    folder: Annotated[str, typer.Option("--nvme-path", help="The folder whose disk is measured.")] = ".",
    as_json: flags.Json = False,
) -> None:
    """Show this machine, and which kernels are in use and why.

    With --calibrate, measure its rates, which recommend then uses.
    """
    if output is not None and not calibrate:
        raise BadInput("nothing is measured that could be kept", where="--output", remedy="give --calibrate as well")
    if not os.path.isdir(folder):
        raise BadInput(f"{folder} is no folder", where="--nvme-path", remedy="give a folder on the disk to measure")
    from zeroplan.report.machine import Diagnosis, machine_json, machine_text
    from zeroplan.search.calibrate import calibrate as measure
    from zeroplan.search.calibrate import store
    from zeroplan.search.machine import look

    machine = look(folder)
    kernels, problem = _kernels()
    if calibrate:
        rates = measure(machine, folder, lambda text: print(f"measuring {text} …", file=sys.stderr))
        found = Diagnosis(machine, kernels, problem, rates, store(rates, machine, output))
    else:
        found = Diagnosis(machine, kernels, problem)
    typer.echo(json.dumps(machine_json(found), indent=2) if as_json else machine_text(found))


def _kernels() -> tuple[tuple[dict[str, Any], ...], str]:
    """Return the runtime's kernels, one row for each device, or no row and the reason."""
    try:
        from zeroplan_runtime.kernels import backend_report
    except ImportError as error:
        return (), f"the runtime needs torch ({error})"
    return tuple(backend_report()), ""
