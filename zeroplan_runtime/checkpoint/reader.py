"""Reads a checkpoint's pieces: each must have its checksum, and a pickle may hold only what torch's writer puts there."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import EnumMeta
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from zeroplan_runtime.activity import Activity
from zeroplan_runtime.checkpoint.checksums import checksum_of
from zeroplan_runtime.checkpoint.manifest import METADATA, Manifest, RankFile, SaveId, damaged, read_metadata, require_rank_file


class VerifyingReader(FileSystemReader):
    """A ``FileSystemReader`` of one checkpoint.

    Args:
        folder: the checkpoint.
        save: which call saved it.
        manifest: its checksums.
        activity: where to say what is being done.

    Attributes:
        metadata: what the checkpoint holds.

    Raises:
        BadInput: when ``.metadata`` is damaged or foreign.
    """

    def __init__(self, folder: Path, save: SaveId, manifest: Manifest, activity: Activity) -> None:
        super().__init__(folder)
        self._folder, self._save, self._manifest, self._activity = folder, save, manifest, activity
        self.metadata = unpickled_metadata(folder / METADATA, read_metadata(folder, manifest))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Reads the checkpoint's metadata."""
        if self.metadata.storage_meta is not None:
            self.metadata.storage_meta.load_id = self.load_id
        return self.metadata

    def require_pieces(self, items: Iterable[ReadItem]) -> None:
        """Checks the files that hold what is to be read, and its checksums.

        Raises:
            BadInput: for the first that is not what was written.
        """
        needed: dict[str, dict[int, str]] = {}
        for item in items:
            info = self.metadata.storage_data[item.storage_index]
            needed.setdefault(info.relative_path, {})[info.offset] = item.storage_index.fqn
        for name in needed:  # before the first piece: a missing file is found sooner than a flipped bit
            require_rank_file(self._folder / name, self._manifest.files[name], self._save)
        for name, tensors in needed.items():
            self._require_sums(self._folder / name, self._manifest.files[name], tensors)

    def _require_sums(self, path: Path, file: RankFile, tensors: Mapping[int, str]) -> None:
        doing = f"reading {path.parent.name}/{path.name}"
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for offset, tensor in sorted(tensors.items()):
                length, expected = file.pieces[offset]
                if checksum_of(handle, offset, length, lambda: self._activity.piece(doing)) != expected:
                    place = f"bytes {offset:,} to {offset + length:,} ({tensor!r})"
                    raise damaged(path, f"is damaged: {place} are not those that rank {file.rank} wrote")
        finally:
            os.close(handle)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads what `plan` names into the planner's tensors; see :meth:`require_pieces`.

        One piece at a time is in memory: torch's loop would keep each until it has read the next.
        """
        done: Future[None] = Future()
        done.set_result(None)
        try:
            for item in plan.items:
                self._activity.piece(f"loading {self._folder.name}")
                super().read_data(replace(plan, items=[item]), planner)
            return done
        finally:
            self._activity.begin("waiting for what other ranks load")


def unpickled_metadata(path: Path, data: bytes) -> Metadata:
    """Return the metadata in a file that ``torch.distributed.checkpoint`` wrote, without running any code that it names.

    Raises:
        BadInput: when it holds anything else.
    """
    try:
        metadata = _RestrictedUnpickler(io.BytesIO(data)).load()
    except Exception as fault:  # a pickle can raise anything
        raise damaged(path, f"is not what torch.distributed.checkpoint writes: {fault}") from None
    if not isinstance(metadata, Metadata):
        raise damaged(path, f"holds a {type(metadata).__name__}, not a checkpoint's metadata")
    return metadata


class _RestrictedUnpickler(pickle.Unpickler):
    _MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
    _NAMES = frozenset(
        {
            ("torch", "Size"),
            ("torch", "device"),
            ("torch.serialization", "_get_layout"),
            ("torch._utils", "_rebuild_dtype"),
            ("builtins", "set"),
            ("pathlib", "PosixPath"),
            ("pathlib._local", "PosixPath"),
            *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if "." not in name and (module in self._MODULES or (module, name) in self._NAMES):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _member(kind: Any, name: Any) -> Any:
    """What ``getattr`` gives of an enum: Python 3.11.0 to 3.11.3 pickle a member so (``enum.Enum.__reduce_ex__``)."""
    if not (isinstance(kind, EnumMeta) and name in kind.__members__):
        raise pickle.UnpicklingError("it names builtins.getattr")
    return kind.__members__[name]
