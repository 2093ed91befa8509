"""The answer of ``doctor`` as text and JSON: the machine, the kernels in use and why, and its measured rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zeroplan.core.units import format_bytes
from zeroplan.search.machine import Machine


@dataclass(frozen=True, slots=True)
class MachineReport:
    """The answer of ``doctor``.

    `kernels` has a row for each device: ``device``, ``backend``, ``reason``; it is empty where `kernels_problem` says why.
    `rates` are the measured rates by name, in the units of their names, kept in the file `profile`; None if not measured.
    """

    machine: Machine
    kernels: tuple[Mapping[str, Any], ...]
    kernels_problem: str = ""
    rates: Mapping[str, float] | None = None
    profile: str = ""


def machine_json(found: MachineReport) -> dict[str, Any]:
    """Return one object that JSON can hold; ``memory`` and ``disk_free`` are bytes."""
    machine = found.machine
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
        "kernels": list(found.kernels),
        "kernels_problem": found.kernels_problem or None,
    }
    return answer if found.rates is None else {**answer, "rates": dict(found.rates), "profile": found.profile}


def machine_text(found: MachineReport) -> str:
    """Return one line for each fact."""
    machine = found.machine
    lines = [
        f"{machine.system}, Python {machine.python}, {machine.cores} cores, {format_bytes(machine.memory)} of memory, "
        f"{format_bytes(machine.disk_free)} free on disk",
        "packages: " + ", ".join(f"{name} {version}" for name, version in machine.packages.items()),
    ]
    for card in machine.cards:
        preset = f"rates of preset {card.preset}" if card.preset else "no preset: name one by --gpu"
        lines.append(f"GPU: {card.name}, {format_bytes(card.memory)} ({preset})")
    if not machine.cards:
        lines.append(f"no GPU: {machine.problem or 'the driver reports none'}")
    lines += [f"kernels on {row['device']}: {row['backend']} ({row['reason']})" for row in found.kernels]
    if found.kernels_problem:
        lines.append(f"kernels: {found.kernels_problem}")
    if found.rates is not None:
        lines += ["", *(f"{name:18} {value:12,.2f}" for name, value in found.rates.items())]
        lines.append(f"kept in {found.profile}; recommend uses it for this GPU")
    return "\n".join(lines)
