"""Communication between ranks: every rank's result goes to all, the first rank's plan to the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from zeroplan.core.errors import BadInput

_T = TypeVar("_T")


def gather_results(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Gather the results of all ranks, by rank."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, result)
    return gathered


def on_first_rank(make: Callable[[], _T]) -> _T:
    """Call `make` on the first rank alone, and return its result on every rank.

    Raises:
        BadInput: on every rank, when `make` raises it.
    """
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            box[0] = (make(), None)
        except BadInput as error:
            box[0] = (None, (error.what, error.where, error.remedy))
    dist.broadcast_object_list(box, src=0)
    value: _T
    value, refused = box[0]
    if refused is not None:
        raise BadInput(refused[0], where=refused[1], remedy=refused[2])
    return value
