"""The kinds of a ds_config's values, and what turns a value into one; see :mod:`zeroplan.ds_config.coercion`."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from zeroplan.core.workload import DType
from zeroplan.ds_config.coercion import to_bool, to_float, to_int


class Kind(StrEnum):
    """The type of a key's value; the text is how messages name it."""

    INT = "an integer"
    FLOAT = "a number"
    BOOL = "true or false"
    STR = "a string"
    STAGE = "0, 1, 2 or 3"
    DEVICE = "none, cpu or nvme"
    DTYPE = "fp32, fp16 or bf16"
    LOSS_SCALE = "a finite number, 0 or more (0 is dynamic)"
    SCALE_INT = "an integer, not a boolean"
    INT_OR_STR = "an integer or a string"
    STRINGS = "a list of strings"
    SECTION = "an object"
    LIST = "a list"
    ANY = "any value"


def to_str(value: Any) -> str:
    """A string, and nothing else.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(value, str):
        return value
    raise ValueError


def to_dtype(value: Any) -> DType:
    """A dtype by the names of DeepSpeed's ``DtypeEnum``.

    Raises:
        ValueError: for anything else.
    """
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


COERCE: dict[Kind, Callable[[Any], Any]] = {
    Kind.INT: to_int,
    Kind.FLOAT: to_float,
    Kind.BOOL: to_bool,
    Kind.STR: to_str,
    Kind.STAGE: _to_stage,
    Kind.DEVICE: _to_device,
    Kind.DTYPE: to_dtype,
    Kind.LOSS_SCALE: _to_loss_scale,
    Kind.SCALE_INT: _to_scale_int,
    Kind.INT_OR_STR: _to_int_or_str,
    Kind.STRINGS: _to_strings,
    Kind.LIST: _to_list,
    Kind.SECTION: _as_is,
    Kind.ANY: _as_is,
}
