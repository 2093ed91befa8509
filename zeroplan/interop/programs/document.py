"""A Document: keys and values of one file, whatever its syntax, before anyone asks which program owns it."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.plumbing.documents import CONFIG, parse_json, read_document, text_of
from zeroplan.core.plumbing.files import file_kind, is_capture, is_file, read_bytes
from zeroplan.interop.programs.pipeline_script import PipelineScript, read_pipeline_script
from zeroplan.interop.programs.refused_files import refuse_other_program
from zeroplan.interop.programs.script import read_script
from zeroplan.interop.programs.script_defaults import ScriptDefaults, imported, parses_arguments, script_defaults
from zeroplan.interop.programs.script_reader import RunScript
from zeroplan.interop.programs.shell import Command, training_command

#: Names that end so hold a command line.
_SCRIPTS = ("sh", "bash", "zsh", "slurm", "sbatch", "txt", "job", "pbs")
#: What a script has that builds its run's arguments, and what one has that takes them from its command line.
_MAKES_ARGUMENTS = ("TrainingArguments(", "SFTConfig(", "DPOConfig(", "Config(\n")
#: In the names of transformers' examples of loops, whose defaults are known.
_LOOP_EXAMPLE = "_no_trainer"
#: What only a script with a loop or a module of its own has.
_OWN_CODE = re.compile(r"\.backward\(|\bLightningModule\b(?!.*\bLightningCLI\b)", re.DOTALL)
#: Programs that are Python scripts or modules.
_PYTHON = re.compile(r"\.py$|^[A-Za-z_]\w*(\.\w+)+$")
#: Folders above a file's own in which a path of it is looked for; the one with ``.git`` is the last.
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
        unread: why the script that the command starts is not read; empty where it is, or where it is a program's own.
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
    unread: str = ""

    def has(self, *keys: str) -> tuple[str, ...]:
        """Return those of the keys that the file holds."""
        return tuple(key for key in keys if key in self.data)

    def starts(self, *words: str) -> tuple[str, ...]:
        """Return the command's first words if they end in one of `words`, such as ``swift sft``; else nothing."""
        if self.command is None:
            return ()
        return tuple(word for word in words if f" {self.command.program} ".find(f" {word} ") >= 0)


class PrintedAnswer(BadInput):
    """A file that holds what ``--json`` printed."""


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
    if is_capture(path):
        raise BadInput("is a captured run, which holds no settings", where=path, remedy="zeroplan estimate --from takes it")
    if path.lower().rpartition(".")[2] in _SCRIPTS:
        return _of_shell(path, folder)
    if path.lower().endswith((".py", ".ipynb")):
        text = text_of(read_bytes(path, CONFIG.size), path)
        text = code_of(text, path) if path.lower().endswith(".ipynb") else text
        if "PipelineModule" in text:
            return Document({}, path, folder, pipeline=read_pipeline_script(text, path))
        found = read_script(text, path)
        return Document(found.data, path, folder, script=found)
    data = interpolated(read_document(path))
    if isinstance(printed := data.get("zeroplan"), Mapping) and "schema" in data and "version" in printed:
        what, remedy = "is an answer that zeroplan printed, and no configuration", "give the files that were asked about"
        raise PrintedAnswer(what, where=path, remedy=remedy)
    return Document(data, path, folder)


def _of_shell(path: str, folder: Path) -> Document:
    """Read a shell script by what it starts: a Python script's own run, else the command's flags."""
    text = text_of(read_bytes(path, CONFIG.size), path)
    refuse_other_program(text, path)
    trains = (_builds_pipeline, _names_run, _loops)
    command = training_command(
        text,
        path,
        lambda name: found_from(name, folder),
        lambda one: (script := started_script(one, folder)) is not None and any(kind(script) for kind in trains),
    )
    script = started_script(command, folder)
    if script is None:
        says = "the script is not here: what it does with its flags, and its own defaults, are unknown"
        return Document(command.flags, path, folder, command, unread=says if _PYTHON.search(command.program) else "")
    text = _text(script)
    if _builds_pipeline(script):
        pipeline = read_pipeline_script(text, str(script), command.flags, command.files)
        return Document({}, path, folder, pipeline=replace(pipeline, gpus=command.gpus, nodes=command.nodes))
    if _loops(script):
        what = f"starts {script.name}, which trains by a loop of its own, or a module: no text tells what that allocates"
        raise BadInput(what, where=path, remedy=f"zeroplan capture -- bash {path} runs it; or give its ds_config")
    if _names_run(script):
        try:
            found = read_script(text, str(script), command.flags, command.files, command.environment)
        except BadInput as error:
            return Document(command.flags, path, folder, command, unread=f"{script.name} is not read: {error.what}")
        return Document(found.data, path, folder, replace(command, flags={}), script=found)
    return _with_defaults(Document(command.flags, path, folder, command), script)


def _text(script: Path) -> str:
    """Return a Python script's text, empty for one that is none or too long."""
    size = os.path.getsize(script)
    return text_of(read_bytes(str(script), CONFIG.size), str(script)) if script.suffix == ".py" and size <= CONFIG.size else ""


