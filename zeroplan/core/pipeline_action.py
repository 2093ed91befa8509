"""What a pipeline rank does: with which of its chunks, and with which micro batch."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Do(Enum):
    """What a pipeline rank does with one of its chunks."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"  # the first half of a backward: the gradient of the input
    WEIGHT = "W"  # the second: the gradients of the weights
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE = "REDUCE_GRAD"


class Action(NamedTuple):
    """One thing that a rank does: with which of its chunks, counted from 0, and with which micro batch (-1 for none)."""

    do: Do
    chunk: int
    micro_batch: int = -1
