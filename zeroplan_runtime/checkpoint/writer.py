"""Writes a rank's pieces one after another, so that saving needs host memory for the largest of them only.

torch's own writer keeps the host's copy of every tensor until the file is whole (distributed/checkpoint/filesystem.py,
``tensor_dict``): as much again as all masters and states, and more than the host has where these lie in files.
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


class PieceWriter(FileSystemWriter):
    """A :class:`FileSystemWriter` whose files are the same."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """One file, a record for each of the plan's pieces."""
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
    """A piece on the host in a storage of its own, since ``torch.save`` writes whole storages."""
    assert isinstance(data, torch.Tensor)
    piece = data.detach().cpu()
    return piece if piece.untyped_storage().nbytes() == piece.nbytes else piece.clone()
