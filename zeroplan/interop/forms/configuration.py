"""The nouns of writing: a configuration, a form, and the files that a form makes of a configuration."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.plumbing.documents import dump_yaml
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.interop.training import NO_TRAINING, Training

DS_CONFIG = "ds_config.json"
#: The first line of files that know comments, by which a later run knows them as its own.
WRITTEN = "# Written by zeroplan recommend.\n"


@dataclass(frozen=True, slots=True)
class Model:
    """The source from which a training script gets its model.

    Attributes:
        place: a hub id, a folder or a config.json, as the user wrote it; empty for a bare count or an object.
        auto_class: the class of transformers that trains it.
        weights: whether there are weights at `place`; without, a script begins with random ones.
    """

    place: str = ""
    auto_class: str = ""
    weights: bool = True


@dataclass(frozen=True, slots=True)
class Configuration:
    """The configuration that a form writes.

    Attributes:
        zero: sharding and offload.
        workload: batches, precision, optimizer.
        cluster: for the numbers of nodes and GPUs.
        ds_config: the explicit ds_config, for engines that take one.
        output: the path of the main file; other files go into its folder.
        launcher: one of the form's.
        model: for a new training script.
        script: the path of the program that is started.
        new_script: whether `script` is to be written, too; else it is the user's.
        training: what the file of the run in use says of training, beside what the plan holds.
        carried: names of those values that `ds_config` holds.
        program: whose keys the form writes (:attr:`Form.program`).
    """

    zero: ZeroConfig
    workload: Workload
    cluster: Cluster
    ds_config: Mapping[str, Any] | None
    output: str
    launcher: str
    model: Model = Model()
    script: str = "train.py"
    new_script: bool = False
    training: Training = NO_TRAINING
    carried: tuple[str, ...] = ()
    program: str = ""

    def sibling(self, name: str) -> str:
        """Return the path of a file in the main file's folder. Raises BadInput: where the main file has this name."""
        path = os.path.join(os.path.dirname(self.output), name)
        if name and os.path.normpath(path) == os.path.normpath(self.output):
            what = f"{name} is another file that is written there"
            raise BadInput(what, where=f"-o {self.output}", remedy=f"name it {DS_CONFIG}, or give a folder/")
        return path

    @property
    def explicit(self) -> Mapping[str, Any]:
        """The explicit ds_config of an engine that takes one."""
        assert self.ds_config is not None
        return self.ds_config


@dataclass(frozen=True, slots=True)
class FormFiles:
    """A form's files and how its program starts.

    Attributes:
        texts: by path; the main file first.
        arguments: what the program gets on its command line.
        environment: variables that the program reads.
        accelerate_config: the file that ``accelerate launch`` reads, for a program that it starts.
        program_must: what no file can say, so that the user's own program must do it: one sentence each.
        notes: what else whoever starts the program should know.
    """

    texts: Mapping[str, str]
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    accelerate_config: str = ""
    program_must: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Form:
    """The form in which one program takes a configuration.

    Attributes:
        write: makes the files.
        launchers: what can start such a program (:data:`zeroplan.interop.forms.launch.LAUNCHERS`), the usual one first.
        main: the usual name of the main file; empty for a program that reads no file, whose script is all that is written.
        script: makes a training script; None for a form without one.
        program: whose keys for techniques the form writes, by the name that readers of files have for it; empty for a program
            of one's own.
    """

    write: Callable[[Configuration], FormFiles]
    launchers: tuple[str, ...] = ("torchrun", "slurm")
    main: str = DS_CONFIG
    script: Callable[[Configuration], str] | None = None
    program: str = ""


def json_text(data: object) -> str:
    """Write the object as the text of a JSON file."""
    return json.dumps(data, indent=2) + "\n"


def document_text(path: str, data: Mapping[str, Any]) -> str:
    """Write the object in the format that the path's ending names: JSON for ``.json``, else YAML."""
    return json_text(data) if path.endswith(".json") else WRITTEN + dump_yaml(data)
