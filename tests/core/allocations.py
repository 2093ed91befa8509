"""Bytes that torch's operators allocate, followed storage by storage, on any device."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.patience import PATIENCE


class Allocations(TorchDispatchMode):
    """While it is on: `now` and `peak` bytes of storages that operators made, but for those of `known` tensors.

    Operators on DTensors count by what they do to the local tensors. A thread of gloo's holds what it has sent for a moment
    longer than a collective takes, which is waited for.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}
        self._sent: list[tuple[torch.Tensor, int]] = []  # tensors of collectives, with their uses when gloo has let go

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # its own dispatch calls operators on local tensors, which come here again
        if function.namespace == "_c10d_functional" and function is not torch.ops._c10d_functional.wait_tensor.default:
            self._sent += [(one, _uses(one)) for one in args if type(one) is torch.Tensor]
        out = function(*args, **(kwargs or {}))
        if function is torch.ops._c10d_functional.wait_tensor.default:
            self._sent.append((args[0], _uses(torch.empty(1))))  # nothing else uses what has just been received
            end = time.monotonic() + PATIENCE
            while any(_uses(one) > most for one, most in self._sent) and time.monotonic() < end:
                time.sleep(0)
            self._sent.clear()
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and type(tensor) is torch.Tensor:
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: Any) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._seen or not nbytes:
            return
        self._seen.add(key)
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, nbytes)

    def _gone(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)
        self.now -= nbytes


def _uses(tensor: torch.Tensor) -> int:
    uses: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return uses
