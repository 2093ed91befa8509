"""Files and folders that are either complete or absent, even if the process or the machine dies."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from zeroplan.core.errors import BadInput

LATEST = "latest"
STATE = "state.json"


def sync_folder(folder: Path) -> None:
    """Makes the names in `folder` durable (fsync)."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_durably(path: Path, data: bytes) -> None:
    """Writes or replaces a file atomically and durably."""
    temporary = path.with_name(f".{path.name}.writing")
    with open(temporary, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def unfinished(folder: Path, tag: str) -> Path:
    """The folder of checkpoint `tag` while it is being saved."""
    return folder / f".{tag}.saving"


def replaced(folder: Path, tag: str) -> Path:
    """The folder of an older checkpoint of the same tag until the new one is in place."""
    return folder / f".{tag}.replaced"


def begin(folder: Path, tag: str) -> Path:
    """Makes an empty :func:`unfinished` folder for a new checkpoint and returns it."""
    path = unfinished(folder, tag)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def finish(folder: Path, tag: str) -> None:
    """Moves the complete checkpoint to its place; an older one of the same tag stays available until then."""
    final, old = folder / tag, replaced(folder, tag)
    sync_folder(unfinished(folder, tag))
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(final, old)
    os.rename(unfinished(folder, tag), final)
    sync_folder(folder)
    shutil.rmtree(old, ignore_errors=True)


def find(folder: Path, tag: str | None) -> Path | None:
    """The folder of checkpoint `tag`, or of the latest if it is None; None when there is no latest one.

    Raises:
        BadInput: when the named one does not exist.
    """
    if tag is None:
        pointer = folder / LATEST
        if not pointer.exists():
            return None
        tag = pointer.read_text().strip()
    for path in (folder / tag, replaced(folder, tag)):  # the second if a process died between the renames of finish()
        if (path / STATE).exists():
            return path
    raise BadInput(f"there is no checkpoint {tag!r}", where=str(folder), remedy="name one of the folders there")


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Writes the part of a checkpoint that is not tensors, as JSON.

    Raises:
        BadInput: when JSON cannot hold it.
    """
    try:
        text = json.dumps(state, indent=1, allow_nan=False)
    except (TypeError, ValueError) as fault:
        remedy = "keep numbers, texts, lists and dicts in client_state and the schedule's state"
        raise BadInput(f"the state cannot be written as JSON: {fault}", where="save_checkpoint", remedy=remedy) from None
    write_durably(path / STATE, text.encode())


def read_state(path: Path) -> dict[str, Any]:
    """Reads what :func:`write_state` wrote.

    Raises:
        BadInput: when the file is damaged or not of this runtime.
    """
    try:
        state = json.loads((path / STATE).read_text())
    except ValueError as fault:
        raise BadInput(f"damaged checkpoint: {fault}", where=str(path / STATE)) from None
    if not isinstance(state, dict) or state.get("format") != 1:
        raise BadInput("not a checkpoint of this runtime", where=str(path / STATE))
    return state
