"""The tensors in nested arguments and results of modules: tuples, named tuples, lists, mappings and dataclasses.

``torch.utils._pytree`` is private and takes a dataclass, or transformers' outputs, only if it has been registered.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yields every tensor in `value`, in order, at any depth."""
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


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """A copy of `value` with `change` applied to each tensor. Containers keep their types; other leaves are not copied."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, MutableMapping):  # before dataclasses: transformers' outputs are both
        made: Any = copy.copy(value)
        for key, item in value.items():
            made[key] = map_tensors(item, change)
        return made
    if isinstance(value, list | tuple):
        items = [map_tensors(item, change) for item in value]
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    if is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for field in fields(value):
            if hasattr(value, field.name):
                object.__setattr__(made, field.name, map_tensors(getattr(value, field.name), change))  # frozen ones, too
        return made
    return value


def cast_tensors(value: Any, dtype: torch.dtype) -> Any:
    """Casts the floating-point tensors of `value` to `dtype`, in a copy; see :func:`map_tensors`."""
    return map_tensors(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
