"""How many GPUs a command line starts: by its launcher's flags, else by the variables that the launcher asks."""

from __future__ import annotations

import re

from zeroplan.core.unmodelled import Effect
from zeroplan.interop.programs.builder import Builder
from zeroplan.interop.programs.shell import Command

#: A GPU in ``--include localhost:0,1`` of DeepSpeed's launcher.
_INCLUDED = re.compile(r"(?<=[:,])\d+")
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def take_machine(run: Builder) -> None:
    """Take the machine that a command line names; what it leaves open is listed among what is assumed."""
    command = run.document.command
    _by_ray(run)
    if command is None:
        return
    nodes = command.nodes or _nodes_of_environment(command) or 1
    gpus, key = command.gpus, command.launcher
    if gpus is None and command.processes and command.processes % nodes == 0:
        gpus = command.processes // nodes
    if command.open_machine:
        run.assume(f"GPUs open: {command.launcher} gets {command.open_machine[:40]!r}, so give --gpus and --nodes")
    elif gpus is None:
        gpus, key = _by_launcher(run, command)
    if gpus is not None:
        run.set("gpus", gpus, key)
        run.set("nodes", nodes, command.launcher)


def _by_launcher(run: Builder, command: Command) -> tuple[int | None, str]:
    """The GPUs of a launcher without a number, and what says it. Sources: DeepSpeed 0.19.8, ``launcher/runner.py``; ms-swift
    4.6, ``cli/main.py`` (torchrun where NPROC_PER_NODE is set); LLaMA-Factory 0.9.6, ``launcher.py`` (torchrun on more than one
    GPU, NPROC_PER_NODE or all of them).
    """
    visible = len([one for one in command.environment.get(_VISIBLE, "").split(",") if one.strip().isdigit()])
    processes = command.environment.get("NPROC_PER_NODE", "")
    number = int(processes) if processes.isdigit() and 0 < len(processes) < 5 else None
    if command.launcher == "deepspeed":
        included = len(_INCLUDED.findall(str(command.launch_flags.get("include", ""))))
        return _or_all(run, included or visible, "deepspeed")
    if command.launcher == "accelerate" and command.config_file is None:
        return _or_all(run, visible, "accelerate")
    if command.program.startswith("axolotl "):  # axolotl 0.18: accelerate on all GPUs, or --num-processes of them
        asked = command.flags.get("num_processes")
        return _or_all(run, asked if isinstance(asked, int) and asked > 0 else visible, "axolotl")
    if command.program.startswith("llamafactory-cli "):
        return _or_all(run, number or visible, "llamafactory-cli")
    if command.launcher:
        return None, ""
    if command.program.startswith("swift "):
        if number is None and visible > 1:
            what = f"without NPROC_PER_NODE the model is laid over the {visible} GPUs; one GPU is planned"
            run.leave_out(_VISIBLE, Effect.UNKNOWN, what)
        if number is not None and visible > number:
            what = f"each of {number} processes lays its model over {visible // number} GPUs; one holds it here"
            run.leave_out(_VISIBLE, Effect.UNKNOWN, what)
        return number, "NPROC_PER_NODE"
    if visible > 1 and run.fields.get("detached_loss"):
        run.leave_out(_VISIBLE, Effect.UNKNOWN, f"python on {visible} GPUs is torch's DataParallel; one GPU is planned")
    return None, ""


def _nodes_of_environment(command: Command) -> int | None:
    """The nodes that ``NNODES`` says, which the command lines of ms-swift and LLaMA-Factory hand to torchrun."""
    said = command.environment.get("NNODES", "")
    reads = command.program.startswith(("swift ", "megatron ", "llamafactory-cli "))
    return int(said) if reads and said.isdigit() and 0 < len(said) < 5 and int(said) else None


def _by_ray(run: Builder) -> None:
    """Ray's workers, a GPU each, where a file starts them. Source: LLaMA-Factory 0.9.6, ``hparams/training_args.py``
    (``RayArguments``); axolotl 0.18 (``RayConfig``). How many share a node is Ray's to say.
    """
    workers = run.number("ray_num_workers") if run.data.get("use_ray") is not False else None
    if workers is not None and workers > 1:
        run.assume(f"ray_num_workers {workers} on one node", gpus=workers, nodes=1)


def _or_all(run: Builder, gpus: int, launcher: str) -> tuple[int | None, str]:
    if gpus:
        return gpus, launcher
    run.assume(f"GPUs open: {launcher} takes all of the machine, so give --gpus")
    return None, ""
