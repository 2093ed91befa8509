"""Reads files that may be anything: every fault of a path or of JSON becomes one clear line."""

from __future__ import annotations

import json
import os
import stat
from typing import Any

from zeroplan.core.errors import BadInput

#: A config or index larger than this is none (the largest published index is about 15 MB).
_LARGEST_JSON = 32 << 20


def is_local(text: str) -> bool:
    """Whether the text is meant as a path: it exists, or cannot be an id of the catalog or the hub."""
    if text.startswith(("/", "./", "../", "~", "\\")) or text.endswith((".json", ".safetensors")) or text in (".", ".."):
        return True
    try:
        os.lstat(text)
    except (OSError, ValueError):
        return text.count("/") > 1
    return True


def unreadable(path: str, error: Exception, where: str) -> BadInput:
    """The error to raise for a path that the system refused."""
    reason = getattr(error, "strerror", None) or str(error)
    return BadInput(f"{path}: {reason}", where=where, remedy="check the path, or give a model's id")


def file_kind(path: str, *, where: str = "MODEL") -> str:
    """``"folder"`` or ``"file"``.

    Raises:
        BadInput: when the path does not exist, cannot be reached, or is neither (a device, a pipe, a socket).
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        raise unreadable(path, error, where) from None
    if stat.S_ISDIR(mode):
        return "folder"
    if not stat.S_ISREG(mode):
        remedy = "give a folder, config.json or safetensors file"
        raise BadInput(f"{path} is neither a file nor a folder", where=where, remedy=remedy)
    return "file"


def read_json(path: str, *, where: str = "MODEL") -> Any:
    """The contents of a JSON file.

    Raises:
        BadInput: when it cannot be read, is not UTF-8 JSON, is nested too deeply, or is too large.
    """
    if file_kind(path, where=where) == "folder":
        raise BadInput(f"{path} is a folder, not a JSON file", where=where)
    try:
        with open(path, "rb") as stream:
            data = stream.read(_LARGEST_JSON + 1)
    except OSError as error:
        raise unreadable(path, error, where) from None
    if len(data) > _LARGEST_JSON:
        raise BadInput(f"{path} is too large for a config (over {_LARGEST_JSON >> 20} MiB)", where=where)
    return parse_json(data, path, where=where)


def parse_json(data: bytes, name: str, *, where: str = "MODEL") -> Any:
    """JSON from bytes.

    Raises:
        BadInput: when it is not UTF-8, not JSON, or nested too deeply; `name` says whose it was.
    """
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadInput(f"{name} is not UTF-8 text (byte {error.start:,})", where=where) from None
    except RecursionError:
        raise BadInput(f"{name} is nested too deeply", where=where) from None
    except ValueError as error:  # JSONDecodeError, or a number of too many digits
        raise BadInput(f"{name} is not JSON: {error}", where=where) from None
