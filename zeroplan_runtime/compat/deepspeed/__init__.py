"""DeepSpeed's names over the included runtime.

``import zeroplan_runtime.compat.deepspeed as deepspeed`` in place of ``import deepspeed``; or, for a program that cannot be
changed, ``python -m zeroplan_runtime.compat.deepspeed train.py ARGS``, which installs this package as ``deepspeed`` first. What
DeepSpeed has and this package has not is refused by name. docs/deepspeed_compat.md lists both.
"""

from __future__ import annotations

import torch

from zeroplan.core.zero_config import DEEPSPEED_VERSION
from zeroplan_runtime.compat.deepspeed import accelerator, checkpointing, comm, lr_schedules, ops, utils, zero
from zeroplan_runtime.compat.deepspeed.accelerator import get_accelerator
from zeroplan_runtime.compat.deepspeed.comm import init_distributed
from zeroplan_runtime.compat.deepspeed.config import DeepSpeedConfig, DeepSpeedConfigError
from zeroplan_runtime.compat.deepspeed.engine import DeepSpeedEngine
from zeroplan_runtime.compat.deepspeed.entry import add_config_arguments, initialize
from zeroplan_runtime.compat.deepspeed.utils import log_dist, logger

__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "log_dist",
    "logger",
    "lr_schedules",
    "ops",
    "utils",
    "zero",
]

#: The version of DeepSpeed whose ways are followed.
__version__ = version = DEEPSPEED_VERSION
__version_major__, __version_minor__, __version_patch__ = (int(part) for part in __version__.split("."))
__git_hash__ = __git_branch__ = None

_nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else ()
#: What DeepSpeed says of the torch that it was built with.
torch_info = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "bf16_support": get_accelerator().is_bf16_supported(),
    "cuda_version": torch.version.cuda or "0.0",
    "nccl_version": ".".join(str(part) for part in _nccl[:2]) or "0.0",
    "hip_version": "0.0",
}
