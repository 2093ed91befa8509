"""Python values as JSON that come back with their types: tuples, keys that are no texts, sets, bytes, tensors.

JSON has lists and objects with text keys only. A value that is none of JSON's own becomes an object with one key, ``"$type"``
and so on; an object of the user's whose only key begins so is wrapped itself.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from typing import Any

import torch

from zeroplan.core.errors import BadInput

#: Elements of a tensor that is written into JSON, at most.
_MOST = 1 << 16
_MAPPINGS: dict[str, type] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}


def encode(value: Any, where: str) -> Any:
    """`value` as JSON can hold it.

    Args:
        value: None, bools, numbers, texts, bytes, tensors and NumPy arrays of at most 65536 elements, and lists, tuples, sets
            and dicts of them.
        where: what `value` is called, for the message.

    Raises:
        BadInput: for anything else, with the path to it.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if kind is list:
        return [encode(one, f"{where}[{i}]") for i, one in enumerate(value)]
    if kind is dict and all(type(key) is str for key in value) and not _is_tagged(value):
        return {key: encode(one, f"{where}[{key!r}]") for key, one in value.items()}
    if kind in _MAPPINGS.values():
        items = [[encode(key, f"a key of {where}"), encode(one, f"{where}[{key!r}]")] for key, one in value.items()]
        return {f"${kind.__name__}": items}
    if kind in _SEQUENCES.values():
        return {f"${kind.__name__}": [encode(one, f"{where}[{i}]") for i, one in enumerate(value)]}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if kind is torch.Tensor and value.numel() <= _MOST and value.layout is torch.strided:
        raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return {"$tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), base64.b64encode(raw).decode()]}
    if kind.__module__ == "numpy" and hasattr(value, "dtype") and value.dtype.kind in "biufc" and value.size <= _MOST:
        return {"$numpy": [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]}
    raise BadInput(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which would not come back as it is",
        where="save_checkpoint",
        remedy="keep numbers, texts, tensors of at most 65536 elements, and lists, tuples, sets and dicts of them",
    )


def decode(value: Any) -> Any:
    """Restores the value that :func:`encode` was given.

    Raises:
        ValueError, TypeError, KeyError: for what it did not make.
    """
    if isinstance(value, list):
        return [decode(one) for one in value]
    if not isinstance(value, dict):
        return value
    if not _is_tagged(value):
        return {key: decode(one) for key, one in value.items()}
    ((tag, held),) = value.items()
    name = tag.removeprefix("$")
    if name in _MAPPINGS:
        return _MAPPINGS[name]({decode(key): decode(one) for key, one in held})
    if name in _SEQUENCES:
        return _SEQUENCES[name](decode(one) for one in held)
    if name == "float":
        return float(held)
    if name == "bytes":
        return base64.b64decode(held, validate=True)
    dtype, shape, text = held
    raw = bytearray(base64.b64decode(text, validate=True))
    if name == "tensor":
        flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8, device="cpu")
        return flat.view(getattr(torch, dtype)).view(shape)
    if name == "numpy":
        import numpy

        array = numpy.frombuffer(raw, dtype=numpy.dtype(dtype)).reshape(shape)
        return array if shape else array[()]
    raise ValueError(f"unknown type {tag!r}")


def _is_tagged(value: dict[str, Any]) -> bool:
    return len(value) == 1 and next(iter(value)).startswith("$")
