"""From a file to a plain object: JSON as DeepSpeed takes it, refusing what would only crash later.

DeepSpeed 0.19 reads its file with Hjson and rejects duplicate keys (runtime/config.py). Of Hjson we take comments and
trailing commas, which people do use; the HF Trainer reads strict JSON, so they earn a finding.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from zeroplan.core.errors import BadInput

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
_STRING = r'"(?:[^"\\]|\\.)*"'


def load_source(source: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[dict[str, Any], str, bool]:
    """The object, its name for messages, and whether it was strict JSON.

    Args:
        source: a path, a base64 string (as DeepSpeed takes one), or the object itself, which is copied.

    Raises:
        BadInput: unreadable, too large, not UTF-8, not JSON, duplicate keys, NaN or Infinity, too deep, not an object.
    """
    if isinstance(source, Mapping):
        name, strict = "ds_config", True
        data: Any = _checked_copy(source, name)
    else:
        name = os.fspath(source)
        text = _read(name)
        data, strict = _parse(text, name)
        data = _checked_copy(data, name)
    if not isinstance(data, dict):
        raise BadInput(f"holds {_type_name(data)}, not an object", where=name, remedy='write {"zero_optimization": {…}, …}')
    return data, name, strict


def _read(name: str) -> str:
    path = Path(name)
    try:
        with path.open("rb") as file:
            blob = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        decoded = _from_base64(name)
        if decoded is not None:
            return decoded
        raise BadInput("no such file", where=name, remedy="give the path of a ds_config.json") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadInput(f"cannot be read ({reason})", where=name or "FILE", remedy="give a JSON file") from None
    if len(blob) > MAX_BYTES:
        raise BadInput(f"is larger than {MAX_BYTES >> 20} MiB", where=name, remedy="this is no ds_config.json")
    try:
        return blob.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"is not UTF-8 (byte {error.start})", where=name, remedy="save it as UTF-8") from None


def _from_base64(text: str) -> str | None:
    try:
        decoded = base64.b64decode(text, altchars=b"-_", validate=True).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None


def _parse(text: str, name: str) -> tuple[Any, bool]:
    try:
        return _json(text, name), True
    except json.JSONDecodeError as error:
        first = error
    try:
        return _json(_without_comments(text), name), False
    except json.JSONDecodeError:
        yaml = name.lower().endswith((".yaml", ".yml"))
        remedy = "other programs' YAML goes to zeroplan recommend --from" if yaml else "mend the syntax"
        what = f"is not JSON (line {first.lineno}, column {first.colno}: {first.msg})"
        raise BadInput(what, where=name, remedy=remedy) from None


def _json(text: str, name: str) -> Any:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in items:
            if key in found:
                raise BadInput(f"the key {key[:80]!r} stands twice", where=name, remedy="DeepSpeed rejects it: keep one")
            found[key] = value
        return found

    def constant(word: str) -> NoReturn:
        raise BadInput(f"holds {word}, which is not JSON", where=name, remedy="write a finite number")

    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except json.JSONDecodeError:
        raise
    except BadInput:
        raise
    except RecursionError:
        raise BadInput(f"is nested deeper than {MAX_DEPTH} levels", where=name) from None
    except ValueError as error:  # integers of thousands of digits
        raise BadInput(f"is not usable JSON ({error})", where=name) from None


def _without_comments(text: str) -> str:
    """Comments (``#``, ``//``, ``/* */``) become spaces and trailing commas go, strings stay as they are."""

    def blank(match: re.Match[str]) -> str:
        token = match[0]
        return token if token.startswith('"') else re.sub(r"[^\n]", " ", token)

    text = re.sub(rf"{_STRING}|//[^\n]*|#[^\n]*|/\*.*?\*/", blank, text, flags=re.DOTALL)
    return re.sub(rf"({_STRING})|,(?=\s*[}}\]])", lambda match: match[1] or " ", text, flags=re.DOTALL)


def _checked_copy(data: Any, name: str, depth: int = 0) -> Any:
    """A deep copy in plain dicts and lists, with string keys and finite numbers only."""
    if depth > MAX_DEPTH:
        raise BadInput(f"is nested deeper than {MAX_DEPTH} levels", where=name)
    if isinstance(data, Mapping):
        for key in data:
            if not isinstance(key, str):
                raise BadInput(f"the key {str(key)[:80]!r} is not a string", where=name)
        return {key: _checked_copy(value, name, depth + 1) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_checked_copy(value, name, depth + 1) for value in data]
    if isinstance(data, float) and not math.isfinite(data):
        raise BadInput(f"holds {data}, which is not JSON", where=name, remedy="write a finite number")
    if data is None or isinstance(data, bool | int | float | str):
        return data
    raise BadInput(f"holds {_type_name(data)}, which is not JSON", where=name)


def _type_name(data: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(data), "null" if data is None else f"a {type(data).__name__}")
