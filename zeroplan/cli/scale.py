"""``zeroplan scale``: one model on more and more GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from zeroplan.cli import flags
from zeroplan.cli.main import made_by, show, show_json, verb
from zeroplan.core.errors import EXIT_DOES_NOT_FIT, BadInput
from zeroplan.run.ask import Ask

if TYPE_CHECKING:
    from zeroplan.search.scaling import Scaling

_CLUSTER = "Cluster"
Ranks = Annotated[
    str, typer.Option("--gpus", rich_help_panel=_CLUSTER, metavar="RANGE", help="All GPUs: 8..1024 doubles from 8 on; or 8,24.")
]
PerNode = Annotated[
    int | None, typer.Option("--gpus-per-node", rich_help_panel=_CLUSTER, help="GPUs of a node. [8, or 4 by --gpu 4xA100]")
]
GlobalBatch = Annotated[
    int | None, typer.Option("--global-batch", rich_help_panel="Workload", help="Sequences a step, of all GPUs. [open]")
]
Profile = Annotated[str | None, typer.Option("--profile", help="Rates by doctor --calibrate.")]
From = Annotated[str | None, typer.Option("--from", hidden=True, help="A captured run that calls an engine: its memory.")]
Html = Annotated[
    str | None, typer.Option("--html", callback=flags.writable, help="Write a page with the pictures.", metavar="FILE")
]
Svg = Annotated[str | None, typer.Option("--svg", callback=flags.writable, help="Write the pictures alone.", metavar="FILE")]


@verb("zeroplan scale meta-llama/Llama-3.1-8B --gpu H100", "zeroplan scale gpt2-xl --gpus 1..64 --gpu V100-32G --stage 3")
@flags.takes_run("scale")
def scale(
    request: Ask,
    gpus: Ranks = "8..1024",
    gpus_per_node: PerNode = None,
    compile: flags.SearchedCompile = None,
    global_batch: GlobalBatch = None,
    profile: Profile = None,
    tokens: flags.Tokens = None,
    price: flags.Price = None,
    source: From = None,
    style: flags.Style = "plain",
    why: flags.Why = False,
    wide: flags.Wide = False,
    quiet: flags.Quiet = False,
    as_json: flags.Json = False,
    html: Html = None,
    svg: Svg = None,
) -> None:
    """Show memory, micro batch and speed of a GPU among ever more.

    Each row is what recommend finds there. Where states shrink and a larger micro batch fits, the speed-up is superlinear.
    """
    if source is not None:
        from zeroplan.cli.captured import scaled
        from zeroplan.core.gpus import NODE_GPUS
        from zeroplan.search.scaling import parse_ranks, shapes_of

        given = {"--global-batch": global_batch, "--compile": compile, "--profile": profile, "--tokens": tokens,
                 "--price": price, "--html": html, "--svg": svg}  # fmt: skip
        scaled(request, source, shapes_of(parse_ranks(gpus), gpus_per_node or NODE_GPUS), given, quiet=quiet, as_json=as_json)
        return
    from zeroplan.core.plumbing.files import write_atomic
    from zeroplan.report.scaling import scaling_text
    from zeroplan.report.terminal import Terminal
    from zeroplan.search.scaling import parse_ranks, run_scaling
    from zeroplan.search.search_options import SearchOptions
    from zeroplan.search.whole_training import budget_of

    if request.model is None and request.params is None:
        raise BadInput("no model", where="MODEL", remedy="give one id, path or config, or --params 7B")
    again, request = flags.searched_checkpointing(request)
    request = request.replace(compile=compile)
    options = SearchOptions(global_batch=global_batch, gradient_checkpointing=again, profile=profile)
    budget = budget_of(tokens, price, request.gpu)
    found = replace(run_scaling(request, parse_ranks(gpus), options, gpus_per_node=gpus_per_node), budget=budget)
    if html is not None or svg is not None:
        from zeroplan.report.scaling_html import scaling_page, scaling_svg

        if html is not None:
            write_atomic(html, scaling_page(found, made=made_by()))
        if svg is not None:
            write_atomic(svg, scaling_svg(found))
    if as_json:
        show_json(found.to_dict())
    else:
        words = _words_of_the_peak(found, request, global_batch)
        show(scaling_text(found, style, terminal=Terminal.here(wide=wide, why=why), quiet=quiet, next_command=words))
    first = found.first
    if first is None or (first.best is not None and first.best.plan.undecided):
        raise typer.Exit(EXIT_DOES_NOT_FIT)


def _words_of_the_peak(found: Scaling, request: Ask, global_batch: int | None) -> list[str]:
    """The ``recommend`` command for the number of GPUs at which one is fastest."""
    if found.peak is None:
        return []
    cluster = found.peak.cluster
    name = None if request.gpu is None else cluster.gpu.name  # without the count that it may hold
    words = flags.recommend_words(
        request.replace(gpu=name, gpus=cluster.gpus, nodes=cluster.nodes, micro_batch=None, grad_accum=None)
    )
    for field in ("stage", "offload_optimizer", "offload_param", "micro_batch", "grad_accum"):
        if (value := request.value(field)) is not None:
            words += [f"--{field.replace('_', '-')}", str(value)]
    return words if global_batch is None else [*words, "--global-batch", str(global_batch)]
