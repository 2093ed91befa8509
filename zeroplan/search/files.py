"""A recommendation's files, in the form of the program that runs it, and the command that starts it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.engines.base import Engine
from zeroplan.engines.registry import engine_names, find_engine
from zeroplan.interop.forms import Configuration
from zeroplan.interop.launch import LAUNCHERS, Launch, launch
from zeroplan.search.results import Recommendation


@dataclass(frozen=True, slots=True)
class Files:
    """Texts by path, the main one first, and how to start the program with them."""

    texts: dict[str, str]
    start: Launch


def files_of(
    one: Recommendation, cluster: Cluster, output: str, *, form: str = "explicit", launcher: str | None = None, script: str
) -> Files:
    """The files to write at `output` and beside it, and the command that starts the program.

    Args:
        one: the configuration.
        cluster: for the numbers of nodes and GPUs.
        output: the path of the main file; other files go into its folder.
        form: a name of the engine's :meth:`~zeroplan.engines.base.Engine.forms`.
        launcher: one of the engine's launchers; None for its usual one.
        script: the user's program.

    Raises:
        BadInput: a form or a launcher that the engine does not have.
    """
    engine = one.engine
    require_form(form, engine, launcher)
    written = engine.forms()[form](
        Configuration(one.zero, one.workload, cluster, one.ds_config(), output, launcher or engine.launchers[0])
    )
    start = launch(
        written.launcher,
        gpus=cluster.gpus,
        nodes=cluster.nodes,
        script=script,
        arguments=written.arguments,
        alloc_conf=one.alloc_conf,
        accelerate_config=written.accelerate_config,
    )
    folder = os.path.dirname(output)
    return Files({**written.texts, **{os.path.join(folder, name): text for name, text in start.files.items()}}, start)


def require_form(form: str, engine: Engine, launcher: str | None) -> None:
    """Refuse a form or a launcher that the engine does not have, before any search.

    Raises:
        BadInput: with what the engine has.
    """
    forms = engine.forms()
    if launcher is not None and launcher not in LAUNCHERS:
        remedy = f"use one of {', '.join(LAUNCHERS)}"
        raise BadInput(f"unknown launcher {launcher[:40]!r}", where="--launcher", remedy=remedy)
    if not forms:
        raise BadInput(
            f"{engine.name} reads no file", where="--output", remedy="give your program the micro batch of the table"
        )
    if form not in forms:
        others = [name for name in engine_names() if form in find_engine(name).forms()]
        what = f"{form} is not a form of {engine.name}" if others else f"unknown form {form[:40]!r}"
        own = f"use --form {', '.join(forms)}" if len(forms) == 1 else f"use one of {', '.join(forms)}"
        raise BadInput(what, where="--form", remedy=f"{own}, or --engine {' or '.join(others)}" if others else own)
    if launcher is not None and launcher not in engine.launchers:
        remedy = f"use {' or '.join(engine.launchers)}"
        raise BadInput(f"{launcher} does not start {engine.name}", where="--launcher", remedy=remedy)
