"""Reading of a ds_config's path, base64 text or object into a plain object.

DeepSpeed 0.19 reads its file with Hjson and rejects duplicate keys (runtime/config.py). Of Hjson we take comments and
trailing commas ourselves, which people do use, and the rest through the package hjson; the HF Trainer reads strict JSON, so
both earn a finding.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.plumbing.documents import CONFIG, NOT_JSON, kind_of, parse_relaxed_json, plain_copy, text_of
from zeroplan.core.plumbing.files import read_bytes


def load_source(source: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[dict[str, Any], str, bool]:
    """Load a ds_config: return the object, its name for messages, and whether it was strict JSON.

    Args:
        source: a path, a base64 string (as DeepSpeed takes one), or the object itself, which is copied.

    Raises:
        BadInput: unreadable, too large, not UTF-8, not JSON, duplicate keys, NaN or Infinity, too deep, not an object.
    """
    data: Any
    if isinstance(source, Mapping):
        name, strict = "ds_config", True
        data = plain_copy(source, name)
    elif not isinstance(source, str | os.PathLike):
        raise BadInput(
            f"a {type(source).__name__} is no ds_config", where="ds_config", remedy="give a dict or the path of its JSON"
        )
    else:
        name = os.fspath(source)
        text, shown = _text(name), name if len(name) <= 200 else "ds_config"
        try:
            data, strict = parse_relaxed_json(text, shown)
        except BadInput as fault:
            if not fault.what.startswith(NOT_JSON):
                raise
            data, strict = _from_hjson(text, shown, fault), False
    if not isinstance(data, dict):
        raise BadInput(f"holds {kind_of(data)}, not an object", where=name, remedy='write {"zero_optimization": {…}, …}')
    return data, name, strict


def _from_hjson(text: str, name: str, fault: BadInput) -> Any:
    """The value of a text that is no JSON but Hjson, where the package hjson is installed; it comes with DeepSpeed.

    Raises:
        BadInput: `fault`, where it is no Hjson either; as for JSON, for keys that stand twice, and for what is too large.
    """
    try:
        import hjson
    except ImportError:
        raise fault from None

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) < len(items):
            raise BadInput("a key stands twice", where=name, remedy="keep one")
        return found

    try:
        data = hjson.loads(text, object_pairs_hook=pairs)
    except BadInput:
        raise
    # Its own error is a ValueError, as is a number of thousands of digits; a text that ends early or a number beyond floats
    # meets it unprepared.
    except (ValueError, RecursionError, IndexError, OverflowError):
        raise fault from None
    if not isinstance(data, dict) or not data:  # a bare word is a text to Hjson, and an empty file an object
        raise fault
    return plain_copy(data, name)


def _text(name: str) -> str:
    if not os.path.lexists(name.replace("\0", "")) and (decoded := _from_base64(name)) is not None:
        return decoded
    return text_of(read_bytes(name, CONFIG.size, remedy="give the path of a ds_config.json"), name)


def _from_base64(text: str) -> str | None:
    try:
        decoded = base64.b64decode(text, altchars=b"-_", validate=True).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None
