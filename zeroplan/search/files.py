"""A recommendation's files, in the form of the program that runs it, and the command that starts it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.zero_config import OffloadDevice
from zeroplan.engines.base import Engine
from zeroplan.engines.registry import engine_names, find_engine
from zeroplan.interop.forms.configuration import Configuration, Form, Model
from zeroplan.interop.forms.launch import LAUNCHERS, Launch, Shell, launch, require_hosts
from zeroplan.interop.training import NO_TRAINING, Training, trained_config
from zeroplan.models.catalog import hub_id
from zeroplan.models.spec import ModelSpec
from zeroplan.search.results import Recommendation
from zeroplan.search.space import NVME_PATH
from zeroplan.simulate.allocator.config import VARIABLES

if TYPE_CHECKING:
    from zeroplan.interop.edits.written import ChangedFiles

#: Files that hold weights, by how their names end.
_WEIGHTS = (".safetensors", ".bin")


@dataclass(frozen=True, slots=True)
class Target:
    """Paths that files are written to, and the launcher that starts the program.

    Attributes:
        output: the path of the main file, or a folder; None puts it beside the new script.
        form: a name of the engine's :meth:`~zeroplan.engines.base.Engine.forms`; None for the usual one.
        launcher: one of the form's launchers; None for the usual one.
        script: the user's program.
        new_script: the path of a training script to write in its place; None for none.
        hosts: names of the nodes.
        changes: whether the files of the run in use are changed, where they can be, in place of writing new ones.
        force: whether files are written over that zeroplan did not write.
    """

    output: str | None = None
    form: str | None = None
    launcher: str | None = None
    script: str = "train.py"
    new_script: str | None = None
    hosts: Sequence[str] = ()
    changes: bool = False
    force: bool = False


@dataclass(frozen=True, slots=True)
class Files:
    """Texts by path, the main one first, and how to start the program with them.

    Attributes:
        texts: by path.
        start: the command; its text is empty where none is known.
        program_must: what the user's own program must do itself; empty with a new script.
        notes: what else to know.
    """

    texts: dict[str, str]
    start: Launch
    program_must: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """Return the files and commands as a plain dict for JSON."""
        return {
            "written": list(self.texts),
            "start": self.start.shell(),
            "program_must": list(self.program_must),
            "notes": list(self.notes),
        }


def files_of(
    one: Recommendation, cluster: Cluster, target: Target, model: Model | None = None, training: Training = NO_TRAINING
) -> Files:
    """Return the files to write, and the command that starts the program.

    Args:
        one: the configuration.
        cluster: for the numbers of nodes and GPUs.
        target: where the files go.
        model: for a new script.
        training: what the run in use says beside what a plan holds.

    Raises:
        BadInput: a form or a launcher that the engine does not have, or a script that cannot be written.
    """
    form = form_of(one.engine, target)
    explicit = one.ds_config()
    config, carried = (None, ()) if explicit is None else trained_config(explicit, training)
    configuration = Configuration(
        one.zero,
        one.workload,
        cluster,
        config,
        output_of(target, form),
        target.launcher or form.launchers[0],
        model or Model(),
        script=target.new_script or target.script,
        new_script=target.new_script is not None,
        training=training,
        carried=carried,
        program=form.program,
    )
    written = form.write(configuration)
    scripts: dict[str, str] = {}
    if target.new_script is not None:
        assert form.script is not None
        scripts[target.new_script] = form.script(configuration)
    start = launch(
        configuration.launcher,
        gpus=cluster.gpus,
        nodes=cluster.nodes,
        script=configuration.script,
        arguments=written.arguments,
        hosts=target.hosts,
        environment={**_environment(one, cluster), **written.environment},
        accelerate_config=written.accelerate_config,
        folder=os.path.dirname(configuration.output),
        local_rank=not configuration.new_script,
    )
    must = () if configuration.new_script else written.program_must
    _require_apart(*written.texts, *scripts, *start.files)
    texts = {**written.texts, **scripts, **start.files}
    return Files(texts, start, must, (*start.notes, *_swap_note(one), *_alloc_note(one), *written.notes))


def changed_files(changed: ChangedFiles, target: Target) -> Files:
    """Return copies of the user's files with what changes, and the user's own command with them.

    Raises:
        BadInput: several files that change, and the name of one.
    """
    from zeroplan.interop.edits.written import copies, start_of

    assert target.output is not None
    texts, new = copies(changed.places, changed.edits, target.output)
    scripts = any(one.kind == "shell" for one in changed.places)
    environment = dict.fromkeys(VARIABLES, changed.alloc_conf) if changed.alloc_conf and not scripts else {}
    command, todo = start_of(changed.places, new, environment) if texts else ("", [])
    return Files(texts, Launch(command), (*changed.edits.left, *todo))


def _require_apart(*paths: str) -> None:
    plain = [os.path.normpath(path) for path in paths]
    twice = next((path for path in plain if plain.count(path) > 1), None)
    if twice is not None:
        raise BadInput(f"{twice} is the name of two files", where="--output", remedy="name another, or give a folder/")


def _environment(one: Recommendation, cluster: Cluster) -> dict[str, str | Shell]:
    """The allocator's settings, and threads for an optimizer that steps on the host, which torchrun would give one.

    Either variable of the allocator alone would be ignored: the new one by torch before 2.9, and by later ones where the
    user's shell sets the old one.
    """
    found: dict[str, str | Shell] = dict.fromkeys(VARIABLES, one.alloc_conf) if one.alloc_conf else {}
    if one.zero.offload_optimizer:
        gpus = cluster.gpus
        found["OMP_NUM_THREADS"] = Shell("$(nproc)" if gpus == 1 else f"$(( ($(nproc) + {gpus - 1}) / {gpus} ))")
    return found


def _alloc_note(one: Recommendation) -> tuple[str, ...]:
    """Say that the shell has settings of torch's allocator, where the plan is without."""
    held = [name for name in VARIABLES if os.environ.get(name)]
    return (f"the plan is of torch's own allocator settings: unset {held[0]} first",) if held and not one.alloc_conf else ()


