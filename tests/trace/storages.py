"""What operators allocate and free, in order, for tests that hold a rule of the tracer to a library's own code."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Storages(TorchDispatchMode):
    """The bytes of storages that operators make and drop, in order; those of less than 512 bytes are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[int] = []
        self._alive: dict[int, Any] = {}

    def follow(self, tensor: Any, *, made: bool = True) -> None:
        """Follow a tensor's storage until it is freed; it counts where an operator has `made` it."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive or size < 512:
            return
        if made:
            self.events.append(size)

        def dead(_: object) -> None:
            del self._alive[key]
            if made:
                self.events.append(-size)

        self._alive[key] = weakref.ref(storage, dead)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is not torch.Tensor and kind is not torch.nn.Parameter for kind in types):
            return NotImplemented  # its class runs the operator on the tensors inside
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.follow(tensor)
        return out


def recorded(product: Callable[[Any], Any], dtype: torch.dtype, outside: Iterable[torch.Tensor] = ()) -> list[int]:
    """Return storages of the forward and the backward of `product` over 2 × 24 tokens of 64 numbers; `outside` are not its."""
    torch.manual_seed(0)
    x = torch.randn(2, 24, 64).to(dtype).requires_grad_()
    grad = torch.randn(2, 24, 96).to(dtype)
    with Storages() as storages:
        for tensor in (x, grad, *outside):
            storages.follow(tensor, made=False)
        out = product(x)
        out.backward(grad)
        del out, x.grad
    return storages.events
