"""Request of the optimizer's step to the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from zeroplan_runtime.streams import Event
from zeroplan_runtime.unit_state import GroupSlice

#: ``update(slice, hyperparameters, step, scalars)``: the optimizer's arithmetic on one slice.
Update = Callable[[GroupSlice, dict[str, Any], int, torch.Tensor | None], None]


@dataclass(slots=True)
class UpdateRequest:
    """One step's update of the offloaded units.

    Attributes:
        step: the number of the applied step, from 1.
        hyperparameters: of each parameter group, by the names of the kernels' arguments.
        scalars: gives the step's scalars in host memory, waiting for them if need be; None where nothing scales or skips.
        param_readers: recorded after the last work on the device that reads the parameters as they were.
    """

    step: int
    hyperparameters: list[dict[str, Any]]
    scalars: Callable[[], torch.Tensor] | None = None
    param_readers: tuple[Event, ...] = ()
