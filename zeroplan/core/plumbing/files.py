"""Reading and writing the user's files: bounded reads of regular files only, and writes in full or not at all.

Every file that a user names is read through :func:`read_bytes`. :mod:`.documents` makes objects of what it returns.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

from zeroplan.core.errors import BadInput

_KINDS = (
    (stat.S_ISDIR, "is a folder"),
    (stat.S_ISFIFO, "is a pipe"),
    (stat.S_ISCHR, "is a device"),
    (stat.S_ISBLK, "is a device"),
    (stat.S_ISSOCK, "is a socket"),
)


def fault(path: str, what: str, where: str = "", remedy: str = "") -> BadInput:
    """Return the error to raise for a file: at its path, or, where `where` names a flag or an argument, at that."""
    path = path or "''"
    return BadInput(f"{path} {what}", where=where, remedy=remedy) if where else BadInput(what, where=path, remedy=remedy)


def refused(path: str, error: Exception, where: str = "", remedy: str = "give the path of a file") -> BadInput:
    """The error to raise where the system does not give the file."""
    if isinstance(error, FileNotFoundError):
        return fault(path, "does not exist" if where else "no such file", where, remedy)
    reason = getattr(error, "strerror", None) or str(error)
    return fault(path, f"cannot be read ({reason})", where, remedy)


def file_kind(path: str, *, where: str = "", remedy: str = "give the path of a file") -> str:
    """Return ``"folder"`` or ``"file"``: what `path` names.

    Raises:
        BadInput: when the path does not exist, cannot be reached, or is neither (a device, a pipe, a socket).
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        raise refused(path, error, where, remedy) from None
    if stat.S_ISDIR(mode):
        return "folder"
    if not stat.S_ISREG(mode):
        raise fault(path, _not_a_file(mode), where, remedy)
    return "file"


def _not_a_file(mode: int) -> str:
    return next((what for test, what in _KINDS if test(mode)), "is no file") + ", not a file"


def read_bytes(path: str, most: int, *, where: str = "", remedy: str = "give the path of a file") -> bytes:
    """The contents of a regular file of at most this many bytes. Pipes and devices are refused, never opened.

    Args:
        most: the largest size, in bytes.
        where: the flag or argument to name in messages; the path itself where it is empty.
        remedy: for messages.

    Raises:
        BadInput: when there is no such file, it cannot be read, is no regular file, or is larger.
    """
    data = read_head(path, most + 1, where=where, remedy=remedy)[0]
    if len(data) > most:
        size = f"{most >> 20} MiB" if most >= 1 << 20 else f"{most >> 10} KiB"
        raise fault(path, f"is larger than {size}", where, remedy)
    return data


#: How a file of ``zeroplan capture -o`` begins.
CAPTURE_BEGINS = b'{"recording": {"format": '


def is_capture(path: str) -> bool:
    """Return whether a file is one of ``zeroplan capture -o``, by how it begins."""
    if not path.lower().endswith(".json") or not os.path.isfile(path.replace("\0", "")):
        return False
    return read_head(path, len(CAPTURE_BEGINS))[0] == CAPTURE_BEGINS


def read_head(path: str, most: int, *, where: str = "", remedy: str = "give the path of a file") -> tuple[bytes, int]:
    """Read the first `most` bytes of a regular file; returns them with the file's size.

    Raises:
        BadInput: when there is no such file, it cannot be read, or is no regular file.
    """
    shown = _SHOWN.get().get(os.path.realpath(path.replace("\0", "")))
    if shown is not None:
        return shown[:most], len(shown)
    with _opened(path, where, remedy) as (file, size):
        data: bytes | None = file.read(most)
        if data is None:  # the kernel's files that have nothing to say now
            raise fault(path, "has nothing that can be read now", where, remedy)
        return data, size


#: Texts that stand for those of files, by real paths.
_SHOWN: ContextVar[Mapping[str, bytes]] = ContextVar("_SHOWN", default=MappingProxyType({}))


def is_file(path: str | os.PathLike[str]) -> bool:
    """Whether a regular file is there, or is read as if it were."""
    return os.path.realpath(path) in _SHOWN.get() or os.path.isfile(path)


