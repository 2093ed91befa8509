"""Changed copies of a user's files in a folder: files that name a changed one name the copy, and what starts the run."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zeroplan.core.errors import BadInput
from zeroplan.interop.edits.changes import Edits
from zeroplan.interop.edits.places import SourceFile, text_at

#: Commands that take a file of arguments, by program.
_STARTS = {"llama-factory": "llamafactory-cli train", "axolotl": "axolotl train"}
#: How a script names its own folder.
_OWN_FOLDER = re.compile(r"\$0\b|\$\{?BASH_SOURCE")


@dataclass(frozen=True, slots=True)
class ChangedFiles:
    """A user's files, and what changes in them.

    Attributes:
        places: of all files.
        edits: what changes.
        alloc_conf: the allocator's settings, which a program started by no script is started with.
    """

    places: tuple[SourceFile, ...]
    edits: Edits
    alloc_conf: str = ""

    @property
    def diff(self) -> list[str]:
        """The difference of all files, as lines."""
        return [
            line
            for path, text in self.edits.texts.items()
            for line in difference(path, text_at(path) if os.path.exists(path) else "", text)
        ]


def copies(places: Sequence[SourceFile], edits: Edits, output: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the texts of the copies by their paths, and the copies' paths by those of the originals.

    Args:
        places: of all files.
        edits: what changes in which.
        output: a folder, or the path of the one copy.

    Raises:
        BadInput: several files that change, and the name of one.
    """
    changed = list(edits.texts)
    namers: dict[str, list[SourceFile]] = {}
    for place in (*places, *edits.added):
        if place.named_by is not None:
            namers.setdefault(place.path, []).append(place)
    for path in changed:  # grows while it is walked
        for place in namers.get(path, ()):
            assert place.named_by is not None
            if place.named_by[0].path not in changed:
                changed.append(place.named_by[0].path)
    folder = output.endswith(os.sep) or os.path.isdir(output)
    if not folder and len(changed) > 1:
        names = " and ".join(map(os.path.basename, changed[:3]))
        raise BadInput(f"{len(changed)} files change: {names}", where="--output", remedy="give a folder/ for their copies")
    new: dict[str, str] = {}
    for path in changed:
        name = os.path.basename(path)
        while folder and os.path.join(output, name) in new.values():
            name = f"{os.path.basename(os.path.dirname(os.path.abspath(path)))}-{name}"
        new[path] = os.path.join(output, name) if folder else output
    renamed = Edits(dict(edits.texts))
    for path in changed:
        for place in namers.get(path, ()):
            assert place.named_by is not None
            namer, key = place.named_by
            said = _named_as(place.says, path, new[path])
            if key:
                renamed.put(namer, key.split("."), said)
            else:
                text = renamed.texts.get(namer.path) or text_at(namer.path)
                renamed.texts[namer.path] = said.join(re.split(rf"(?<![\w./-]){re.escape(place.says)}(?![\w./-])", text))
    edits.left += renamed.left
    return {new[path]: renamed.texts.get(path) or text_at(path) for path in changed}, new


def _named_as(says: str, found: str, new: str) -> str:
    """The copy's path as the file that names it would write it: from where it names the original."""
    if os.path.isabs(says):
        return os.path.abspath(new)
    said, at = os.path.normpath(says), os.path.normpath(found)
    if not at.endswith(said):
        return os.path.abspath(new)
    return os.path.relpath(new, at.removesuffix(said) or ".")


def start_of(places: Sequence[SourceFile], new: Mapping[str, str], environment: Mapping[str, str]) -> tuple[str, list[str]]:
    """Return the command that starts the run with the copies, empty where none is known, and what else to do.

    Args:
        places: of all files.
        new: paths of the copies, by those of the originals.
        environment: variables that no file sets.
    """
    script = next((one.path for one in places if one.kind == "shell" and one.path in new), None)
    said = "".join(f"{name}={shlex.quote(value)} " for name, value in environment.items())
    if script is not None:
        batch = "#SBATCH" in text_at(script)
        notes = []
        if _OWN_FOLDER.search(text_at(script)):
            notes.append(f"{script} looks for files where it is: put {new[script]} there before you start it")
        return f"{'sbatch' if batch else 'bash'} {shlex.quote(new[script])}", notes
    for place in places:
        if place.path in new and place.program in _STARTS and place.named_by is None:
            return f"{said}{_STARTS[place.program]} {shlex.quote(new[place.path])}", []
    named = [one.path for one in places if one.named_by is None and one.path in new]
    notes = [f"give your program {new[path]} in place of {path}" for path in dict.fromkeys(named)]
    return "", notes + ([f"set {said.strip()} for it"] if said else [])


def difference(path: str, before: str, after: str) -> list[str]:
    """Return the unified difference of a file, one line of context."""
    name = os.path.basename(path)
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), name, f"{name}, changed", lineterm="", n=1)
    return list(lines)
