"""Writes a rank's shards one after another, so that saving needs host memory only for the largest of them.

torch's writer keeps a host copy of every tensor until the file is complete (distributed/checkpoint/filesystem.py,
``tensor_dict``): as much memory as all masters and states, which may be more than the host has if these are in files.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future


class ShardWriter(FileSystemWriter):
    """A ``FileSystemWriter`` that writes the same files with less host memory."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes one file with a record for each shard of the plan."""
        prefix: Any = plan.storage_data
        name = f"{prefix.prefix}0{DEFAULT_SUFFIX}"
        results = []
        with open(Path(self.path) / name, "wb") as stream:
            for item in plan.items:
                begin = stream.tell()
                torch.save(_alone(planner.resolve_data(item)), stream)
                length = stream.tell() - begin
                results.append(WriteResult(item.index, length, _StorageInfo(name, begin, length)))
            stream.flush()
            os.fsync(stream.fileno())
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written


def _alone(data: Any) -> torch.Tensor:
    """A host tensor with its own storage, because ``torch.save`` writes whole storages."""
    assert isinstance(data, torch.Tensor)
    shard = data.detach().cpu()
    return shard if shard.untyped_storage().nbytes() == shard.nbytes else shard.clone()
