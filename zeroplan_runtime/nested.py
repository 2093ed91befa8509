"""Tensors within what modules take and return: tuples, named tuples, lists, mappings and dataclasses, of any depth."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in `value`, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name, None))


def cast_tensors(value: Any, dtype: torch.dtype) -> Any:
    """`value` with its floating tensors in `dtype`. Containers are copied and keep their types; others are as they were."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, MutableMapping):  # before dataclasses: transformers' outputs are both
        made: Any = copy.copy(value)
        for key, item in value.items():
            made[key] = cast_tensors(item, dtype)
        return made
    if isinstance(value, list | tuple):
        items = [cast_tensors(item, dtype) for item in value]
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    if is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for field in fields(value):
            if hasattr(value, field.name):
                object.__setattr__(made, field.name, cast_tensors(getattr(value, field.name), dtype))  # frozen ones, too
        return made
    return value
