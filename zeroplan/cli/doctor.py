"""``zeroplan doctor``: what this machine is, what is in use on it and why, and, on request, how fast it is."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated, Any

import typer

from zeroplan.cli import flags
from zeroplan.cli.main import app
from zeroplan.core.errors import BadInput
from zeroplan.core.units import format_bytes


@app.command()
def doctor(
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Measure this machine's rates and keep them.")] = False,
    output: Annotated[str | None, typer.Option("-o", "--output", help="Where to keep them. [the user's config folder]")] = None,
    folder: Annotated[str, typer.Option("--nvme-path", help="The folder whose disk is measured.")] = ".",
    as_json: flags.Json = False,
) -> None:
    """Say what this machine has, which kernels are in use and why; measure it with --calibrate."""
    if output is not None and not calibrate:
        raise BadInput("nothing is measured that could be kept", where="--output", remedy="give --calibrate as well")
    if not os.path.isdir(folder):
        raise BadInput(f"{folder} is no folder", where="--nvme-path", remedy="give a folder on the disk to measure")
    from zeroplan.search.calibrate import calibrate as measure
    from zeroplan.search.calibrate import store
    from zeroplan.search.machine import look

    machine = look(folder)
    kernels, problem = _kernels()
    answer: dict[str, Any] = {
        "schema": 1,
        "system": machine.system,
        "python": machine.python,
        "cores": machine.cores,
        "memory": machine.memory,
        "disk_free": machine.disk_free,
        "gpus": [{"name": c.name, "memory": c.memory, "preset": c.preset or None} for c in machine.cards],
        "gpu_problem": machine.problem or None,
        "packages": machine.packages,
        "kernels": kernels,
        "kernels_problem": problem or None,
    }
    if calibrate:
        rates = measure(machine, folder, lambda text: print(f"measuring {text} …", file=sys.stderr))
        answer["rates"], answer["profile"] = rates, store(rates, machine, output)
    typer.echo(json.dumps(answer, indent=2) if as_json else _text(answer))


def _kernels() -> tuple[list[dict[str, Any]], str]:
    """The runtime's kernels by device, or why there are none."""
    try:
        from zeroplan_runtime.kernels import backend_report
    except ImportError as error:
        return [], f"the runtime needs torch ({error})"
    return backend_report(), ""


def _text(answer: dict[str, Any]) -> str:
    lines = [
        f"{answer['system']}, Python {answer['python']}, {answer['cores']} cores, {format_bytes(answer['memory'])} of memory, "
        f"{format_bytes(answer['disk_free'])} free on disk",
        "packages: " + ", ".join(f"{name} {version}" for name, version in answer["packages"].items()),
    ]
    for card in answer["gpus"]:
        preset = f"rates of preset {card['preset']}" if card["preset"] else "no preset: name one by --gpu"
        lines.append(f"GPU: {card['name']}, {format_bytes(card['memory'])} ({preset})")
    if not answer["gpus"]:
        lines.append(f"no GPU: {answer['gpu_problem'] or 'the driver reports none'}")
    lines += [f"kernels on {row['device']}: {row['backend']} ({row['reason']})" for row in answer["kernels"]]
    if answer["kernels_problem"]:
        lines.append(f"kernels: {answer['kernels_problem']}")
    if "rates" in answer:
        lines += ["", *(f"{name:18} {value:12,.2f}" for name, value in answer["rates"].items())]
        lines.append(f"kept in {answer['profile']}; recommend uses it for this GPU")
    return "\n".join(lines)
