"""The answer of ``doctor`` as text and JSON: the machine, the kernels in use and why, and its measured rates."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zeroplan.core.sizes import format_bytes
from zeroplan.core.zero_config import DEEPSPEED_VERSION
from zeroplan.report.terminal import PLAIN, Terminal
from zeroplan.report.words import gpus_text
from zeroplan.search.machine import Machine


@dataclass(frozen=True, slots=True)
class MachineReport:
    """The answer of ``doctor``.

    `kernels` has a row for each device: ``device``, ``backend``, ``reason``; it is empty where `kernels_problem` says why.
    `rates` are the measured rates by name, in the units of their names, kept in the file `profile`; None if not measured.
    `together` are the host's with `ranks` processes at once; where there are none, `note` says why.
    """

    machine: Machine
    kernels: tuple[Mapping[str, Any], ...]
    kernels_problem: str = ""
    rates: Mapping[str, float] | None = None
    profile: str = ""
    ranks: int = 1
    together: Mapping[str, float] = field(default_factory=dict)
    note: str = ""


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
    if found.rates is None:
        return answer
    together = {"ranks": found.ranks, "rates": dict(found.together)} if found.together else None
    return {**answer, "rates": dict(found.rates), "together": together, "profile": found.profile}


def machine_text(found: MachineReport, terminal: Terminal = PLAIN, *, quiet: bool = False) -> str:
    """Return what the machine is in a sentence, and one line for each fact."""
    machine = found.machine
    lines = terminal.verdict(_verdict(machine), None)
    if quiet:
        return "\n".join(lines)
    facts = [
        f"{machine.system}, Python {machine.python}, {format_bytes(machine.disk_free)} free on disk",
        "packages: " + ", ".join(f"{name} {version}" for name, version in machine.packages.items()),
    ]
    for card in machine.cards:
        preset = f"rates of preset {card.preset}" if card.preset else "no preset: name one by --gpu"
        facts.append(f"GPU: {card.name}, {format_bytes(card.memory)} ({preset})")
    facts += [f"kernels on {row['device']}: {row['backend']} ({row['reason']})" for row in found.kernels]
    if found.kernels_problem:
        facts.append(f"kernels: {found.kernels_problem}")
    lines += ["", *terminal.items(facts)]
    if found.rates is not None:
        heads = f"{'':<20}{'one process':>14}" + (f"{f'{found.ranks} at once':>14}" if found.together else "")
        lines += ["", terminal.bold(heads)]
        for name, value in found.rates.items():
            also = f"{found.together[name]:>14,.2f}" if name in found.together else ""
            lines.append(f"{name:<20}{value:>14,.2f}{also}")
        lines += terminal.wrap(found.note) if found.note else []
        lines += terminal.wrap(f"Kept in {found.profile}; recommend uses it for this GPU.")
    return "\n".join(lines)


def _verdict(machine: Machine) -> str:
    """Return ``"4 GPUs: NVIDIA H200, 139.8 GiB each; 64 cores and 512 GiB of memory."``, or why there is no GPU."""
    host = f"{machine.cores} cores and {format_bytes(machine.memory, digits=1)} of memory"
    if not machine.cards:
        return f"No GPU: {machine.problem or 'the driver reports none'}; {host}."
    first = machine.cards[0]
    names = ", ".join(dict.fromkeys(card.name for card in machine.cards))
    return f"{gpus_text(1, len(machine.cards))}: {names}, {format_bytes(first.memory, digits=1)} each; {host}."


def version_text(version: str, packages: Mapping[str, str], routines: str) -> str:
    """Return what ``zeroplan --version`` prints: the version, those it stands on, and the kernels.

    Args:
        packages: versions of the installed packages by name.
        routines: the instruction set of the compiled routines; empty without them.
    """
    others = {"Python": sys.version.split()[0], **packages}
    others.pop("zeroplan", None)
    host = f"compiled, {routines}" if routines else "Python and torch (no compiled library)"
    gpu = "compiled at run time" if "cuda-core" in packages else "torch (zeroplan[cuda] is not installed)"
    return "\n".join(
        [
            f"zeroplan {version}",
            f"plans for DeepSpeed {DEEPSPEED_VERSION}, transformers 5 and torch 2",
            "with " + ", ".join(f"{name} {version}" for name, version in others.items()),
            f"CPU kernels: {host}; CUDA kernels: {gpu}",
        ]
    )


#: Variables that change what a run allocates; no other variable is shown, so that no secret is.
SHOWN_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")


def issue_text(found: MachineReport, version: str, environment: Mapping[str, str], home: str) -> str:
    """Return the machine as Markdown for an issue: no user's name, no token, no path under `home`."""
    shown = [f"{name}={environment[name]}" for name in SHOWN_VARIABLES if name in environment]
    text = "\n".join([f"zeroplan {version}", machine_text(found), *shown])
    return f"```text\n{text.replace(home, '~') if len(home) > 1 else text}\n```"
