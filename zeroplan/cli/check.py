"""``zeroplan check``: what a program makes of its files, key by key; with a model also what the run will use."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zeroplan.cli import flags
from zeroplan.cli.main import show, show_json, verb
from zeroplan.core.errors import EXIT_BAD_INPUT, EXIT_OK, BadInput
from zeroplan.core.plumbing.files import is_capture
from zeroplan.core.zero_config import DEEPSPEED_VERSION
from zeroplan.engines.registry import DEFAULT_ENGINE, find_engine
from zeroplan.run.ask import Ask

if TYPE_CHECKING:
    from zeroplan.core.plan import Report
    from zeroplan.ds_config.dialect import Dialect
    from zeroplan.ds_config.reader import DsConfig
    from zeroplan.interop.setups import Setup
Program = Annotated[str | None, typer.Option("--program", help="The program that owns the file, where two could.")]


@verb(
    "zeroplan check ds_config.json --gpus 8",
    "zeroplan check recipe.yaml accelerate.yaml meta-llama/Llama-3.1-8B --gpu H100",
)
@flags.takes_run("check")
def check(
    request: Ask,
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILES [MODEL]", help="A ds_config.json, or files that run together; then a model."),
    ],
    gpus: Annotated[
        int | None, typer.Option("--gpus", rich_help_panel="Cluster", help="GPUs a node, also for the batch arithmetic. [any]")
    ] = None,
    program: Program = None,
    wide: Annotated[bool, typer.Option("--wide", help="Show every key, and what it decides.")] = False,
    quiet: flags.Quiet = False,
    as_json: flags.Json = False,
) -> None:
    """Say what a program does with its files, and what to mend.

    --wide goes key by key. A file with "auto" is judged as the program that fills it. With MODEL: also what the run will use,
    and which knobs would help. The exit code is 0 when the run starts (once filled), 2 when DeepSpeed refuses it, or with
    --engine zeroplan the included runtime.
    """
    if gpus is not None and gpus < 1:
        raise BadInput(f"{gpus} is out of range", where="--gpus", remedy="use 1 or more")
    files, model = _with_model(files)
    if any(map(is_capture, files)):
        from zeroplan.cli.captured import checked

        checked(request.replace(model=model, gpus=gpus), files, quiet=quiet, as_json=as_json)
    version = DEEPSPEED_VERSION
    if request.deepspeed_version is not None:
        from zeroplan.interop.deepspeed_version import requested_version

        version, _ = requested_version(request.deepspeed_version)
    setup = None
    from zeroplan.interop.readers import is_ds_config

    if len(files) == 1 and is_ds_config(files[0], program):
        from zeroplan.ds_config.reader import inspect_ds_config

        ranks = None if gpus is None else gpus * request.nodes
        dialect = _dialect(request.engine)
        found: DsConfig | None = inspect_ds_config(files[0], dialect=dialect, world_size=ranks, engine_version=version)
    else:
        from zeroplan.core.tasks import training_of
        from zeroplan.interop.readers import read_setups

        setup = read_setups(files, program, training_of(request.task))
        found = _filled_config(setup, None if gpus is None else gpus * request.nodes, version, request.engine)
    starts = found is None or found.runs_filled
    request = request.replace(model=model, files=tuple(files), program=program, gpus=gpus)
    if setup is not None:
        from zeroplan.planner.merge import reported

        setup = reported(setup, request)
    report = _planned(request, setup) if starts else None
    if as_json:
        show_json(_json(setup, found, report, _version(request.engine, version)))
    else:
        following: list[str] = []
        if report is not None:
            following = flags.recommend_words(request)
        elif starts and all(map(os.path.exists, files)):
            named = ["--engine", request.engine] if request.engine != DEFAULT_ENGINE else []
            if setup is not None and isinstance(setup.ask.model, str):
                following = ["zeroplan", "estimate", *(word for file in files for word in ("--from", file)), "--gpu", "H100"]
            else:
                following = ["zeroplan", "check", *files, "MODEL", "--gpu", "8xH100", *named]
        show(_quiet(setup, found, report) if quiet else _text(setup, found, report, following, wide=wide))
    raise typer.Exit(EXIT_OK if starts else EXIT_BAD_INPUT)


#: How files end that are not there, so that a misspelt one is no model.
_FILES = (".py", ".json", ".yaml", ".yml", ".toml", ".sh", ".slurm", ".hjson")


def _with_model(words: list[str]) -> tuple[list[str], str | None]:
    """Return the files, and the model after them if there is one: a name that is no file, a folder, or a model's config."""
    last = words[-1].replace("\0", "")
    if len(words) == 1 or (os.path.isfile(last) and os.path.basename(last) != "config.json"):
        return words, None
    if not os.path.lexists(last) and last.lower().endswith(_FILES):
        return words, None
    return words[:-1], words[-1]


