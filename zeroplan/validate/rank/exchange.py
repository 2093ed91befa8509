"""Every rank's result on every rank."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def everyone(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of all ranks, by rank."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, result)
    return gathered
