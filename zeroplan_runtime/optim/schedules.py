"""The schedules that a ds_config can name."""

from __future__ import annotations

from typing import Any

import torch

from zeroplan.core.errors import BadInput, did_you_mean
from zeroplan_runtime.optim.lr_schedules import LRRangeTest, LrSchedule, WarmupCosineLR, WarmupDecayLR, WarmupLR
from zeroplan_runtime.optim.one_cycle import OneCycle

SCHEDULES: dict[str, type[LrSchedule]] = {
    kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}


def make_schedule(kind: str, params: dict[str, Any], optimizer: torch.optim.Optimizer) -> LrSchedule:
    """Makes the schedule of a config's ``scheduler`` section.

    Args:
        kind: the section's ``type``.
        params: the section's ``params``.
        optimizer: the optimizer whose learning rates it sets.

    Raises:
        BadInput: for an unknown type or parameter, or a bad value.
    """
    if kind not in SCHEDULES:
        remedy = did_you_mean(kind, SCHEDULES) or f"use one of {', '.join(SCHEDULES)}"
        raise BadInput(f"unknown schedule {kind!r}", where="scheduler.type", remedy=remedy)
    try:
        return SCHEDULES[kind](optimizer, **params)
    except TypeError as fault:
        raise BadInput(str(fault).replace("__init__() ", ""), where=f"scheduler.params of {kind}") from None
