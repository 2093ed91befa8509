"""Writes a rank's shards one after another, so that saving needs host memory only for the largest of them.

torch's writer keeps a host copy of every tensor until the file is complete (distributed/checkpoint/filesystem.py,
``tensor_dict``): as much memory as all masters and states, which may be more than the host has if these are in files.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, cast

import torch
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from zeroplan_runtime.checkpoint.agreement import as_line
from zeroplan_runtime.checkpoint.checksums import SummedStream, without_torchs_checksums
from zeroplan_runtime.checkpoint.manifest import METADATA, Manifest, RankFile, SaveId


class Watch(Protocol):
    """Where to say what is being done."""

    def begin(self, doing: str) -> None:
        """Is called when a part of the work begins."""

    def piece(self, doing: str) -> None:
        """Is called after each piece of it."""


class Unwatched:
    """Says it to nobody: a thread's work is no progress of the rank's, and no other rank waits for a process of its own."""

    def begin(self, doing: str) -> None:
        """Does nothing."""

    def piece(self, doing: str) -> None:
        """Does nothing."""


@dataclass(frozen=True)
class WrittenPiece:
    """A rank's message to the first rank about a piece that it wrote: where it is, and its checksum."""

    place: _StorageInfo
    rank: int
    checksum: int


class ShardWriter(FileSystemWriter):
    """A ``FileSystemWriter`` that writes the same files with less host memory, and their checksums.

    Args:
        folder: the checkpoint's, which exists.
        save: which call saves.
        rank: this rank.
        activity: where to say what is being done.

    Attributes:
        manifest: the checksums of all files, on the first rank when all is written.
    """

    def __init__(self, folder: Path, save: SaveId, rank: int, activity: Watch) -> None:
        super().__init__(folder, sync_files=True)
        self._folder, self._save, self._own_rank, self._activity = folder, save, rank, activity
        self.manifest: Manifest | None = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes one file with a record for each shard of the plan.

        Raises:
            BadInput: when the system does not take it.
        """
        prefix: Any = plan.storage_data
        path = self._folder / f"{prefix.prefix}0{DEFAULT_SUFFIX}"
        doing = f"writing {path.name} of {self._folder.name}"
        results = []
        try:
            with open(path, "wb") as file, without_torchs_checksums():
                stream = SummedStream(file, lambda: self._activity.piece(doing))
                stream.write(self._save.header(self._own_rank))
                for item in plan.items:
                    begin, stream.checksum = file.tell(), 0
                    try:
                        torch.save(_alone(planner.resolve_data(item)), cast(IO[bytes], stream))
                    except RuntimeError:
                        if stream.fault is None:
                            raise
                        raise stream.fault from None
                    length = file.tell() - begin
                    piece = WrittenPiece(_StorageInfo(path.name, begin, length), self._own_rank, stream.checksum)
                    results.append(WriteResult(item.index, length, piece))
                stream.sync()
        except OSError as fault:
            raise as_line(fault, str(path)) from None
        finally:
            self._activity.begin("waiting for what other ranks write")
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the metadata when every rank has written its file, and keeps the :attr:`manifest`."""
        files = {}
        places = []
        for written in results:
            pieces = [one.storage_data for one in written]
            places.append([WriteResult(r.index, r.size_in_bytes, r.storage_data.place) for r in written])
            if pieces:
                last = pieces[-1].place
                sums = {one.place.offset: (one.place.length, one.checksum) for one in pieces}
                files[last.relative_path] = RankFile(pieces[0].rank, last.offset + last.length, sums)
        super().finish(metadata, places)
        data = (self._folder / METADATA).read_bytes()
        self.manifest = Manifest((len(data), zlib.crc32(data)), files)


def _alone(data: Any) -> torch.Tensor:
    """Returns the host tensor with its own storage, because ``torch.save`` writes whole storages."""
    assert isinstance(data, torch.Tensor)
    shard = data.detach().cpu()
    return shard if shard.untyped_storage().nbytes() == shard.nbytes else shard.clone()
