"""``zeroplan capture -- COMMAND``: a person's own training command, run without a GPU."""

from __future__ import annotations

from typing import Annotated

import typer

from zeroplan.cli import flags
from zeroplan.cli.main import verb
from zeroplan.core.errors import EXIT_DOES_NOT_FIT, BadInput

_MACHINE = "Cluster"
Gpus = Annotated[int | None, typer.Option("--gpus", metavar="N", rich_help_panel=_MACHINE, help="GPUs in a node.")]
Nodes = Annotated[int | None, typer.Option("--nodes", metavar="M", rich_help_panel=_MACHINE, help="Nodes.")]
Gpu = Annotated[str | None, typer.Option("--gpu", metavar="NAME", rich_help_panel=_MACHINE, help="H100, A100-80G, RTX4090, ….")]
Vram = Annotated[str | None, typer.Option("--vram", metavar="SIZE", rich_help_panel=_MACHINE, help="A card's memory, as 24G.")]
CpuRam = Annotated[str | None, typer.Option("--cpu-ram", metavar="SIZE", rich_help_panel=_MACHINE, help="A node's memory.")]
Rank = Annotated[int, typer.Option("--rank", metavar="K", rich_help_panel=_MACHINE, help="The rank that is captured.")]
Steps = Annotated[int, typer.Option("--steps", min=1, max=1000, metavar="N", help="Optimizer steps to go through.")]
Samples = Annotated[
    str | None, typer.Option("--samples", metavar="N,LENGTH", help="Invent data and tokenizers that are missing: rows, tokens.")
]
Seconds = Annotated[float, typer.Option("--seconds", min=1, metavar="S", help="The longest that the script may take.")]
Output = Annotated[
    str | None,
    typer.Option("-o", "--output", metavar="FILE", callback=flags.writable, help="Keep the answer, which --from takes."),
]
AllocConf = Annotated[str, typer.Option("--alloc-conf", metavar="SETTINGS", help="Settings of the caching allocator.")]
Check = Annotated[bool, typer.Option("--check", help="Exit with 1 unless it fits.")]
Command = Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND", help="The training command, as it is typed.")]


@verb(
    "zeroplan capture --gpu H100 -- python train.py --batch_size 8",
    "zeroplan capture --gpu A100-80G -- torchrun --nproc_per_node 8 train.py",
)
def capture(
    command: Command = None,
    gpus: Gpus = None,
    nodes: Nodes = None,
    gpu: Gpu = None,
    vram: Vram = None,
    cpu_ram: CpuRam = None,
    rank: Rank = 0,
    steps: Steps = 3,
    samples: Samples = None,
    seconds: Seconds = 600.0,
    alloc_conf: AllocConf = "",
    output: Output = None,
    check: Check = False,
    quiet: flags.Quiet = False,
    as_json: flags.Json = False,
) -> None:
    """Run your own COMMAND without a GPU; predict its memory.

    This runs your code, on this machine's CPU and without weights. Files that it writes go to a temporary folder, and nothing
    goes over the network. No other verb runs your code.
    """
    from zeroplan.capturing.answer import answer
    from zeroplan.capturing.run import capture_command
    from zeroplan.core.cluster import Cluster
    from zeroplan.planner.estimate import allocator_config

    if not command:
        raise BadInput(
            "no command to run", where="capture", remedy="give it behind --, as in: zeroplan capture -- python train.py"
        )
    cluster = Cluster.of(gpus=gpus or 1, nodes=nodes or 1, gpu=gpu, vram=vram, cpu_ram=cpu_ram)
    captured, cluster = capture_command(
        command, cluster, explicit_gpus=gpus is not None, steps=steps, rank=rank, seconds=seconds, samples=_samples(samples)
    )
    run = answer(captured, cluster, allocator_config(alloc_conf or captured.machine["alloc_conf"]))
    if output is not None:
        from zeroplan.capturing.kept import keep

        keep(run, captured, output)
    from zeroplan.cli.captured import show_captured

    show_captured(run, as_json=as_json, quiet=quiet)
    if check and not any(plan.fits for plan in run.report.plans):
        raise typer.Exit(EXIT_DOES_NOT_FIT)


def _samples(text: str | None) -> tuple[int, int] | None:
    """Return rows and their length.

    Raises:
        BadInput: no two numbers of at least 1.
    """
    if text is None:
        return None
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise BadInput(f"{text[:40]!r} is not N,LENGTH", where="--samples", remedy="give rows and tokens, as 64,512")
    return int(parts[0]), int(parts[1])
