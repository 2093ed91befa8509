"""The kinds of values that a ds_config holds, and the functions that turn a value into each kind.

DeepSpeed's config blocks are pydantic models in lax mode: ``2e8`` and ``"200000000"`` are integers there, ``1`` and ``"yes"``
are booleans.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any

from zeroplan.core.workload import DType

if TYPE_CHECKING:
    from pydantic import TypeAdapter


class ValueKind(StrEnum):
    """The kind of a key's value. The text is how messages and the docs name it."""

    INT = "a whole number"
    FLOAT = "a number"
    BOOL = "true or false"
    STR = "a string"
    STAGE = "0, 1, 2 or 3"
    DEVICE = "none, cpu or nvme"
    DTYPE = "fp32, fp16 or bf16"
    LOSS_SCALE = "a finite number, 0 or more (0 is dynamic)"
    SCALE_INT = "a whole number, not a boolean"
    INT_OR_STR = "a whole number or a string"
    STRINGS = "a list of strings"
    SECTION = "an object"
    LIST = "a list"
    ANY = "any value"


def _lax(kind: type, value: Any) -> Any:
    """Return the value as pydantic's lax mode makes it of a kind. Raises ValueError: where it refuses it."""
    if type(value) is kind:
        return value
    return _adapter(kind).validate_python(value)


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter  # files of plain values need none

    return TypeAdapter(kind)


def to_int(value: Any) -> int:
    """Read an integer from an integer, a boolean, an integral float or a string of digits.

    Raises:
        ValueError: for anything else.
    """
    return int(_lax(int, value))


def to_float(value: Any) -> float:
    """Read a float from a number, a boolean or a numeric string.

    Raises:
        ValueError: for anything else, or a number too large for a float.
    """
    return float(_lax(float, value))


def to_bool(value: Any) -> bool:
    """Read a boolean from a boolean, 0 or 1, or one of pydantic's twelve words. Raises ValueError: for anything else."""
    return bool(_lax(bool, value))


def to_str(value: Any) -> str:
    """Read a string, and nothing else. Raises ValueError: for anything else."""
    if isinstance(value, str):
        return value
    raise ValueError


def to_dtype(value: Any) -> DType:
    """Read a dtype by the names of DeepSpeed's ``DtypeEnum``. Raises ValueError: for anything else."""
    names = {
        DType.FP32: ("fp32", "float32", "float", "torch.float32"),
        DType.FP16: ("fp16", "float16", "half", "torch.float16"),
        DType.BF16: ("bf16", "bfloat16", "torch.bfloat16"),
    }
    for dtype, known in names.items():
        if isinstance(value, str) and value in known:
            return dtype
    raise ValueError


def _to_stage(value: Any) -> int:
    stage = to_int(value)
    if stage not in (0, 1, 2, 3):
        raise ValueError
    return stage


def _to_device(value: Any) -> str:
    if isinstance(value, str) and value in ("none", "cpu", "nvme"):
        return value
    raise ValueError


def _to_loss_scale(value: Any) -> float:
    scale = math.nan if isinstance(value, bool) else to_float(value)
    if not math.isfinite(scale) or scale < 0:
        raise ValueError
    return scale


def _to_scale_int(value: Any) -> int:
    if isinstance(value, bool):
        raise ValueError
    return to_int(value)


def _to_int_or_str(value: Any) -> int | str:
    return value if isinstance(value, str) else to_int(value)


def _to_strings(value: Any) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise ValueError
    return tuple(dict.fromkeys(items))


def _to_list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError
    return value


def _as_is(value: Any) -> Any:
    return value


#: The function for each kind; each raises ValueError for a value that is not of the kind.
COERCE: dict[ValueKind, Callable[[Any], Any]] = {
    ValueKind.INT: to_int,
    ValueKind.FLOAT: to_float,
    ValueKind.BOOL: to_bool,
    ValueKind.STR: to_str,
    ValueKind.STAGE: _to_stage,
    ValueKind.DEVICE: _to_device,
    ValueKind.DTYPE: to_dtype,
    ValueKind.LOSS_SCALE: _to_loss_scale,
    ValueKind.SCALE_INT: _to_scale_int,
    ValueKind.INT_OR_STR: _to_int_or_str,
    ValueKind.STRINGS: _to_strings,
    ValueKind.LIST: _to_list,
    ValueKind.SECTION: _as_is,
    ValueKind.ANY: _as_is,
}


def exactly(kind: ValueKind, value: Any) -> Any:
    """A value of the ``zeroplan`` section, which takes no other type for a kind: a float takes an integer, nothing else.

    Raises:
        ValueError: for a value of another type, or a number that is not finite.
    """
    types: dict[ValueKind, tuple[type, ...]] = {
        ValueKind.BOOL: (bool,),
        ValueKind.INT: (int,),
        ValueKind.FLOAT: (int, float),
        ValueKind.STR: (str,),
    }
    if type(value) not in types[kind] or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError
    return float(value) if kind is ValueKind.FLOAT else value
