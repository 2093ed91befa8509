"""``deepspeed.checkpoint.utils``: what tools take from it before they save a state dict."""

from __future__ import annotations

from typing import Any

import torch

from zeroplan_runtime.pytree import map_tensors


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Returns a copy of a tree of tensors on `device`, each in memory of its own size: ``torch.save`` writes a view's whole
    storage.

    Args:
        item: tensors, or lists, tuples and dicts of them.
        device: where the copies go.
    """
    return map_tensors(item, lambda tensor: tensor.detach().to(device, copy=True, memory_format=torch.contiguous_format))
