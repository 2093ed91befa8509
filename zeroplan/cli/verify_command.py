"""``zeroplan verify -- COMMAND``: a person's own command on a real GPU, beside what capture plans of it."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from zeroplan.cli.main import show, show_json
from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import EXIT_OUT_OF_TOLERANCE, BadInput
from zeroplan.run.ask import Ask


def verify_command(
    words: Sequence[str],
    request: Ask,
    *,
    tolerance: float,
    steps: int,
    seconds: float,
    vram: str | None,
    gpus: int | None,
    engine: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Capture a command, run it on this machine's GPU, and print plan beside measurement.

    Args:
        words: the command.
        request: options of a model's run, none of which a command takes.
        tolerance: how far allocated memory may be off.
        steps: optimizer steps.
        seconds: the longest that the script may take.
        vram: a smaller card, whose room the command is left.
        gpus: processes of the command's node, where no launcher says it.
        engine: has to be left out.
        as_json: JSON.
        quiet: the verdict alone.

    Raises:
        BadInput: a machine without a GPU, an option that only a model's run has, or a command that starts no Python program.
    """
    from zeroplan.validate.machine import find_machine

    named = [name for name in request.values if name not in ("offline", "token")] + (["engine"] if engine is not None else [])
    if named:
        flag = f"--{named[0].replace('_', '-')}"
        raise BadInput("is of a model's run, and a command decides it itself", where=flag, remedy="leave it out")
    machine = find_machine()
    if machine.device != "cuda":
        raise BadInput(
            "there is no GPU here to run a command on", where="verify", remedy="zeroplan capture -- plans it without"
        )
    from zeroplan.capturing.answer import answer
    from zeroplan.capturing.measuring import ScriptDrift, measure_command
    from zeroplan.capturing.run import capture_command
    from zeroplan.core.sizes import parse_size
    from zeroplan.planner.estimate import allocator_config
    from zeroplan.report.script_drift import script_drift_text
    from zeroplan.report.terminal import Terminal
    from zeroplan.validate.rank.probe import Nvml

    cluster = machine.cluster(gpus or 1)
    if vram is not None:
        cluster = _smaller(cluster, parse_size(vram, where="--vram"))
    captured, cluster = capture_command(words, cluster, explicit_gpus=gpus is not None, steps=steps, seconds=seconds)
    run = answer(captured, cluster, allocator_config(captured.machine["alloc_conf"]))
    plan = run.report.plans[0]
    limit = 0 if vram is None else max(0, (cluster.usable_vram or 0) - (plan.gpu.outside_torch or 0))
    measured = measure_command(words, Nvml(0).used, steps=steps, seconds=seconds, limit=limit)
    drift = ScriptDrift(run.report, measured, tolerance)
    if as_json:
        show_json(drift.to_dict())
    else:
        show(script_drift_text(drift, Terminal.here(), quiet=quiet))
    if not drift.within:
        raise typer.Exit(EXIT_OUT_OF_TOLERANCE)


def _smaller(cluster: Cluster, memory: int) -> Cluster:
    """Return the machine with less memory on each card. Raises BadInput: more than the card has."""
    from dataclasses import replace

    if cluster.vram is not None and memory > cluster.vram:
        raise BadInput("is more than this card has", where="--vram", remedy=f"give at most {cluster.vram / 2**30:.1f}G")
    return replace(cluster, vram=memory)
