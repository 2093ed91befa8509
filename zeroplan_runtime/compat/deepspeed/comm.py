"""``deepspeed.comm``: torch.distributed, whose functions DeepSpeed's have the names of."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zeroplan_runtime.compat.deepspeed.accelerator import get_accelerator


def __getattr__(name: str) -> Any:
    """Return torch.distributed's public name: a function, a class, a group."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(dist, name)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Initialises torch.distributed, unless that has been done; for one process where no launcher has set ``RANK``.

    Args:
        dist_backend: the backend; NCCL with a GPU, else gloo, by default.
        timeout: of the collectives; torch's by default.
        init_method: as in ``torch.distributed.init_process_group``.
        dist_init_required: False does nothing.
        rank, world_size: this process's rank and their number; from the environment by default.
        auto_mpi_discovery, distributed_port, verbose, config: have no effect here.
    """
    if dist_init_required is False or dist.is_initialized():
        return
    given: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    if rank >= 0 and world_size > 0:
        given |= {"rank": rank, "world_size": world_size}
    elif init_method is None and "RANK" not in os.environ:  # started without a launcher
        given |= {"rank": 0, "world_size": 1, "store": dist.HashStore()}  # type: ignore[attr-defined]
    dist.init_process_group(dist_backend or get_accelerator().communication_backend_name(), init_method=init_method, **given)


def get_local_rank() -> int:
    """Returns this process's rank on its host, from the environment."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> Any:
    """Returns the group of all ranks."""
    return dist.group.WORLD
