"""Files of ``torch.save``, read without running any code that they name."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from zeroplan.core.errors import BadInput


def require_sums(file: Path) -> None:
    """Check the checksums that torch.save has formed, if it has; torch.load does not.

    Raises:
        BadInput: for bytes that are not those that were written.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            formed = any(one.CRC for one in archive.infolist())
            damaged = archive.testzip() if formed else None
    except (OSError, zipfile.BadZipFile):  # torch.load reads it, or says why not
        return
    if damaged is not None:
        raise BadInput(f"is damaged: {damaged!r} in it is not what was written", where=str(file), remedy="load another one")


def read_torch_file(file: Path, stand_ins: Mapping[str, Callable[..., Any]] | None = None) -> Any:
    """Read the object in a file, of tensors and plain values alone. Tensors are mapped, so that only those used are read.

    Args:
        file: the file.
        stand_ins: by the full name of a class that the file may name, what is made in its place.

    Raises:
        BadInput: when it is missing, damaged, or names anything else, which could run code.
    """
    allowed: list[Any] = [(kind, name) for name, kind in (stand_ins or {}).items()]
    with torch.serialization.safe_globals(allowed):
        try:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
        except pickle.UnpicklingError:
            named = _unsafe(file)
            what = f"names {named}, which could run code" if named else "cannot be read: it is not what torch.save writes"
            remedy = "if you trust the file, give what it names to torch.serialization.add_safe_globals()" if named else ""
            raise BadInput(what, where=str(file), remedy=remedy) from None
        except OSError as fault:
            raise BadInput(f"cannot be read: {fault.strerror or fault}", where=str(file)) from None
        except Exception as fault:  # a damaged pickle can raise anything
            lines = str(fault).strip().splitlines() or [type(fault).__name__]
            raise BadInput(f"cannot be read: {lines[0][:160]}", where=str(file)) from None


def _unsafe(file: Path) -> str:
    """Return the first name in a file that torch.load does not allow; empty where none can be found."""
    try:
        return min(torch.serialization.get_unsafe_globals_in_checkpoint(str(file)), default="")
    except Exception:  # not of the form that torch's scan knows
        return ""
