"""What ``torch.func`` and forward-mode differentiation change: their tensors stand for others, whose hooks are not called."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from zeroplan.core.errors import BadInput
from zeroplan_runtime.pytree import tensors_of


def are_active() -> bool:
    """Returns whether a transform of ``torch.func`` (vmap, grad, jvp) or a level of dual numbers is under way."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Returns whether `tensor` stands for another one under a transform, and so has no memory."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def require_seen_backward(unit: str, output: Any) -> None:
    """Checks that hooks on the tensors in `output`, of the unit's forward, see its backward.

    Raises:
        BadInput: under a transform, if there is a backward.
    """
    if not are_active():
        return
    for tensor in tensors_of(output):
        while is_wrapped(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        if tensor.requires_grad:
            raise BadInput(
                f"unit {unit!r} runs under a transform of torch.func or with dual numbers, so its backward would not be seen",
                where="stage 3",
                remedy="transform the computation within the unit's forward, run it under torch.no_grad(), or use stage 2",
            )
