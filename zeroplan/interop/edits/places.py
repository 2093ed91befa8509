"""The files in which a user's run says its settings: what each is, and which of them names which."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.plumbing.documents import CONFIG, text_of
from zeroplan.core.plumbing.files import read_bytes
from zeroplan.ds_config.source import load_source
from zeroplan.interop.programs.accelerate import launch_document
from zeroplan.interop.programs.document import Document, find_named_file, load_document
from zeroplan.interop.programs.registry import owner_of, program_named
from zeroplan.interop.readers import argument_files

DS_CONFIG, ACCELERATE = "ds_config", "accelerate"
_KINDS = {"json": "json", "yaml": "yaml", "yml": "yaml", "py": "python"}


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One mapping of settings in a file.

    Attributes:
        path: of the file.
        kind: of its text: ``json``, ``yaml``, ``shell``, ``python``, or empty for one that is not edited.
        program: whose settings they are; :data:`DS_CONFIG` and :data:`ACCELERATE` among them.
        data: the settings.
        within: the keys that lead to them in the file.
        named_by: the place that names the file, and the key by which; None for one that the user named.
        says: the path as that place writes it.
    """

    path: str
    kind: str
    program: str
    data: Mapping[str, Any] = field(default_factory=dict)
    within: tuple[str, ...] = ()
    named_by: tuple[SourceFile, str] | None = None
    says: str = ""

    def has(self, key: str) -> bool:
        """Whether it says the dotted key."""
        return self.value(key) is not None

    def value(self, key: str) -> Any:
        """The value of a dotted key; None where it is not there."""
        if key in self.data:
            return self.data[key]
        found: Any = self.data
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found


def text_at(path: str) -> str:
    """Read the text of a file of settings."""
    return text_of(read_bytes(path, CONFIG.size), path)


def places_of(sources: Sequence[Any], program: str | None = None) -> list[SourceFile]:
    """Return the places of all files that sources name, each once, those first that name others.

    Raises:
        BadInput: as reading them does.
    """
    found: dict[tuple[str, tuple[str, ...], str], SourceFile] = {}
    for source in sources:
        if isinstance(source, str | os.PathLike):
            for one in _places(os.fspath(source), program):
                key = os.path.realpath(one.path), one.within, one.program
                if key not in found or (found[key].named_by is None and one.named_by is not None):
                    found[key] = one
    return list(found.values())


def _places(
    path: str, program: str | None, named_by: tuple[SourceFile, str] | None = None, says: str = ""
) -> Iterator[SourceFile]:
    document = load_document(path)
    command = document.command
    kind = _KINDS.get(path.lower().rpartition(".")[2], "")
    kind = "shell" if command is not None or (document.data and kind == "" and not path.endswith(".toml")) else kind
    if command is None:
        owner = _owner(document, program)
        place = SourceFile(path, kind, owner, document.data, (), named_by, says)
        yield place
        yield from _named_by(place, document)
        return
    script = document.script
    owner = _owner(document, program) if document.data or script is not None else ""
    place = SourceFile(path, "shell", owner, command.flags or document.data, (), named_by, says)
    yield place
    yield SourceFile(path, "shell", "launcher", command.launch_flags)
    yield from _named_by(place, document)
    for one in argument_files(document, command):
        written = next((word for word in (*command.files, *map(str, command.flags.values())) if str(one).endswith(word)), "")
        yield from _places(str(one), program, (place, ""), written)
    if command.config_file is not None:
        config = find_named_file(command.config_file, document, "--config_file")
        yield from _places(str(config), None, (place, "config_file"), command.config_file)
    if (flags := launch_document(command, document)) is not None:
        for section in ("deepspeed_config", "fsdp_config"):
            if isinstance(flags.data.get(section), Mapping):
                yield SourceFile(path, "shell", ACCELERATE, {section: flags.data[section]})


def _owner(document: Document, program: str | None) -> str:
    try:
        return program_named(program).name if program is not None else owner_of(document).name
    except BadInput:
        return ""


def _named_by(place: SourceFile, document: Document) -> Iterator[SourceFile]:
    """Yield the ds_config that a file names or holds."""
    key = "deepspeed_config.deepspeed_config_file" if place.program == ACCELERATE else "deepspeed"
    if place.value("deepspeed") is True:
        key = "deepspeed_config"
    said = place.value(key)
    if isinstance(said, Mapping):
        yield SourceFile(place.path, place.kind, DS_CONFIG, said, tuple(key.split(".")))
    elif isinstance(said, str) and said.lower().endswith(".json"):
        path = str(find_named_file(said, document, key))
        yield SourceFile(path, "json", DS_CONFIG, load_source(Path(path))[0], (), (place, key), said)
