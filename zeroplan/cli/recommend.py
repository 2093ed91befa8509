"""``zeroplan recommend``: the fastest configuration that fits, as files that run."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zeroplan.cli import flags
from zeroplan.cli.main import made_by, show, show_json, verb
from zeroplan.core.errors import EXIT_DOES_NOT_FIT, BadInput
from zeroplan.run.ask import MESH_OPTIONS, Ask
from zeroplan.techniques.liger import LigerTechnique

if TYPE_CHECKING:
    from zeroplan.report.terminal import Terminal
    from zeroplan.search.files import Files, Target
    from zeroplan.search.results import SearchResult
    from zeroplan.search.search_options import SearchOptions
    from zeroplan.search.whole_training import Budget, WholeTraining

_SEARCH = "Search"
GlobalBatch = Annotated[int | None, typer.Option("--global-batch", rich_help_panel=_SEARCH, help="Sequences a step.")]
Goal = Annotated[str, typer.Option("--goal", rich_help_panel=_SEARCH, help="throughput or memory.")]
Candidates = Annotated[
    str | None,
    typer.Option("--candidates", rich_help_panel=_SEARCH, help='Rank these: JSON lines of {"ds_config": {…}}.'),
]
From = Annotated[
    list[str] | None,
    typer.Option(
        "--from",
        rich_help_panel=_SEARCH,
        help="What is in use: ds_config, TrainingArguments, recipes of other programs. Repeats.",
    ),
]
Program = Annotated[
    str | None, typer.Option("--program", rich_help_panel=_SEARCH, help="The program that owns the file, where two could.")
]
Layouts = Annotated[
    bool,
    typer.Option(
        "--layouts",
        rich_help_panel=_SEARCH,
        help="The fastest layout that fits, by a model: FSDP2 × tp, cp, pp, ep. Any degree given asks for it, and is kept.",
    ),
]
Smallest = Annotated[
    bool, typer.Option("--smallest", rich_help_panel=_SEARCH, help="--layouts on the fewest nodes that train the model.")
]
Nodes = Annotated[
    str | None,
    typer.Option(
        "--nodes",
        rich_help_panel="Cluster",
        help="Nodes; ? asks for the fewest, as --smallest. [1, or as the file says]",
        metavar="N|?",
    ),
]
Profile = Annotated[str | None, typer.Option("--profile", rich_help_panel=_SEARCH, help="Rates by doctor --calibrate.")]
NvmePath = Annotated[str, typer.Option("--nvme-path", rich_help_panel=_SEARCH, help="Where swap files may go.")]

_FILES = "Files"
Output = Annotated[
    str | None, typer.Option("-o", "--output", rich_help_panel=_FILES, help="Write the best: ds_config.json, or a folder/.")
]
FormName = Annotated[
    str | None,
    typer.Option(
        "--form",
        rich_help_panel=_FILES,
        help="explicit, trainer, trl, lightning or accelerate; fsdp2: torch, accelerate-fsdp2; ddp: torch.",
    ),
]
Html = Annotated[str | None, typer.Option("--html", rich_help_panel=_FILES, help="Write a page with memory against speed.")]
Launcher = Annotated[
    str | None,
    typer.Option("--launcher", rich_help_panel=_FILES, help="deepspeed, torchrun, accelerate or slurm. [the form's]"),
]
Script = Annotated[
    str | None, typer.Option("--script", rich_help_panel=_FILES, help="The program that the command starts. [train.py]")
]
NewScript = Annotated[
    str | None, typer.Option("--new-script", rich_help_panel=_FILES, help="Write such a program: train.py.", metavar="FILE")
]
Force = Annotated[bool, typer.Option("--force", rich_help_panel=_FILES, help="Write over files that recommend did not write.")]
Hosts = Annotated[str | None, typer.Option("--hosts", rich_help_panel=_FILES, help="Names of the nodes, by comma.")]


@verb("zeroplan recommend meta-llama/Llama-3.1-8B --gpu 4xA100 -o ds_config.json", "zeroplan recommend --gpu RTX4090")
@flags.takes_run("recommend", searched=("tp", "sp", "cp", "pp", "ep"))
def recommend(
    request: Ask,
    compile: flags.SearchedCompile = None,
    nodes: Nodes = None,
    global_batch: GlobalBatch = None,
    goal: Goal = "throughput",
    candidates: Candidates = None,
    source: From = None,
    program: Program = None,
    layouts: Layouts = False,
    smallest: Smallest = False,
    profile: Profile = None,
    tokens: flags.Tokens = None,
    price: flags.Price = None,
    nvme_path: NvmePath = "/local_nvme",
    style: flags.Style = "plain",
    why: flags.Why = False,
    wide: flags.Wide = False,
    quiet: flags.Quiet = False,
    as_json: flags.Json = False,
    output: Output = None,
    form: FormName = None,
    launcher: Launcher = None,
    script: Script = None,
    new_script: NewScript = None,
    hosts: Hosts = None,
    force: Force = False,
    html: Html = None,
) -> None:
    """Find the fastest configuration that fits; write its files.

    Says why it is the fastest. Without MODEL: what such GPUs can train.
    """
    from zeroplan.report.recommendation import answer_text
    from zeroplan.report.terminal import Terminal
    from zeroplan.search.api import run_search
    from zeroplan.search.search_options import SearchOptions
    from zeroplan.search.whole_training import budget_of_model, training_json, training_of_search

    smallest = smallest or nodes == "?"
    if source:
        from zeroplan.cli.captured import recommended

        searched: dict[str, Any] = {"--candidates": candidates, "--global-batch": global_batch, "--compile": compile}
        searched |= {"--layouts": layouts, "--smallest": smallest, "--output": output, "--form": form, "--html": html}
        searched |= {"--tokens": tokens, "--price": price}
        searched |= {"--new-script": new_script, "--launcher": launcher, "--script": script, "--hosts": hosts}
        if recommended(request.replace(nodes=_count(nodes)), source, searched, quiet=quiet, as_json=as_json):
            return
    again, request = flags.searched_checkpointing(request)
    request = request.replace(nodes=_count(nodes), compile=compile)
    fixed = [name for name in MESH_OPTIONS if name in request]
    if smallest and nodes not in (None, "?"):
        raise BadInput("is what --smallest finds", where="--nodes", remedy="leave one of the two out")
    budget = budget_of_model(tokens, price, request, sourced=bool(source))
    options = SearchOptions(
        global_batch=global_batch,
        goal=goal,
        gradient_checkpointing=again,
        profile=profile,
        nvme_path=nvme_path,
        candidates=candidates,
        source=source or None,
        program=program,
    )
    if layouts or smallest or fixed:
        given: dict[str, Any] = {"--candidates": candidates, "--from": source}
        given |= {"--output": output, "--form": form, "--new-script": new_script, "--html": html}
        given |= {"--launcher": launcher, "--script": script, "--hosts": hosts, "--program": program}
        given |= {"--goal": goal != "throughput", "--format": style != "plain", "--nvme-path": nvme_path != "/local_nvme"}
        asked = "--smallest" if smallest else "--layouts" if layouts else f"--{fixed[0].replace('_', '-')}"
        _require_alone(given, asked)
        _layouts(request, options, budget, smallest=smallest, as_json=as_json, wide=wide, quiet=quiet)
        return
    target = _target(request, output, form, launcher, script, new_script, hosts, html, source or [], force)
    if target is not None and target.form == "trl" and not request[LigerTechnique.liger]:
        request = request.replace(chunked_head=True)  # SFTTrainer's own: head and loss in tiles

    if request.model is None and request.params is None and not source:
        if html is not None:
            raise BadInput("draws the configurations of one model", where="--html", remedy="name the model")
        _catalog(request, options, target, as_json=as_json, style=style, wide=wide, why=why, quiet=quiet)
        return
    if candidates is not None and source:
        raise BadInput("cannot stand beside --candidates", where="--from", remedy="use one of the two")
    found = run_search(request, options)
    written = _write(found, target, html)
    training = training_of_search(budget, found)
    if as_json:
        show_json(found.to_dict() | _files_json(written) | training_json(training))
    else:
        following = _words_that_write(found)
        terminal = Terminal.here(wide=wide, why=why)
        show(answer_text(found, style, files=written, terminal=terminal, quiet=quiet, next_command=following))
        _show_training(budget, training, terminal, quiet=quiet)
    if found.best is None or found.best.plan.undecided:
        raise typer.Exit(EXIT_DOES_NOT_FIT)


def _count(text: str | None) -> int | None:
    if text is None or text == "?":
        return None
    try:
        return int(text)
    except ValueError:
        raise BadInput(f"{text!r} is no number", where="--nodes", remedy="give a whole number, or ? for the fewest") from None


def _require_alone(given: dict[str, Any], asked: str) -> None:
    """Refuse options that the search over layouts does not take."""
    for flag, value in given.items():
        if value:
            raise BadInput(f"cannot stand beside {asked}", where=flag, remedy="leave one of the two out")


def _show_training(budget: Budget | None, training: WholeTraining | None, terminal: Terminal, *, quiet: bool) -> None:
    """Print what a whole training takes, where a budget was given and something fits."""
    from zeroplan.report.scaling import training_text

    if training is not None and budget is not None and not quiet:
        show("\n".join(terminal.wrap(training_text(budget.tokens, training))))


def _layouts(
    request: Ask, options: SearchOptions, budget: Budget | None, *, smallest: bool, as_json: bool, wide: bool, quiet: bool
) -> None:
    """Answer ``--layouts``, ``--smallest`` and degrees of parallelism."""
    from zeroplan.report.layouts import layouts_text
    from zeroplan.report.terminal import Terminal
    from zeroplan.search.layouts import search_layouts, smallest_cluster
    from zeroplan.search.whole_training import training_json, training_of_layout

    search = smallest_cluster if smallest else search_layouts
    found = search(request, options.gradient_checkpointing, options.global_batch, options.profile)
    shown, training = found.chosen, training_of_layout(budget, found, options.profile)
    if as_json:
        show_json(found.to_dict() | training_json(training))
    else:
        words = [] if shown is None else flags.estimate_words(shown.request, shown.plan.stage)
        terminal = Terminal.here(wide=wide)
        show(layouts_text(found, terminal=terminal, quiet=quiet, next_command=words))
        _show_training(budget, training, terminal, quiet=quiet)
    if found.best is None:
        raise typer.Exit(EXIT_DOES_NOT_FIT)


def _require_program(script: str) -> None:
    """Refuse what no launcher can start."""
    if not script.strip():
        raise BadInput("names no program", where="--script", remedy="give its path, or leave it out")
    if script.lower().endswith(".ipynb"):
        what = "is a notebook, which no launcher starts"
        raise BadInput(what, where="--script", remedy="write it out first: jupyter nbconvert --to script NOTEBOOK")
    if " -" in script and not os.path.exists(script):
        what = f"{script[:60]!r} holds arguments, and would be started as one path"
        raise BadInput(what, where="--script", remedy="name the program alone, and add its arguments to the printed command")


def _target(
    request: Ask,
    output: str | None,
    form: str | None,
    launcher: str | None,
    script: str | None,
    new_script: str | None,
    hosts: str | None,
    html: str | None,
    source: list[str],
    force: bool,
) -> Target | None:
    """Return the target of the files; None without -o and --new-script. A path that cannot be written is refused before the
    search.
    """
    from zeroplan.core.digests import require_writable_over
    from zeroplan.engines.registry import find_engine
    from zeroplan.search.files import Target, form_of, output_of
    from zeroplan.search.places import require_not_read, require_places

    engine = find_engine(request.engine)
    for where, path in (("--output", output), ("--new-script", new_script), ("--html", html)):
        if path == "":
            raise BadInput("no file is named", where=where, remedy="give a path")
    if output is None and new_script is None:
        options = (("--form", form), ("--launcher", launcher), ("--script", script), ("--hosts", hosts), ("--force", force))
        for where, given in options:
            if given:
                raise BadInput("no file is asked for", where=where, remedy="give -o ds_config.json as well")
        require_places(html)
        require_not_read(source, html)
        return None
    if new_script is not None and (new_script.endswith(os.sep) or os.path.isdir(new_script)):
        raise BadInput(f"{new_script} is a folder", where="--new-script", remedy="give the name of a file, such as train.py")
    if new_script is not None and script is not None:
        raise BadInput("cannot stand beside --new-script", where="--script", remedy="use one of the two")
    if script is not None:
        _require_program(script)
    names = tuple(name.strip() for name in (hosts or "").split(",") if name.strip())
    if len(names) not in (0, request.nodes):
        raise BadInput(f"names {len(names)} of {request.nodes} nodes", where="--hosts", remedy="name each node, by comma")
    changes = bool(source) and form is launcher is script is new_script is hosts is None
    target = Target(output, form, launcher, script or "train.py", new_script, names, changes, force)
    require_places(output, new_script, html)
    if changes:
        require_not_read(source, html, output)
        return target
    main = output_of(target, form_of(engine, target))
    require_not_read(source, html, new_script, main)
    for where, path in (("--output", main), ("--new-script", new_script)):
        if path is not None and not force:
            require_writable_over([path], where="--output" if output is not None else where)
    return target


def _write(found: SearchResult, target: Target | None, html: str | None = None) -> Files | None:
    """Write the files of the best configuration, and the page. Returns the former; None where none are asked for, or nothing
    fits.
    """
    from zeroplan.core.digests import require_writable_over, write_with_digests
    from zeroplan.core.plumbing.files import write_atomic

    best, files = found.best, None
    if target is not None and best is not None:
        from zeroplan.search.files import changed_files, files_of

        if target.changes and found.changed is not None:
            files = changed_files(found.changed, target)
        else:
            files = files_of(best, found.cluster, target, found.loaded, found.training)
        if not target.force:
            require_writable_over(files.texts, files.texts)
        if files.texts and target.output is not None and target.output.endswith(os.sep):
            os.makedirs(target.output, exist_ok=True)
        write_with_digests(files.texts)
    if html is not None:
        from zeroplan.report.recommendation_html import answer_html

        write_atomic(html, answer_html(found, made=made_by()))
    return files


def _words_that_write(found: SearchResult) -> list[str]:
    """The command that was typed, with the folder or the script that it then writes; nothing where it writes none."""
    if found.changed is not None:
        return ["zeroplan", *sys.argv[1:], "-o", "run/"] if found.changed.edits.texts else []
    forms = found.best.engine.forms() if found.best is not None else {}
    if not forms:
        return []
    writes = ("-o", "run/") if next(iter(forms.values())).main else ("--new-script", "train.py")
    return ["zeroplan", *sys.argv[1:], *writes]


def _files_json(files: Files | None) -> dict[str, Any]:
    return {} if files is None else {"files": files.to_dict()}


def _catalog(
    request: Ask,
    options: SearchOptions,
    target: Target | None,
    *,
    as_json: bool,
    style: str,
    wide: bool,
    why: bool,
    quiet: bool,
) -> None:
    """Print the largest models that the machine can train; with -o, write the config of the largest full fine-tune."""
    from zeroplan.report.overview import overview_json, overview_text
    from zeroplan.report.terminal import Terminal
    from zeroplan.search.catalog import overview

    if options.candidates is not None:
        raise BadInput("needs a model", where="--candidates", remedy="name the model that the configurations train")
    found = overview(request, options if as_json else replace(options, explain=False))  # the text has the verdict alone
    written = None if found.best is None else _write(found.best, target)
    if as_json:
        show_json(overview_json(found) | _files_json(written))
    else:
        following: list[str] = []
        if found.best is not None:
            following = flags.recommend_words(request.replace(model=found.best.model["name"]))
        terminal = Terminal.here(wide=wide, why=why)
        show(overview_text(found, style, files=written, terminal=terminal, quiet=quiet, next_command=following))
    if found.best is None:
        raise typer.Exit(EXIT_DOES_NOT_FIT)
