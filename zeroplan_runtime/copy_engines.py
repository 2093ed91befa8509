"""Gathers by NCCL's copy engines, which take no multiprocessors from the computation beside them.

A kernel of NCCL's holds multiprocessors as long as it sends, and a product that is launched for all of them waits for the last.
Within one host NCCL gathers by the copy engines instead where the whole buffer is symmetric memory (NCCL's own, of one size
on every rank, known to the communicator), each rank's part stands in it, and the communicator's policy asks for it. Such a
gather fails on CUDA's default stream, whose batched copies take none; units are gathered on a stream of their own.

Source: torch's documentation of symmetric memory, "Copy engine collectives" (torch 2.11); NCCL 2.28, ``NCCL_CTA_POLICY``.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from zeroplan.core.errors import BadInput

KEY = "ds_config.zeroplan.copy_engine_gathers"


def process_group_options() -> Any:
    """Returns the options of a process group over NCCL whose collectives take no multiprocessors where they can do without.

    Raises:
        BadInput: where this torch has none.
    """
    policy = getattr(getattr(dist, "ProcessGroupNCCL", None), "NCCL_CTA_POLICY_ZERO", None)
    if policy is None:
        raise BadInput(
            f"torch {torch.__version__} has no such policy of NCCL's", where=KEY, remedy="use torch 2.11, or leave it out"
        )
    options = dist.ProcessGroupNCCL.Options()
    options.config.cta_policy = policy  # type: ignore[attr-defined]
    return options


class SymmetricMemory:
    """Allocates symmetric memory, which torch's allocator counts as any other; keep it as long as the tensors.

    Args:
        group: the ranks that allocate, all together; None for all ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = dist.group.WORLD if group is None else group
        self._pools: list[torch.cuda.MemPool] = []

    def __call__(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocates a 1-D tensor, uninitialised.

        Raises:
            BadInput: where ranks are on several hosts, or cannot reach each other's memory.
        """
        from torch.distributed import _symmetric_memory as symmetric

        assert self._group is not None
        ranks = dist.get_world_size(self._group)
        if int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) < ranks:
            raise BadInput(
                "copy engines reach the GPUs of one host, and ranks are on several", where=KEY, remedy="leave the key out"
            )
        try:
            symmetric.set_backend("NCCL")
            dist.barrier(self._group)  # makes the communicator
            self._pools.append(torch.cuda.MemPool(symmetric.get_mempool_allocator(device)))
            with torch.cuda.use_mem_pool(self._pools[-1]):
                made = torch.empty(numel, dtype=dtype, device=device)
            symmetric.rendezvous(made, group=self._group.group_name)
        except RuntimeError as fault:
            said = (str(fault).splitlines() or [""])[0]
            raise BadInput(f"no memory that all ranks reach ({said})", where=KEY, remedy="leave the key out") from fault
        return made
