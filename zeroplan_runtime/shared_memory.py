"""Parameters that share memory with something else. The engine gives each parameter memory of its own, so they would part.

Plain torch goes on sharing: what is trained through one name is seen through the other. Tied parameters, which are one object
under several names, stay tied.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable

import torch
from torch import nn

from zeroplan.core.errors import BadInput
from zeroplan_runtime.local_tensors import is_distributed, local_of

logger = logging.getLogger("zeroplan_runtime")


def require_own_memory(model: nn.Module) -> None:
    """Refuses parameters whose elements are also those of another parameter or of a buffer.

    Raises:
        BadInput: with both names.
    """
    named: list[tuple[str, torch.Tensor]] = []
    own = [(name, local_of(param)) for name, param in model.named_parameters()]
    named += [(name, param) for name, param in own if param.numel() and not param.is_meta]
    parameters = len(named)
    named += [(name, buffer) for name, buffer in model.named_buffers() if buffer.numel() and not buffer.is_meta]
    by_storage: dict[int, list[int]] = defaultdict(list)
    for i, (name, tensor) in enumerate(named):
        if tensor.layout is not torch.strided:
            continue
        by_storage[tensor.untyped_storage().data_ptr()].append(i)
        if i < parameters and torch._debug_has_internal_overlap(tensor) == 1:
            raise BadInput(f"elements of {name!r} share memory", where="model", remedy="make it contiguous()")
    for members in by_storage.values():
        for i, first in enumerate(members):
            for second in members[i + 1 :]:
                if first < parameters and _overlap(named[first][1], named[second][1]):
                    raise BadInput(
                        f"{named[first][0]!r} and {named[second][0]!r} share memory, but are two tensors",
                        where="model",
                        remedy="tie parameters by assigning the parameter itself, and copy what is to be apart by clone()",
                    )


def warn_of_aliases(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Logs which parameters share their memory with a tensor outside the model, where moving or casting would not part them."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    if count is None:
        return
    plain = [(name, param) for name, param in model.named_parameters() if not is_distributed(param)]
    params = [(name, param) for name, param in plain if param.device == device and param.dtype == dtype]
    known = Counter(_storages([*(param for _, param in plain), *model.buffers()]))
    shared = [name for name, p in params if p.numel() and count(p.untyped_storage()._cdata) > known[_storage(p)] + 1]
    if shared:
        more = f" and {len(shared) - 1} more" if len(shared) > 1 else ""
        logger.warning(
            "the memory of parameter %r%s is shared with a tensor outside the model's parameters and buffers, which keeps the "
            "present values: the engine's parameters have memory of their own",
            shared[0],
            more,
        )


def _storages(tensors: Iterable[torch.Tensor]) -> list[int]:
    return [_storage(tensor) for tensor in tensors if tensor.layout is torch.strided]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two tensors of the same storage have a byte in common."""
    begin = max(one.data_ptr(), other.data_ptr())
    end = min(_end(one), _end(other))
    if begin >= end:
        return False
    if one.is_contiguous() or other.is_contiguous() or one.element_size() != other.element_size():
        return True
    elements = torch.zeros(one.untyped_storage().nbytes() // one.element_size(), dtype=torch.bool)
    elements.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(elements.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _end(tensor: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()
