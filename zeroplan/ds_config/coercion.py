"""Numbers and booleans as pydantic's lax mode takes them, because DeepSpeed's config blocks are pydantic models.

``2e8`` and ``"200000000"`` are integers there, ``1`` and ``"yes"`` are booleans. A test compares every function with pydantic
itself.
"""

from __future__ import annotations

import re
import sys
from typing import Any

_TRUE = frozenset({"1", "on", "t", "true", "y", "yes"})
_FALSE = frozenset({"0", "off", "f", "false", "n", "no"})


def to_int(value: Any) -> int:
    """An integer from an integer, a boolean, an integral float or a string of digits.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < sys.maxsize:
        return int(value)
    if isinstance(value, str):
        match = re.fullmatch(r"([+-]?[0-9]+(?:_[0-9]+)*)(?:\.0+)?", _trimmed(value), re.ASCII)
        if match and len(value) < 64:
            return int(match[1])
    raise ValueError


def _trimmed(text: str) -> str:
    """Without the white space around it; Python's idea of white space holds four separators that pydantic's does not."""
    if any("\x1c" <= ch <= "\x1f" for ch in text):
        raise ValueError
    return text.strip()


def to_float(value: Any) -> float:
    """A float from a number, a boolean or a numeric string.

    Raises:
        ValueError: for anything else, or a number too large for a float.
    """
    if isinstance(value, int | float) or (isinstance(value, str) and value.isascii()):
        if isinstance(value, str):
            inner = _trimmed(value)
            if "_" in inner and (inner != value or "__" in inner or inner.startswith("_") or inner.endswith("_")):
                raise ValueError
            value = inner.replace("_", "")  # pydantic drops single underscores wherever they stand
        try:
            return float(value)
        except OverflowError:
            raise ValueError from None
    raise ValueError


def to_bool(value: Any) -> bool:
    """A boolean from a boolean, 0 or 1, or one of pydantic's twelve words.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    if isinstance(value, str):
        word = value.lower()
        if word in _TRUE:
            return True
        if word in _FALSE:
            return False
    raise ValueError
