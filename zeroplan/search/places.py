"""The places that ``recommend`` writes to: refused before the search where they cannot be written, and never another's file."""

from __future__ import annotations

import os
from collections.abc import Sequence

from zeroplan.core.errors import BadInput
from zeroplan.core.plumbing.documents import read_document
from zeroplan.core.plumbing.files import read_head, require_writable
from zeroplan.interop.forms.configuration import DS_CONFIG, WRITTEN, Form
from zeroplan.interop.forms.launch import EXPORTED
from zeroplan.interop.forms.program import ADAPTER_KEYS, ADAPTERS
from zeroplan.interop.forms.scripts.lightning import ARGUMENTS as TRAINER_ARGUMENTS
from zeroplan.interop.forms.scripts.parts import MARK
from zeroplan.interop.forms.trainer import ARGUMENTS
from zeroplan.search.files import Files, Target, output_of

#: Names of files that no other program reads or writes.
_OWN_NAMES = (ARGUMENTS, TRAINER_ARGUMENTS, EXPORTED)


def require_places(*paths: str | None) -> None:
    """Refuse, before any search, places that could not be written after it. A path that ends with a slash is a folder to be
    made, in which the others may lie.
    """
    given = [path for path in paths if path]
    made = {os.path.normpath(path) for path in given if path.endswith(os.sep)}
    for path in given:
        if os.path.isdir(path):
            require_writable(os.path.join(path, DS_CONFIG))
        elif path.endswith(os.sep):
            folder, above = os.path.normpath(path), os.path.dirname(os.path.normpath(path))
            if os.path.lexists(folder):
                raise BadInput("is a file, not a folder", where=path, remedy="name another folder")
            if above and not os.path.isdir(above):
                raise BadInput(f"there is no folder {above}", where=path, remedy="make it, or name another")
        elif os.path.normpath(os.path.dirname(path)) not in made:
            require_writable(path)


def require_no_other_program(path: str) -> None:
    """Refuse to write a new script over a program that is not one."""
    if not os.path.lexists(path):
        return
    if not read_head(path, len(MARK), where="--new-script")[0].startswith(MARK.encode()):
        raise BadInput(
            f"{path} is there already and was not written by recommend",
            where="--new-script",
            remedy="name another file, or give --script to start it",
        )


def require_not_read(source: Sequence[str], *paths: str | None) -> None:
    """Refuse to write over a file that is read: its rates and schedules are in nothing that is written."""
    read = {os.path.realpath(path) for path in source}
    for path in paths:
        if path is not None and os.path.realpath(path) in read:
            what = f"{path} is what --from reads, and what is written holds nothing of its rates and schedules"
            raise BadInput(what, where="--output", remedy="name another file, and add them there")


def require_no_other_main(form: Form, target: Target) -> None:
    """Refuse, before the search, a main file that stands where nobody named it."""
    path = output_of(target, form)
    if form.main and target.output is None and not os.path.exists(target.new_script or "") and os.path.lexists(path):
        raise _other(path)


def _other(path: str) -> BadInput:
    what = f"{path} is there already and was not written by recommend"
    return BadInput(what, where="--output", remedy="give a folder of its own, such as -o run/")


def require_no_other_files(files: Files, target: Target) -> None:
    """Refuse to write over what stands beside the files that the user named, unless an earlier run wrote it."""
    again = target.new_script is not None and os.path.exists(target.new_script)
    named = {os.path.normpath(path) for path in (target.new_script,) if path}
    if target.output is not None or again:
        named.add(os.path.normpath(next(iter(files.texts))))
    for path, text in files.texts.items():
        if os.path.normpath(path) not in named and os.path.lexists(path) and not _is_ours(path, text):
            raise _other(path)


def _is_ours(path: str, text: str) -> bool:
    """Whether a file is as it would be written, bears our mark, or has a name or keys that nobody else gives it."""
    name = os.path.basename(path)
    if name in _OWN_NAMES:
        return True
    if name == ADAPTERS:
        return ADAPTER_KEYS - {"lora_alpha"} <= set(read_document(path)) <= ADAPTER_KEYS
    most = max(len(text.encode()), 200)
    found, size = read_head(path, most)
    return WRITTEN.encode() in found or (found == text.encode() and size == len(found))
