"""A Document: keys and values of one file, whatever its syntax, before anyone asks which program owns it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zeroplan.core.documents import CONFIG, read_document, text_of
from zeroplan.core.errors import BadInput
from zeroplan.core.files import file_kind, read_bytes
from zeroplan.interop.programs.lightning_script import read_script
from zeroplan.interop.programs.notebooks import code_of
from zeroplan.interop.programs.pipeline_script import PipelineScript, read_pipeline_script
from zeroplan.interop.programs.script_defaults import ScriptDefaults, script_defaults
from zeroplan.interop.programs.script_reader import RunScript
from zeroplan.interop.programs.shell import Command, training_command
from zeroplan.interop.programs.strangers import refuse_other_program

#: Names that end so hold a command line.
_SCRIPTS = ("sh", "bash", "zsh", "slurm", "sbatch", "txt", "job", "pbs")
#: What a script has that builds its run's arguments, and what one has that takes them from its command line.
_MAKES_ARGUMENTS = (b"TrainingArguments(", b"SFTConfig(", b"DPOConfig(", b"Config(\n", b"lightning")
_PARSES_ARGUMENTS = (b"HfArgumentParser", b"TrlParser", b"parse_args_into_dataclasses")
#: What only a script with a loop of its own calls.
_BACKWARD = re.compile(rb"\.backward\(")
#: Folders above a file's own in which a path of it is looked for.
_FOLDERS_ABOVE = 5


@dataclass(frozen=True, slots=True)
class Document:
    """One file's keys and values.

    Attributes:
        data: by key.
        name: for messages: the path, or what the object is.
        folder: where the file is; None for an object.
        command: the command line that the file holds, if it is a script.
        task: what a flag says that the run does; empty where none does.
        pipeline: what a Python script says of the PipelineModule that it builds.
        script: what a Python script says of the arguments that it builds.
        version: of its program, where a flag names one.
        defaults: of the dataclasses of the script that the command starts.
    """

    data: Mapping[str, Any]
    name: str
    folder: Path | None = None
    command: Command | None = field(default=None)
    task: str = ""
    pipeline: PipelineScript | None = None
    script: RunScript | None = None
    version: str = ""
    defaults: ScriptDefaults | None = None

    def has(self, *keys: str) -> tuple[str, ...]:
        """Return those of the keys that the file holds."""
        return tuple(key for key in keys if key in self.data)

    def starts(self, *words: str) -> tuple[str, ...]:
        """Return the command's first words if they end in one of `words`, such as ``swift sft``; else nothing."""
        if self.command is None:
            return ()
        return tuple(word for word in words if f" {self.command.program} ".find(f" {word} ") >= 0)


def load_document(source: Any) -> Document:
    """Load the document of a path, a mapping, or an object with ``to_dict`` such as ``transformers.TrainingArguments``.

    Raises:
        BadInput: when it cannot be read or holds no keys and values.
    """
    if isinstance(source, str | os.PathLike):
        return _from_path(os.fspath(source))
    if isinstance(source, Mapping):
        return Document(source, "--from")
    if callable(getattr(source, "to_dict", None)):
        return Document(source.to_dict(), type(source).__name__)
    raise BadInput(f"a {type(source).__name__} is no configuration", where="--from", remedy="give a path, a dict or arguments")


def _from_path(path: str) -> Document:
    folder = Path(path).parent
    if path == "-":
        raise BadInput("standard input is not read", where="--from", remedy="give the path of a file")
    if file_kind(path) == "folder":
        inside = sorted(one.name for one in Path(path).iterdir() if one.suffix in (".json", ".yaml", ".yml", ".sh"))
        some = f": {', '.join(inside[:4])[:160]}" if inside else ""
        raise BadInput("is a folder, not a file", where=path, remedy=f"give the file of the run's arguments{some}")
    if path.lower().rpartition(".")[2] in _SCRIPTS:
        text = text_of(read_bytes(path, CONFIG.size), path)
        refuse_other_program(text, path)
        command = training_command(
            text, path, lambda program: any(takes(folder / program) for takes in (_builds_pipeline, _names_run, _loops))
        )
        if _builds_pipeline(script := folder / command.program):
            return Document({}, path, folder, pipeline=_pipeline_of(script, command))
        if _names_run(script) and (found := _started(script, command)) is not None:
            return Document(found.data, path, folder, replace(command, flags={}), script=found)
        if _loops(script):
            text = text_of(read_bytes(str(script), CONFIG.size), str(script))
            found = read_script(text, str(script), command.flags, command.files, command.environment)
            return Document(found.data, path, folder, replace(command, flags={}), script=found)
        return Document(command.flags, path, folder, command, defaults=_defaults_of(script))
    if path.lower().endswith((".py", ".ipynb")):
        text = text_of(read_bytes(path, CONFIG.size), path)
        text = code_of(text, path) if path.lower().endswith(".ipynb") else text
        if "PipelineModule" in text:
            return Document({}, path, folder, pipeline=read_pipeline_script(text, path))
        found = read_script(text, path)
        return Document(found.data, path, folder, script=found)
    return Document(interpolated(read_document(path)), path, folder)