@contextlib.contextmanager
def as_if(texts: Mapping[str, str]) -> Iterator[None]:
    """Read files within as if they held these texts, by path."""
    token = _SHOWN.set({os.path.realpath(path): text.encode() for path, text in texts.items()})
    try:
        yield
    finally:
        _SHOWN.reset(token)


@contextlib.contextmanager
def _opened(path: str, where: str, remedy: str) -> Iterator[tuple[BinaryIO, int]]:
    """Open a regular file for reading; yields it with its size in bytes."""
    if file_kind(path, where=where, remedy=remedy) == "folder":
        raise fault(path, "is a folder, not a file", where, remedy)
    try:
        # Without O_NONBLOCK, opening a pipe that took the file's place in between would wait for a writer.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
        with open(handle, "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise fault(path, _not_a_file(found.st_mode), where, remedy)
            yield file, found.st_size
    except OSError as error:
        raise refused(path, error, where, remedy) from None


def read_tail(path: str, most: int, *, where: str = "", remedy: str = "give the path of a file") -> tuple[bytes, int]:
    """Read the last `most` bytes of a regular file; returns them with the file's size.

    Raises:
        BadInput: when there is no such file, it cannot be read, or is no regular file.
    """
    with _opened(path, where, remedy) as (file, size):
        file.seek(max(0, size - most))
        return file.read(most), size


def write_atomic(path: str | os.PathLike[str], text: str) -> None:
    """Write UTF-8 `text` to a file that a user names, by :func:`replace_file`.

    Raises:
        BadInput: when the folder is missing or the place cannot be written.
    """
    write_together({os.fspath(path): text})


def write_together(texts: Mapping[str, str]) -> None:
    """Write UTF-8 texts to files that a user names: all of them or, where one cannot be written, none.

    Each lies whole beside its place before the first takes its place.

    Raises:
        BadInput: naming the file that cannot be written.
    """
    staged: list[tuple[str, Path]] = []
    try:
        for path, text in texts.items():
            with _refusing_to_write(path):
                target = _regular(path)
                staged.append((_stage(target, text.encode()), target))
        for (temporary, target), path in zip(staged, texts, strict=True):
            with _refusing_to_write(path):
                os.replace(temporary, target)
    except BaseException:
        for temporary, _ in staged:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise


def require_writable(*paths: str | None) -> None:
    """Refuse, before any work, files that could not be written after it; None stands for none.

    Raises:
        BadInput: for standard output, a folder, a device, and a place whose folder is missing or cannot be written.
    """
    for path in filter(None, paths):
        if path == "-":
            raise BadInput("standard output is no file", where=path, remedy="give the name of a file, or use --json")
        with _refusing_to_write(path):
            folder = _regular(path).parent
            if not folder.is_dir():
                raise BadInput(
                    f"there is no folder {os.path.dirname(path) or folder}", where=path, remedy="make it, or name another"
                )
            if not os.access(folder, os.W_OK):
                raise PermissionError(errno.EACCES, f"the folder {folder} is read-only")


@contextlib.contextmanager
def _refusing_to_write(path: str) -> Iterator[None]:
    """Turn what the system says against writing the file into bad input."""
    try:
        yield
    except BadInput:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadInput(f"cannot be written ({reason})", where=path, remedy="give a writable place") from None


def _regular(path: str) -> Path:
    """The file to write, behind links.

    Raises:
        BadInput: when a folder, a device or a pipe is there. Renaming a file over a device would take the device away.
    """
    target = Path(os.path.realpath(path))
    mode = target.stat().st_mode if target.exists() else stat.S_IFREG
    if not stat.S_ISREG(mode):
        what = "is a folder" if stat.S_ISDIR(mode) else _not_a_file(mode)
        raise BadInput(what, where=path, remedy="give the name of a file")
    return target


def replace_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Write or replace a file so that neither a reader nor a crash meets half of it: the one way in which zeroplan does.

    A temporary file in the same folder is flushed to disk and renamed over `path`, whose permissions it takes over.

    Raises:
        OSError: when the place cannot be written. What was there before is still there.
    """
    target = Path(path)
    temporary = _stage(target, data)
    try:
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _stage(target: Path, data: bytes) -> str:
    """Write the data to a temporary file beside `target` and flush it to disk; returns its path."""
    mode = target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask()
    descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name[:16]}.", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(mode)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return temporary


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
