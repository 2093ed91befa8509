"""``deepspeed.moe.utils``: what programs ask of every model. There are no experts here, so the answer is always no."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def is_moe_param(param: torch.Tensor) -> bool:
    """Returns whether the parameter is an expert's: False."""
    return False


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Returns whether the group is of experts: False."""
    return False


def has_moe_layers(module: nn.Module) -> tuple[bool, int]:
    """Returns whether the model has experts, and how many: False, 0."""
    return False, 0


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | list[dict[str, Any]] | tuple[dict[str, Any], ...], max_group_size: float | None = None
) -> list[dict[str, Any]]:
    """The parameter groups as a list: no expert is to be taken out of them."""
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)
