"""The types of a request's fields, for callers from Python: a word in place of a number would fail far from its cause."""

from __future__ import annotations

import operator
from dataclasses import fields, replace
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.planner.request import Request

_NUMBERS, _TRUTHS, _TEXTS = ("int", "int | None"), ("bool", "bool | None"), ("str", "str | None")
#: Fields that more than their annotation's types are understood in, by a reader of their own.
_READ_ELSEWHERE = frozenset({"lora_rank"})
#: Numbers that people write as 7.5e9.
_COUNTS = frozenset({"params", "largest_layer_params"})


def with_checked_types(request: Request) -> Request:
    """Return the request with whole numbers as ``int`` and torch's dtypes by name.

    Raises:
        BadInput: a field of another type than it has, or None where it cannot be left open.
    """
    changed: dict[str, Any] = {}
    for one in fields(Request):
        value, kind = getattr(request, one.name), str(one.type)
        if one.name in _READ_ELSEWHERE or (value is None and kind.endswith("None")):
            continue
        if kind in _NUMBERS and type(value) is not int:
            changed[one.name] = _whole(value, one.name)
        elif kind in _TRUTHS and not isinstance(value, bool):
            raise BadInput(f"{value!r:.40} is neither True nor False", where=one.name, remedy="write True or False")
        elif kind in _TEXTS and not isinstance(value, str):
            changed[one.name] = _text(value, one.name)
    return replace(request, **changed) if changed else request


def _whole(value: Any, where: str) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        if where in _COUNTS and isinstance(value, float) and value.is_integer():
            return int(value)
        return operator.index(value)
    except TypeError:
        raise BadInput(f"{value!r:.40} is no whole number", where=where, remedy="write one, such as 2") from None


def _text(value: Any, where: str) -> str:
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    raise BadInput(f"{value!r:.60} is no name", where=where, remedy="write a string")
