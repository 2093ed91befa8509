"""The options that several verbs share, each defined once, and the decorator that adds them to a verb."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Annotated, Any

import typer

from zeroplan.cli import complete
from zeroplan.core.cluster import Cluster, without_count
from zeroplan.core.errors import BadInput
from zeroplan.core.option import MESH, SEARCHES, WORK, Option
from zeroplan.engines.registry import BUILT_IN, find_engine
from zeroplan.run.ask import MESH_OPTIONS, OPTIONS, Ask


def _require_one_form(as_json: bool, style: str) -> None:
    if as_json and style != "plain":
        raise BadInput("cannot stand beside --json", where=f"--format {style}", remedy="use one of the two")


def _json(context: typer.Context, as_json: bool) -> bool:
    """Refuse JSON in another format; whichever of the two is read second meets the first."""
    _require_one_form(as_json, context.params.get("style") or "plain")
    return as_json


Tokens = Annotated[
    str | None,
    typer.Option("--tokens", rich_help_panel="Whole training", help="Train on so many, 15T: days, GPU hours, energy."),
]
Price = Annotated[
    str | None,
    typer.Option("--price", rich_help_panel="Whole training", metavar="NUMBER|FILE", help="Of a GPU hour, or JSON by card."),
]
Json = Annotated[bool, typer.Option("--json", callback=_json, help="Print JSON.")]


def writable(path: str | None) -> str | None:
    """Refuse, before the work starts, a file that could not be written after it: the callback of options that name one."""
    if path is not None:
        from zeroplan.core.plumbing.files import require_writable

        require_writable(path)
    return path


_MARKDOWN = dict.fromkeys(("markdown", "md"), "github")


def _style(context: typer.Context, style: str) -> str:
    """Refuse an unknown format before the work starts."""
    from zeroplan.report.table import FORMATS

    style = _MARKDOWN.get(style.lower(), style)

    if style not in FORMATS:
        raise BadInput(f"unknown format {style[:40]!r}", where="--format", remedy=f"use one of {', '.join(FORMATS)}")
    _require_one_form(bool(context.params.get("as_json")), style)
    return style


Style = Annotated[str, typer.Option("--format", callback=_style, help="plain, github, html or csv.")]

Why = Annotated[bool, typer.Option("--why", help="Show the reasons, the tables and every note, too.")]

Wide = Annotated[bool, typer.Option("--wide", help="Show all columns, in lines of any length.")]


#: Of the verbs that search.
SearchedCompile = Annotated[
    str | None,
    typer.Option(
        "--compile",
        rich_help_panel="Workload",
        metavar="PARTS",
        help="What torch.compile is called on: blocks, checkpointed-blocks, model; auto: blocks where that is faster.",
    ),
]


def _quiet(quiet: bool) -> bool:
    """Show no progress either."""
    if quiet:
        from zeroplan.core.plumbing.progress import watch

        watch(None)
    return quiet


Quiet = Annotated[bool, typer.Option("--quiet", "-q", callback=_quiet, help="Print the verdict alone, and no progress.")]

#: Degrees that the search over layouts does not take, since its engine has none.
NOT_LAID_OUT = tuple(name for name in MESH_OPTIONS if not OPTIONS[name].taken_by("recommend"))


def takes_run(
    verb_name: str, *, searched: Iterable[str] = (), only: Iterable[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb the options of a run that it takes. Its first parameter gets the :class:`~zeroplan.run.ask.Ask` made of them.

    If the verb has a parameter of an option's name, that parameter replaces the option (type, default and help), and its value
    goes to the verb, not to the Ask. Arguments of the verb itself stand before MODEL.

    Args:
        verb_name: whose options these are.
        searched: options that the verb finds out itself, unless they are given.
        only: the options that it takes, where those are few.
    """

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        own = dict(list(inspect.signature(verb, eval_str=True).parameters.items())[1:])
        shared = [name for name, option in OPTIONS.items() if (name in only if only else option.taken_by(verb_name))]
        found = {name for name in shared if OPTIONS[name].found and OPTIONS[name].panel} if verb_name in SEARCHES else set()
        taken = [own.get(name) or _parameter(OPTIONS[name], searched=name in (*searched, *found)) for name in shared]
        more = [parameter for name, parameter in own.items() if name not in shared]
        taken = [one for one in more if _is_argument(one)] + taken + [one for one in more if not _is_argument(one)]

        @wraps(verb)
        def run(**values: Any) -> None:
            given = {name: _read(OPTIONS[name], values.pop(name)) for name in shared if name not in own}
            verb(Ask(**given).by({name: OPTIONS[name].where for name in given}), **values)

        keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in taken]
        run.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in keywords}
        return run

    return decorate


