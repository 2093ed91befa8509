"""Values of frozen dataclasses as plain JSON and back, so that no field can be lost between processes."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import Enum
from importlib import import_module
from typing import Any

#: Names the class of a written value: ``module:class``.
_CLASS = "class"


def to_plain(value: Any) -> Any:
    """Return a dataclass, an enum's member, a tuple or a plain value as JSON writes it.

    Raises:
        TypeError: a value of another kind.
    """
    if isinstance(value, Enum):
        return {_CLASS: _path(type(value)), "value": value.value}
    if is_dataclass(value) and not isinstance(value, type):
        return {_CLASS: _path(type(value)), **{f.name: to_plain(getattr(value, f.name)) for f in fields(value)}}
    if isinstance(value, tuple | list):
        return [to_plain(one) for one in value]
    if isinstance(value, dict):
        return {str(name): to_plain(one) for name, one in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a {type(value).__name__} is no plain value")


def from_plain(data: Any) -> Any:
    """Return what :func:`to_plain` wrote; lists become tuples.

    Raises:
        ValueError: what is written is of no such class.
    """
    if isinstance(data, list):
        return tuple(from_plain(one) for one in data)
    if not isinstance(data, dict):
        return data
    values = {name: from_plain(one) for name, one in data.items() if name != _CLASS}
    if _CLASS not in data:
        return values
    kind = _class(data[_CLASS])
    return kind(values["value"]) if issubclass(kind, Enum) else kind(**values)


def _path(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _class(path: str) -> Any:
    module, _, name = path.partition(":")
    found = getattr(import_module(module), name, None)
    if not (isinstance(found, type) and (is_dataclass(found) or issubclass(found, Enum))):
        raise ValueError(f"{path} is no class of a run")
    return found