def _swap_note(one: Recommendation) -> tuple[str, ...]:
    zero = one.zero
    swaps = OffloadDevice.NVME in (zero.offload_optimizer.device, zero.offload_param.device)
    paths = {zero.offload_optimizer.nvme_path, zero.offload_param.nvme_path}
    return (f"swap files go to {NVME_PATH}: name another folder by --nvme-path",) if swaps and NVME_PATH in paths else ()


def model_of(place: object, spec: ModelSpec) -> Model:
    """Return the source from which a script gets the model, which the user named by `place`."""
    if not isinstance(place, str | os.PathLike):
        return Model(spec.name if spec.source in ("catalog", "hub") else "", spec.auto_class)
    path = os.path.expanduser(os.fspath(place))
    if spec.source == "catalog" and not os.path.exists(path):
        return Model(hub_id(path), spec.auto_class)
    if os.path.basename(path) == "config.json" and os.path.isfile(path):
        path = os.path.dirname(path) or "."  # where its weights and its tokenizer are, if there are any
    if os.path.isdir(path):
        return Model(path, spec.auto_class, any(name.endswith(_WEIGHTS) for name in os.listdir(path)))
    return Model("" if os.path.isfile(path) else path, spec.auto_class)


def form_of(engine: Engine, target: Target) -> Form:
    """The form that is asked for.

    Raises:
        BadInput: a form, or a launcher, that the engine does not have; a form that needs a script to write; a place that is
            not asked for.
    """
    forms, launcher = engine.forms(), target.launcher
    if launcher is not None and launcher not in LAUNCHERS:
        remedy = f"use one of {', '.join(LAUNCHERS)}"
        raise BadInput(f"unknown launcher {launcher[:40]!r}", where="--launcher", remedy=remedy)
    if not forms:
        raise BadInput(
            f"{engine.name} reads no file", where="--output", remedy="give your program the micro batch of the table"
        )
    name = target.form or next(iter(forms))
    if name not in forms:
        others = [other for other in engine_names() if name in find_engine(other).forms()]
        what = f"{name} is not a form of {engine.name}" if others else f"unknown form {name[:40]!r}"
        own = f"use --form {', '.join(forms)}" if len(forms) == 1 else f"use one of {', '.join(forms)}"
        raise BadInput(what, where="--form", remedy=f"{own}, or --engine {' or '.join(others)}" if others else own)
    form = forms[name]
    if launcher is not None and launcher not in form.launchers:
        remedy = f"use {' or '.join(form.launchers)}"
        raise BadInput(f"{launcher} does not start the form {name} of {engine.name}", where="--launcher", remedy=remedy)
    require_hosts(launcher or form.launchers[0], target.hosts)
    if target.new_script is not None and form.script is None:
        raise BadInput(f"no script is written for the form {name}", where="--new-script", remedy="give your own by --script")
    if target.new_script is None and not form.main:
        others = [other for other in forms if forms[other].main]
        also = f", or --form {' or '.join(others)}" if others else ""
        raise BadInput(
            f"a program in the form {name} of {engine.name} reads no file",
            where="--output",
            remedy=f"give --new-script train.py, which holds it all{also}",
        )
    return form


def output_of(target: Target, form: Form) -> str:
    """The path of the main file; one in its folder where the form has none."""
    output = target.output
    main = form.main or "files"
    if output is None:
        return os.path.join(os.path.dirname(target.new_script or ""), main)
    return os.path.join(output, main) if output.endswith(os.sep) or os.path.isdir(output) else output