def searched_checkpointing(request: Ask) -> tuple[bool | None, Ask]:
    """Return whether a search is to checkpoint, None for both ways, and the request that leaves it open unless it is to."""
    again = request.values.get("gradient_checkpointing")
    return again, request.replace(gradient_checkpointing=again or None)


def _read(option: Option[Any], value: Any) -> Any:
    """Return what the command line says, read from its text; None where it says nothing."""
    return value if value in (None, []) or option.read is None else option.read(value, option.where)


def _parameter(option: Option[Any], *, searched: bool = False) -> inspect.Parameter:
    """Return a verb's parameter for an option; None is what it has where nothing is given."""
    help_text = option.help.format(engines=", ".join(BUILT_IN), default=option.default)
    if searched:
        help_text = re.sub(r" *\[[^]]*\]$", "", help_text) + " [searched]"
    completed = getattr(complete, option.complete) if option.complete else None
    if option.flag:
        shown = typer.Option(
            option.flag, metavar=option.metavar, rich_help_panel=option.panel, help=help_text, autocompletion=completed
        )
    else:
        shown = typer.Argument(metavar=option.metavar, help=help_text, autocompletion=completed)
    annotation: Any = Annotated[option.text | None, shown]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def recommend_words(request: Ask) -> list[str]:
    """Return the words of the ``recommend`` command for the same model, workload and cluster; none where it knows no such run.

    A batch that was asked for stays the global batch, which ``recommend`` splits anew. Degrees of parallelism are kept where
    layouts are searched; elsewhere the words are those without them.
    """
    chosen = request.chosen
    degrees = [name for name in MESH_OPTIONS if name in chosen]
    if degrees and (find_engine(request.engine).layouts is None or set(degrees) & set(NOT_LAID_OUT) or request.files):
        degrees = []
    if any(_is_another_run(OPTIONS[name], request) for name in chosen):
        return []
    kept = [one.name for one in OPTIONS.values() if one.taken_by("recommend") and not one.found and one.panel != MESH]
    words = ["zeroplan", "recommend", *request.words([*kept, *degrees])]
    if request.files:  # which may say another number
        words += [word for name in ("gpus", "nodes") if request.values.get(name) == 1 for word in OPTIONS[name].words(1)]
    if (request.micro_batch or request.grad_accum) and not request.files and request.ds_config is None:
        ranks = Cluster.of(gpus=request.gpus, nodes=request.nodes, gpu=request.gpu).layout.world_size
        data_parallel = ranks // (request.tp * request.cp * request.pp if degrees else 1)
        words += ["--global-batch", str(data_parallel * (request.micro_batch or 1) * (request.grad_accum or 1))]
    for file in request.files:
        words += ["--from", str(file)]
    if request.ds_config is not None:
        words += ["--from", str(request.ds_config)]
    return words if request.gpu or request.vram else [*words, "--gpu", "H100"]


def _is_another_run(option: Option[Any], request: Ask) -> bool:
    """Return whether ``recommend`` searches no run that has another value of the option than its default."""
    if option.name == "checkpoint_policy":
        return "gradient_checkpointing" in request.chosen
    return option.panel == WORK and bool(option.help) and not option.taken_by("recommend")


def estimate_words(request: Ask, stage: int) -> list[str]:
    """Return the words of the ``estimate`` command for exactly this run."""
    run = request.replace(stage=stage, gpu=without_count(request.gpu), token=None)  # --gpus has the count
    names = [name for name, option in OPTIONS.items() if option.taken_by("estimate") and name != "files"]
    return ["zeroplan", "estimate", *run.words(names)]


def _is_argument(parameter: inspect.Parameter) -> bool:
    """Return whether it stands on the command line without a flag."""
    return any(isinstance(one, typer.models.ArgumentInfo) for one in getattr(parameter.annotation, "__metadata__", ()))