def _builds_pipeline(script: Path) -> bool:
    """Return whether a program is a Python script in reach whose text names a PipelineModule."""
    if script.suffix != ".py" or not os.path.isfile(script) or os.path.getsize(script) > CONFIG.size:
        return False
    return b"PipelineModule(" in script.read_bytes()


def _names_run(script: Path) -> bool:
    """Return whether a program is a Python script in reach that makes its arguments itself, not by a parser of transformers."""
    if script.suffix != ".py" or not os.path.isfile(script) or os.path.getsize(script) > CONFIG.size:
        return False
    text = script.read_bytes()
    return any(word in text for word in _MAKES_ARGUMENTS) and not any(word in text for word in _PARSES_ARGUMENTS)


def _loops(script: Path) -> bool:
    """Whether a script in reach trains by a loop of its own; transformers' examples of loops are known by their names."""
    named = script.suffix == ".py" and "_no_trainer" not in script.name
    if not named or not os.path.isfile(script) or os.path.getsize(script) > CONFIG.size:
        return False
    text = script.read_bytes()
    return _BACKWARD.search(text) is not None and not any(word in text for word in (*_PARSES_ARGUMENTS, *_MAKES_ARGUMENTS))


def _started(script: Path, command: Command) -> RunScript | None:
    """Return what a script says that a command starts; None where it cannot be read, so that the command's flags are all."""
    text = text_of(read_bytes(str(script), CONFIG.size), str(script))
    try:
        return read_script(text, str(script), command.flags, command.files, command.environment)
    except BadInput:
        return None


def _defaults_of(script: Path) -> ScriptDefaults | None:
    """Return the defaults of a script in reach that hands its dataclasses to a parser of transformers."""
    if script.suffix != ".py" or not os.path.isfile(script) or os.path.getsize(script) > CONFIG.size:
        return None
    if not any(word in script.read_bytes() for word in _PARSES_ARGUMENTS):
        return None
    try:
        return script_defaults(text_of(read_bytes(str(script), CONFIG.size), str(script)), str(script))
    except (BadInput, RecursionError):
        return None


def _pipeline_of(script: Path, command: Command) -> PipelineScript:
    text = text_of(read_bytes(str(script), CONFIG.size), str(script))
    found = read_pipeline_script(text, str(script), command.flags, command.files)
    return replace(found, gpus=command.gpus, nodes=command.nodes)


_INTERPOLATION = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
_MOST_INTERPOLATED = 1 << 12


def interpolated(data: dict[str, Any]) -> dict[str, Any]:
    """Put in the values that OmegaConf's ``${a.b}`` names in the same file; what the file does not have stays as it is."""

    def named(path: str) -> Any:
        value: Any = data
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def filled(value: Any, rounds: int = 4) -> Any:
        if isinstance(value, dict):
            return {key: filled(item) for key, item in value.items()}
        if isinstance(value, list):
            return [filled(item) for item in value]
        if not isinstance(value, str) or "${" not in value or rounds == 0:
            return value
        whole = _INTERPOLATION.fullmatch(value)
        if whole is not None:
            found = named(whole[1])
            return value if found is None or isinstance(found, dict | list) else filled(found, rounds - 1)

        def text(match: re.Match[str]) -> str:
            found = named(match[1])
            return match[0] if found is None or isinstance(found, dict | list) else str(found)

        after = _INTERPOLATION.sub(text, value)
        return value if after == value or len(after) > _MOST_INTERPOLATED else filled(after, rounds - 1)

    return dict(filled(data))


def find_beside(value: str, document: Document, key: str) -> Path:
    """Find the file that a key names: beside the document, from the working folder, or from a folder above the document's.

    The last is where people start scripts of a repository: at its root.

    Raises:
        BadInput: when none is there; the message names the first two.
    """
    if "$" in value:
        raise BadInput(f"{value[:60]!r} is a variable", where=f"{document.name}: {key}", remedy="put its value in")
    places, above = [Path(value)], []
    if document.folder is not None and not Path(value).is_absolute():
        places.insert(0, document.folder / value)
        above = [folder / value for folder in list(document.folder.absolute().parents)[:_FOLDERS_ABOVE]]
    for place in (*places, *above):
        if os.path.isfile(place):  # Path.is_file raises where a name is too long
            return place
    tried = " or ".join(dict.fromkeys(str(place)[:200] for place in places))
    raise BadInput(f"there is no {tried}", where=f"{document.name}: {key}", remedy="put the file at one of these places")
