"""The rank that is traced: what it holds of a model, and in which context it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

#: How many collectives are being run, one inside another.
_receiving = 0


@contextlib.contextmanager
def receiving() -> Iterator[None]:
    """What is allocated in this context is what a collective receives."""
    global _receiving
    _receiving += 1
    try:
        yield
    finally:
        _receiving -= 1


def receives() -> bool:
    """Return whether what is allocated now is what a collective receives."""
    return _receiving > 0


class Ranks:
    """A rank that shares no operator with others. A subclass is a rank of a mesh.

    Attributes:
        unwrapped: classes of tensors that hold this rank's parts; the recorder follows the parts.
    """

    unwrapped: tuple[type, ...] = ()

    def lay_out(self, model: nn.Module) -> None:
        """Give the model the parameters and hooks that it has on this rank."""

    def inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return what this rank has of a batch of the whole samples, which it may change."""
        return batch

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor."""
        return tensor

    def running(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a forward and backward."""
        return contextlib.nullcontext()


#: The rank of every run that shares neither matrices nor samples.
ALONE = Ranks()