def _builds_pipeline(script: Path) -> bool:
    return "PipelineModule(" in _text(script)


def _names_run(script: Path) -> bool:
    """Whether a script makes its arguments itself, not by a parser of transformers."""
    text = _text(script)
    return any(word in text for word in _MAKES_ARGUMENTS) and not parses_arguments(text)


def _loops(script: Path) -> bool:
    """Whether a script trains by a loop, or a module of Lightning's, of its own; transformers' examples of loops are known by
    their names.
    """
    text = _text(script)
    others = parses_arguments(text) or any(word in text for word in _MAKES_ARGUMENTS) or _LOOP_EXAMPLE in script.name
    return _OWN_CODE.search(text) is not None and not others


def _with_defaults(document: Document, script: Path) -> Document:
    """Return the document with the defaults of the dataclasses that the script hands to a parser of transformers, or the one
    module that it imports for that.
    """
    text, name = _text(script), script.name
    try:
        if text and not parses_arguments(text):
            places = (found_from(f"{one.replace('.', '/')}.py", script.parent) for one in imported(text, str(script)))
            parsers = [place for place in dict.fromkeys(places) if place is not None and parses_arguments(_text(place))]
            text, script = (_text(parsers[0]), parsers[0]) if len(parsers) == 1 else ("", script)
        if text:
            return replace(document, defaults=script_defaults(text, str(script)))
    except (BadInput, RecursionError):
        pass
    if _LOOP_EXAMPLE in name:
        return document
    says = f"{name} takes its arguments in a way that is not read: its own defaults are unknown; zeroplan capture runs it"
    return replace(document, unread=says)


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


def find_named_file(value: str, document: Document, key: str) -> Path:
    """Find the file that a key names: beside the document, from the working folder, or from a folder above the document's.

    The last is where people start scripts of a repository: at its root.

    Raises:
        BadInput: when none is there.
    """
    if "$" in value:
        raise BadInput(f"{value[:60]!r} is a variable", where=f"{document.name}: {key}", remedy="put its value in")
    run_in = None if document.command is None else document.command.folder
    found = found_from(value, document.folder, run_in)
    if found is not None:
        return found
    remedy = "put it beside that file, or where the run starts"
    raise BadInput(f"there is no {value[:200]}", where=f"{document.name}: {key}", remedy=remedy)


def found_from(value: str, folder: Path | None, run_in: str | None = None) -> Path | None:
    """Find a file that a command or a file names, None where it is not there.

    Args:
        value: the path.
        folder: that of the file that names it; None for an object.
        run_in: where a command runs, as the script that starts it says.
    """
    if "$" in value:
        return None
    # Path.is_file raises where a name is too long.
    return next((place for place in _places(value, folder, run_in) if is_file(place)), None)


def _places(value: str, folder: Path | None, run_in: str | None) -> list[Path]:
    """List where a path may be: for a command that changes its folder, seen from there first."""
    if folder is None or Path(value).is_absolute():
        return [Path(value)]
    starts, above = [folder, Path()], folder.absolute()
    of_nobody = {Path.home(), Path(tempfile.gettempdir()), Path(above.anchor)}  # a file there belongs to something else
    for _ in range(_FOLDERS_ABOVE):
        if (above / ".git").exists() or above.parent in of_nobody | {above}:
            break
        above = above.parent
        starts.append(above)
    return [Path(os.path.normpath(start / part / value)) for part in dict.fromkeys((run_in or "", "")) for start in starts]


def started_script(command: Command, folder: Path) -> Path | None:
    """Find the Python file that a command starts, as a path or as a module; None where it is not there."""
    names = [command.program]
    if _PYTHON.search(command.program) and not command.program.endswith(".py"):
        module = command.program.replace(".", "/")
        names = [f"{module}.py", f"src/{module}.py", f"{module}/__main__.py"]
    places = (found_from(name, folder, command.folder) for name in names)
    return next((one for one in places if one is not None), None)


def code_of(text: str, name: str) -> str:
    """Return the Python of a notebook: shell commands, magics and questions are taken out, and cells of other languages.

    Raises:
        BadInput: it is no notebook.
    """
    data = parse_json(text, name)
    cells = data.get("cells") if isinstance(data, dict) else None
    if not isinstance(cells, list):
        raise BadInput("holds no cells", where=name, remedy="give a notebook of version 4, or its script")
    parts = []
    for cell in cells:
        if not isinstance(cell, dict) or cell.get("cell_type") != "code":
            continue
        source = cell.get("source")
        lines = source if isinstance(source, list) else str(source or "").splitlines(keepends=True)
        code = "".join(line for line in map(str, lines))
        if code.lstrip().startswith("%%") and not code.lstrip().startswith(("%%time", "%%capture")):
            continue
        kept = (_plain(line) for line in code.splitlines())
        parts.append("\n".join(kept))
    return "\n".join(parts) + "\n"


def _plain(line: str) -> str:
    """A line that Python can read: one of IPython's own becomes ``pass``, so that lines keep their numbers."""
    bare = line.lstrip()
    own = bare.startswith(("!", "%", "?")) or bare.endswith("?")
    return line[: len(line) - len(bare)] + "pass" if own else line
