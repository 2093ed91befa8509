"""Files and folders that are either complete or absent, even if the process or the machine dies."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

from zeroplan.core.errors import BadInput
from zeroplan.core.plumbing.files import read_bytes, replace_file

LATEST = "latest"
STATE = "state.json"
#: File systems allow names of 255 bytes; the folders beside a checkpoint have longer ones than it.
_LONGEST_TAG = 200


def require_tag(tag: object, where: str) -> str:
    """Checks that `tag` can be the name of a folder.

    Raises:
        BadInput: that says why not.
    """
    if not isinstance(tag, str):
        raise BadInput(f"a {type(tag).__name__} is no tag", where=where, remedy="give a text")
    length = len(os.fsencode(tag)) if tag.isprintable() else 0
    if length > _LONGEST_TAG:
        raise BadInput(
            f"a tag of {length} bytes is too long for a folder's name", where=where, remedy=f"use at most {_LONGEST_TAG}"
        )
    if not length or tag != Path(tag).name or tag.startswith(".") or tag == LATEST:
        raise BadInput(f"{tag[:80]!r} is not a name", where=where, remedy="give a plain name, without / and a dot before it")
    return tag


def sync_folder(folder: Path) -> None:
    """Makes the names in `folder` durable (fsync)."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_durably(path: Path, data: bytes) -> None:
    """Writes or replaces a file atomically and durably."""
    replace_file(path, data)
    sync_folder(path.parent)


def unfinished(folder: Path, tag: str) -> Path:
    """The folder of checkpoint `tag` while it is being saved."""
    return folder / f".{tag}.saving"


def replaced(folder: Path, tag: str) -> Path:
    """The folder of an older checkpoint of the same tag until the new one is in place."""
    return folder / f".{tag}.replaced"


def begin(folder: Path, tag: str) -> Path:
    """Makes an empty :func:`unfinished` folder for a new checkpoint and returns it.

    Raises:
        BadInput: when something that is no checkpoint has the name.
        OSError: when the system does not make the folder.
    """
    _require_folder(folder)
    final, latest = folder / tag, folder / LATEST
    if os.path.lexists(final) and (final.is_symlink() or not final.is_dir()):
        raise BadInput("is no folder, so a checkpoint cannot replace it", where=str(final), remedy="use another tag")
    if latest.is_dir():
        raise BadInput("is a folder, where the newest tag is written", where=str(latest), remedy="remove it")
    path = unfinished(folder, tag)
    abandon(folder, tag)
    path.mkdir(parents=True)
    return path


def abandon(folder: Path, tag: str) -> None:
    """Removes what there is of an unfinished checkpoint."""
    shutil.rmtree(unfinished(folder, tag), ignore_errors=True)


def finish(folder: Path, tag: str) -> None:
    """Moves the complete checkpoint to its place; an older one of the same tag stays available until then.

    Raises:
        OSError: when the system does not; the older one is in its place then.
    """
    new, final, old = unfinished(folder, tag), folder / tag, replaced(folder, tag)
    sync_folder(new)
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(final, old)
    try:
        os.rename(new, final)
    except OSError:
        if old.exists():
            os.rename(old, final)
        raise
    sync_folder(folder)
    shutil.rmtree(old, ignore_errors=True)


def find(folder: Path, tag: str | None) -> Path | None:
    """The folder of checkpoint `tag`, or of the latest if it is None; None when there is no latest one.

    Raises:
        BadInput: when the named one does not exist, or the file ``latest`` names none.
        OSError: when the system does not let this user look.
    """
    _require_folder(folder)
    if tag is None:
        if not _is_there(folder / LATEST):
            return None
        tag = latest(folder)
    else:
        require_tag(tag, "load_checkpoint")
    for path in (folder / tag, replaced(folder, tag)):  # the second if a process died between the renames of finish()
        if _is_there(path / STATE):
            return path
    held = "has no state.json" if (folder / tag).is_dir() else "is no folder" if os.path.lexists(folder / tag) else ""
    raise BadInput(
        f"checkpoint {tag!r} is not whole: it {held}" if held else f"there is no checkpoint {tag!r}",
        where=str(folder),
        remedy=_remedy(folder, tag),
    )


def latest(folder: Path) -> str:
    """The tag in the file ``latest``.

    Raises:
        BadInput: when it holds none.
    """
    pointer, remedy = folder / LATEST, _remedy(folder, "")
    text = read_bytes(str(pointer), 4 * _LONGEST_TAG, remedy=remedy).decode(errors="replace").strip()
    try:
        return require_tag(text, str(pointer))
    except BadInput as fault:
        raise BadInput(fault.what, where=str(pointer), remedy=remedy) from None


def _require_folder(folder: Path) -> None:
    if os.path.lexists(folder) and not folder.is_dir():
        what = "is a link to nothing" if folder.is_symlink() and not folder.exists() else "is no folder"
        raise BadInput(what, where=str(folder), remedy="give a folder for checkpoints")


def _is_there(path: Path) -> bool:
    """Returns whether there is anything, a dangling link included. A folder that may not be looked into is an error, not a
    no.
    """
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _remedy(folder: Path, but: str) -> str:
    other = another(folder / but if but else folder / LATEST)
    return f"name another by its tag, such as {other!r}" if other else "give the folder that checkpoints were saved to"


def another(checkpoint: Path) -> str:
    """The tag of the checkpoint beside this one that was saved last; empty if there is none."""
    found: list[tuple[float, str]] = []
    with suppress(OSError):
        for path in checkpoint.parent.iterdir():
            if path.name != checkpoint.name and not path.name.startswith("."):
                with suppress(OSError, ValueError):
                    state = json.loads(read_bytes(str(path / STATE), 1 << 30))
                    if isinstance(state, dict) and "checksum" in state:
                        found.append(((path / STATE).stat().st_mtime, path.name))
    return max(found, default=(0.0, ""))[1]
