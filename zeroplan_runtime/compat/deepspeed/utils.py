"""``deepspeed.utils`` and ``deepspeed.runtime.utils``: what scripts take from them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version

from zeroplan_runtime.compat.deepspeed.accelerator import get_accelerator
from zeroplan_runtime.compat.deepspeed.dataloader import RepeatingLoader
from zeroplan_runtime.compat.deepspeed.leaf_modules import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
)
from zeroplan_runtime.compat.deepspeed.tensor_fragment import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)

__all__ = [
    "RepeatingLoader",
    "get_z3_leaf_modules",
    "log_dist",
    "logger",
    "required_torch_version",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "see_memory_usage",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]

logger = logging.getLogger("zeroplan_runtime")


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Logs on the ranks named; on all where `ranks` is None or holds -1."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    wanted = list(ranks) if ranks is not None else [-1]
    if -1 in wanted or rank in wanted:
        logger.log(level, "[rank %d] %s", rank, message)


def see_memory_usage(message: str, force: bool = False, ranks: Iterable[int] | None = None) -> None:
    """Logs the device's memory now and at its peak, in GiB, if `force`."""
    if force:
        device = get_accelerator()
        now, most = device.memory_allocated() / 2**30, device.max_memory_allocated() / 2**30
        log_dist(f"{message}: {now:.2f} GiB allocated, {most:.2f} GiB at the peak", ranks)


def required_torch_version(min_version: Any = None, max_version: Any = None) -> bool:
    """Returns whether torch's version is within the bounds, which are included."""
    version = Version(Version(torch.__version__).base_version)
    if min_version is not None and version < Version(str(min_version)):
        return False
    return max_version is None or version <= Version(str(max_version))
