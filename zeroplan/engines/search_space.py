"""The rule that all engines' search spaces share: offload to a disk needs a disk, and a folder on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

from zeroplan.core.cluster import Cluster
from zeroplan.core.zero_config import OffloadDevice, OffloadOptimizer, OffloadParam, ZeroConfig

_Block = TypeVar("_Block", OffloadOptimizer, OffloadParam)

#: Effort of each thing that is offloaded.
OFFLOAD_EFFORT = 4


def offloads(options: Iterable[ZeroConfig], cluster: Cluster, nvme_path: str) -> list[tuple[ZeroConfig, int]]:
    """The options that this cluster can run, with swap files in `nvme_path`, each with its effort."""
    found = []
    for zero in options:
        devices = (zero.offload_optimizer.device, zero.offload_param.device)
        if OffloadDevice.NVME in devices and cluster.nvme is None:
            continue
        there = replace(
            zero,
            offload_optimizer=_with_folder(zero.offload_optimizer, nvme_path),
            offload_param=_with_folder(zero.offload_param, nvme_path),
        )
        found.append((there, OFFLOAD_EFFORT * sum(device is not OffloadDevice.NONE for device in devices)))
    return found


def _with_folder(block: _Block, nvme_path: str) -> _Block:
    return replace(block, nvme_path=nvme_path) if block.device is OffloadDevice.NVME else block
