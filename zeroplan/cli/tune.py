"""``zeroplan tune``: the fastest configuration on this machine, by running the few that are predicted to be fast."""

from __future__ import annotations

from typing import Annotated

import typer

from zeroplan.cli import flags
from zeroplan.cli.main import show, show_json, verb
from zeroplan.core.errors import EXIT_DOES_NOT_FIT, BadInput
from zeroplan.run.ask import Ask

_RUN = "Run"
Ranks = Annotated[int | None, typer.Option("--gpus", rich_help_panel=_RUN, help="Ranks to run. [every GPU; 2 on a CPU]")]
EngineName = Annotated[str, typer.Option("--engine", rich_help_panel="Sharding", help="As for verify. [zeroplan]")]
Runs = Annotated[int, typer.Option("--runs", rich_help_panel=_RUN, help="Configurations to run at most.")]
Steps = Annotated[int, typer.Option("--steps", rich_help_panel=_RUN, help="Optimizer steps of each.")]
Folder = Annotated[str | None, typer.Option("--folder", rich_help_panel=_RUN, help="Keep results there; go on from them.")]
Candidates = Annotated[int, typer.Option("--candidates", rich_help_panel=_RUN, help="Configurations to choose from.")]
GlobalBatch = Annotated[int | None, typer.Option("--global-batch", rich_help_panel=_RUN, help="Sequences a step.")]
From = Annotated[str | None, typer.Option("--from", hidden=True, help="A captured run, which verify -- COMMAND measures.")]
Output = Annotated[
    str | None, typer.Option("-o", "--output", callback=flags.writable, help="Write the fastest one's ds_config there.")
]


@verb("zeroplan tune meta-llama/Llama-3.2-1B --folder tuned", "zeroplan tune gpt2 --engine deepspeed -o ds_config.json")
@flags.takes_run("tune")
def tune(
    request: Ask,
    engine: EngineName = "zeroplan",
    compile: flags.SearchedCompile = None,
    gpus: Ranks = None,
    runs: Runs = 5,
    steps: Steps = 6,
    candidates: Candidates = 10,
    global_batch: GlobalBatch = None,
    folder: Folder = None,
    source: From = None,
    output: Output = None,
    quiet: flags.Quiet = False,
    as_json: flags.Json = False,
) -> None:
    """Run what is predicted to be fast, and rank by measurement.

    Weights are random. With --folder a tuning that was cut off goes on; what ran out of memory or died is left out.
    """
    if source is not None:
        from zeroplan.cli.captured import refuse_to_run

        refuse_to_run(source)
    from zeroplan.core.plumbing.files import write_atomic
    from zeroplan.ds_config.writer import dump_ds_config
    from zeroplan.engines.registry import find_engine
    from zeroplan.report.terminal import Terminal
    from zeroplan.report.tuning import tuning_text
    from zeroplan.tuning.api import tune as run

    if request.model is None:
        raise BadInput("no model", where="MODEL", remedy="give one id, path or config")
    if output is not None and find_engine(engine).dialect is None:
        raise BadInput(f"{engine} reads no ds_config", where="--output", remedy="leave it out")
    given = dict(request.values)
    model = given.pop("model")
    found = run(
        model,
        runs=runs,
        steps=steps,
        folder=folder,
        candidates=candidates,
        global_batch=global_batch,
        progress=(lambda _: None) if quiet else None,
        engine=engine,
        gpus=gpus,
        compile=compile,
        **given,
    )
    config = None if found.best is None else found.best.recommendation.ds_config()
    if output is not None and found.best is not None:
        assert config is not None
        write_atomic(output, dump_ds_config(config))
    if as_json:
        show_json(found.to_dict())
    else:
        show(tuning_text(found, Terminal.here(), quiet=quiet))
    if found.best is None:
        raise typer.Exit(EXIT_DOES_NOT_FIT)
