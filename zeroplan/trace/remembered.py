"""Results of operators that ran before on operands of the same shapes, strides and types.

The meta device derives each result anew, mostly in Python, and a model's blocks are alike. Only aten's operators count whose
schema writes to nothing and returns no view, called on plain tensors of the meta device; what they return then follows from
those shapes alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class _Made(NamedTuple):
    """A dense result in a storage of its own."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


#: What a call returned, by operator and operands: one result, or several, some of them None. None: not to be remembered.
_seen: dict[Any, tuple[bool, tuple[_Made | None, ...]] | None] = {}
_pure: dict[Any, bool] = {}
_MOST = 20_000
_SCALARS = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_TENSORS = (torch.Tensor, torch.nn.Parameter)


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """What ``func(*args, **kwargs)`` returns."""
    with torch._C.DisableTorchFunction():  # else the trace's own mode is asked for each attribute that is read here
        key = _key(func, args, kwargs)
    if key is None:
        return func(*args, **kwargs)
    if key in _seen:
        if (made := _seen[key]) is None:
            return func(*args, **kwargs)
        several, results = made
        tensors = tuple(one and torch.empty_strided(one.shape, one.stride, dtype=one.dtype, device="meta") for one in results)
        return tensors if several else tensors[0]
    out = func(*args, **kwargs)
    if len(_seen) >= _MOST:
        _seen.clear()
    _seen[key] = _made(func, out, args, kwargs)
    return out


def _writes_nothing(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    return (
        schema is not None
        and func.namespace == "aten"
        and not any(one.alias_info for one in (*schema.arguments, *schema.returns))
        and torch.Tag.data_dependent_output not in func.tags
    )


def _key(func: Any, args: Any, kwargs: Any) -> Any:
    """The call without its tensors' identities; None where its result may follow from more than that."""
    if func not in _pure:
        _pure[func] = _writes_nothing(func)
    if not _pure[func]:
        return None
    words: list[Any] = [func]
    tensors = 0
    for value in (*args, *(part for item in kwargs.items() for part in item)):
        for one in (len(value), *value) if isinstance(value, (list, tuple)) else (value,):
            kind = type(one)
            if kind in _TENSORS:
                if one.device.type != "meta" or one.layout is not torch.strided or one.is_conj() or one.is_neg():
                    return None
                words += (one.shape, one.stride(), one.dtype)
                tensors += 1
            elif kind in _SCALARS:
                words += (kind, one)
            else:
                return None
    return tuple(words) if tensors else None


def _made(func: Any, out: Any, args: Any, kwargs: Any) -> tuple[bool, tuple[_Made | None, ...]] | None:
    """How to make such a result again; None where it is no dense tensor in a storage of its own."""
    several = isinstance(out, tuple)
    results = out if several else (out,)
    taken = {
        one.untyped_storage()._cdata
        for value in (*args, *kwargs.values())
        for one in (value if isinstance(value, (list, tuple)) else (value,))
        if isinstance(one, torch.Tensor)
    }
    made: list[_Made | None] = []
    for one in results:
        if one is None:
            made.append(None)
            continue
        if type(one) is not torch.Tensor or one.device.type != "meta" or one.layout is not torch.strided:
            return None
        storage = one.untyped_storage()
        again = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta")
        if storage._cdata in taken:
            _pure[func] = False  # a view, whatever its schema says
            return None
        if one.storage_offset() or storage.nbytes() != again.untyped_storage().nbytes():
            return None
        taken.add(storage._cdata)
        made.append(_Made(one.shape, one.stride(), one.dtype))
    return several, tuple(made)
