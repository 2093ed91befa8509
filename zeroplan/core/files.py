"""Files that are either there in full or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from zeroplan.core.errors import BadInput


def write_atomic(path: str | os.PathLike[str], text: str) -> None:
    """Write UTF-8 `text` to `path` so that a reader or a crash never meets half a file.

    A temporary file in the same folder is flushed to disk and renamed over `path`, whose permissions it takes over.

    Raises:
        BadInput: when the folder is missing or the place cannot be written.
    """
    target = Path(path)
    temporary: str | None = None
    try:
        if target.is_dir():
            raise BadInput("is a folder", where=str(target), remedy="give the name of a file")
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask()
        descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name[:64]}.", dir=target.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(mode)
        os.replace(temporary, target)
        temporary = None
    except (OSError, ValueError) as error:
        if isinstance(error, BadInput):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise BadInput(f"cannot be written ({reason})", where=str(target), remedy="give a writable place") from None
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