def _planned(request: Ask, setup: Setup | None) -> Report | None:
    """Return the plan of the files' run; None where neither a model nor a machine is named, and no file describes both.

    Raises:
        BadInput: a machine without a model.
    """
    named = request.model is not None or request.params is not None
    machine = [name for name in ("gpu", "vram", "cpu_ram", "nvme") if getattr(request, name) is not None]
    described = setup is not None and isinstance(setup.ask.model, Mapping) and setup.value("gpus") is not None
    if not named and not machine and not described:
        return None
    if machine and not named and (setup is None or setup.ask.model is None):
        what = "there is no model whose run would use it"
        raise BadInput(what, where=f"--{machine[0].replace('_', '-')}", remedy="name the model after the files")
    from zeroplan.planner.estimate import estimate_report

    return estimate_report(request)


def _json(setup: Setup | None, found: DsConfig | None, report: Report | None, version: str) -> dict[str, Any]:
    from zeroplan.report.check import check_json
    from zeroplan.report.check_setup import setup_json

    checked = None if found is None else check_json(found, version)
    answer = {"schema": 1, "setup": setup_json(setup), "ds_config": checked} if setup is not None else checked or {}
    return answer if report is None else {**answer, "estimate": json.loads(report.to_json())}


def _quiet(setup: Setup | None, found: DsConfig | None, report: Report | None) -> str:
    """Return the verdict alone: of the plan where there is one, else of the files."""
    from zeroplan.report.check import verdict_text
    from zeroplan.report.plans import brief_text
    from zeroplan.report.terminal import Terminal

    if report is not None:
        return brief_text(report, Terminal.here(), quiet=True)
    return setup.line if found is None and setup is not None else verdict_text(found, Terminal.here()) if found else ""


def _text(setup: Setup | None, found: DsConfig | None, report: Report | None, following: list[str], *, wide: bool) -> str:
    """Return the verdict on the files, what they say, and what the run will use."""
    from zeroplan.ds_config.findings import merged
    from zeroplan.report.check import findings_text, verdict_text
    from zeroplan.report.check_setup import setup_text
    from zeroplan.report.plans import brief_text
    from zeroplan.report.terminal import Terminal

    terminal = Terminal.here(why=wide)
    filler = "" if setup is None else setup.title
    parts = [] if found is None else [verdict_text(found, terminal, filler)]
    parts += [] if setup is None else [setup_text(setup, terminal, table=wide or found is None, line=wide or found is None)]
    parts += [] if found is None else [findings_text(found, terminal, wide=wide)]
    if report is not None:
        said = set() if found is None else set(merged(found.warnings))
        unsaid = report.model_copy(update={"warnings": tuple(one for one in report.warnings if one not in said)})
        parts.append(brief_text(unsaid, terminal, next_command=following))
    elif following:
        command = "\n".join(terminal.command("Next: ", following))
        told = [part for part in parts if part]
        return f"{told[0]}\n{command}" if len(told) == 1 and not wide else "\n\n".join([*told, command])
    return "\n\n".join(part for part in parts if part)


def _dialect(engine: str) -> Dialect:
    """Return how the engine reads a ds_config. Raises BadInput: an engine that reads none."""
    dialect = find_engine(engine).dialect
    if dialect is None:
        what = f"{engine} reads no ds_config"
        raise BadInput(what, where="--engine", remedy="use --engine deepspeed or zeroplan")
    return dialect


def _version(engine: str, deepspeed: str) -> str:
    """Return the version of the program that reads the file, where `deepspeed` is the one that is asked for of DeepSpeed."""
    return deepspeed if engine == DEFAULT_ENGINE else find_engine(engine).version


def _filled_config(setup: Setup, gpus: int | None, version: str, engine: str) -> DsConfig | None:
    """Return the setup's ds_config, with what its program fills in; None for a run without one."""
    if setup.ds_config is None:
        return None
    from zeroplan.core.workload import DType
    from zeroplan.ds_config.reader import fill_from, inspect_ds_config

    dtype = None if setup.ask.dtype is None else DType(setup.ask.dtype)
    filled = fill_from(dtype=dtype, micro_batch=setup.ask.micro_batch, grad_accum=setup.ask.grad_accum)
    ranks = gpus or setup.ranks
    dialect = _dialect(engine)
    return inspect_ds_config(dict(setup.ds_config), dialect=dialect, fill=filled, world_size=ranks, engine_version=version)
