"""Swap files: blocks of fixed size in a preallocated file without a header, each with a checksum that every read is held to.

Swap files hold what a running job can lose: a resumed job starts from its checkpoint and writes them anew. So the index of
checksums lives in memory, and is written beside the file (``<name>.index.json``) only by :meth:`SwapFile.flush`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from zeroplan.core.errors import BadInput
from zeroplan.core.layout import PAGE
from zeroplan_runtime.checkpoint.atomic_files import write_durably
from zeroplan_runtime.offload.io import DiskFault, DiskFile, IoEngine, IoRequest

_RESUME = "check the disk (dmesg, smartctl) and resume from the last checkpoint"


@dataclass(slots=True)
class _Block:
    """One block: where it lies, and, while its bytes are known to be whole, how many were written and their checksum."""

    offset: int
    size: int
    written: int = 0
    checksum: int | None = None


@dataclass(slots=True, eq=False)
class Transfer:
    """A block on its way; :meth:`SwapFile.finish` waits for it."""

    block: str
    request: IoRequest
    size: int
    engine: IoEngine
    expected: int | None = None  # the checksum, of a read
    of: Transfer | None = None  # the write that a read follows, whose checksum is known when that is finished

    def wait_until_idle(self) -> None:
        """Returns when the memory is not used any more, whether the transfer failed or not."""
        with contextlib.suppress(DiskFault):
            self.engine.wait(self.request)


class SwapFile:
    """One file of named blocks. Get one from :class:`~zeroplan_runtime.offload.swap_folder.SwapFolder`.

    A block takes up to its size, rounded up to a page, and is read back with as many bytes as were written (:meth:`held`).
    Transfers of whole pages go past the page cache.
    """

    def __init__(self, file: DiskFile, blocks: dict[str, _Block], engine: IoEngine) -> None:
        self.file, self.engine = file, engine
        self._blocks = blocks

    @classmethod
    def create(cls, path: Path, blocks: Mapping[str, int], engine: IoEngine, *, direct: bool = True) -> SwapFile:
        """A new file for `blocks` (name: bytes), every byte of it reserved on the disk.

        Raises:
            BadInput: when there is no room.
        """
        placed, total = _place(blocks)
        room = os.statvfs(path.parent)
        free = room.f_bavail * room.f_frsize
        if total > free:
            raise _no_room(path, total, free, os.strerror(errno.ENOSPC))
        file = DiskFile(path, create=True, direct=direct)
        try:
            if total:
                os.posix_fallocate(file.buffered, 0, total)
        except OSError as fault:
            file.close()
            path.unlink()
            raise _no_room(path, total, free, os.strerror(fault.errno or 0)) from fault
        return cls(file, placed, engine)

    @classmethod
    def open(cls, path: Path, engine: IoEngine) -> SwapFile:
        """A file that :meth:`flush` left, with its index.

        Raises:
            DiskFault: when the index cannot be read or was made with another checksum, or the file is shorter than it says.
        """
        try:
            index = json.loads(_index(path).read_text())
            blocks = {name: _Block(*row) for name, row in index["blocks"].items()}
            algorithm, size = index["algorithm"], int(index["bytes"])
        except (OSError, ValueError, KeyError, TypeError) as fault:
            raise DiskFault(errno.EBADMSG, f"{_index(path)} is not a swap file's index ({fault}); {_RESUME}") from fault
        if algorithm != engine.algorithm:
            raise DiskFault(errno.EBADMSG, f"{path} has {algorithm} checksums, here are {engine.algorithm}; build the library")
        file = DiskFile(path)
        there = os.fstat(file.buffered).st_size
        if there < size:
            file.close()
            raise DiskFault(errno.ENODATA, f"{path} was truncated: {there:,} bytes of {size:,} are there; {_RESUME}")
        return cls(file, blocks, engine)

    @property
    def path(self) -> Path:
        """Where the data is."""
        return self.file.path

    @property
    def bytes(self) -> int:
        """The file's size."""
        return sum(_pages(block.size) for block in self._blocks.values())

    def write(self, block: str, source: torch.Tensor, *, after: Transfer | None = None) -> Transfer:
        """Begins to write the tensor to the beginning of a block. Until :meth:`finish` the block holds nothing."""
        place, size = self._at(block, source)
        place.checksum = None
        place.written = size
        request = self.engine.write(self.file, place.offset, source, after=after.request if after else None, checksum=True)
        return Transfer(block, request, size, self.engine)

    def read(self, block: str, into: torch.Tensor, *, after: Transfer | None = None) -> Transfer:
        """Begins to read a block into the tensor, once `after` (a transfer of this or another file) is done.

        Raises:
            DiskFault: when the block was never written whole.
            ValueError: when the tensor is not as large as what was written.
        """
        place, size = self._at(block, into)
        follows = after if after is not None and after.request.writes and after.block == block else None
        if place.checksum is None and follows is None:
            raise DiskFault(errno.ENODATA, f"block {block!r} of {self.path} holds nothing: it was never written whole")
        if size != place.written:
            raise ValueError(f"block {block!r} of {self.path} holds {place.written} bytes, the tensor {size}")
        request = self.engine.read(self.file, place.offset, into, after=after.request if after else None, checksum=True)
        return Transfer(block, request, size, self.engine, expected=place.checksum, of=follows)

    def finish(self, transfer: Transfer) -> None:
        """Waits for a transfer of this file; holds a read to its checksum, keeps a write's.

        Raises:
            DiskFault: when it failed, or the bytes are not those that were written.
        """
        try:
            checksum = self.engine.wait(transfer.request)
        except DiskFault as fault:
            if transfer.of is not None and fault.errno == errno.ECANCELED:
                self.finish(transfer.of)  # it is that write's fault
            raise DiskFault(fault.errno, f"block {transfer.block!r}: {fault.strerror}") from fault
        if transfer.request.writes:
            self._blocks[transfer.block].checksum = checksum
            return
        expected = self.engine.wait(transfer.of.request) if transfer.of is not None else transfer.expected
        if checksum != expected:
            raise DiskFault(
                errno.EBADMSG,
                f"block {transfer.block!r} of {self.path} (bytes {transfer.request.offset:,} to "
                f"{transfer.request.offset + transfer.size:,}) is corrupted: its checksum is {checksum:08x}, that of what was "
                f"written {expected or 0:08x}; {_RESUME}",
            )

    def stored_bytes(self, block: str) -> int:
        """Bytes that were last written to a block, 0 at first."""
        return self._blocks[block].written

    def done(self, transfer: Transfer) -> bool:
        """Whether :meth:`finish` would not wait."""
        return self.engine.done(transfer.request)

    def flush(self) -> None:
        """Makes the data and its index durable, data first. Nothing may be under way.

        Raises:
            DiskFault: when the disk refuses.
        """
        try:
            os.fsync(self.file.buffered)
            index = {
                "algorithm": self.engine.algorithm,
                "bytes": self.bytes,
                "blocks": {name: [at.offset, at.size, at.written, at.checksum] for name, at in self._blocks.items()},
            }
            write_durably(_index(self.path), json.dumps(index).encode())
        except OSError as fault:
            reason = os.strerror(fault.errno or 0)
            raise DiskFault(fault.errno, f"{self.path} could not be made durable: {reason}; {_RESUME}") from fault

    def close(self) -> None:
        """Closes the file and leaves it where it is."""
        self.file.close()

    def _at(self, block: str, tensor: torch.Tensor) -> tuple[_Block, int]:
        place, size = self._blocks[block], tensor.numel() * tensor.element_size()
        if size > _pages(place.size):
            raise ValueError(f"block {block!r} of {self.path} is of {place.size} bytes, the tensor of {size}")
        return place, size


def file_bytes(blocks: Mapping[str, int]) -> int:
    """The size of a swap file of these blocks (name: bytes): each begins on a page of 4096 bytes."""
    return sum(_pages(size) for size in blocks.values())


def _place(blocks: Mapping[str, int]) -> tuple[dict[str, _Block], int]:
    placed, offset = {}, 0
    for name, size in blocks.items():
        placed[name] = _Block(offset, size)
        offset += _pages(size)
    return placed, offset


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _index(path: Path) -> Path:
    return path.with_suffix(".index.json")


def _no_room(path: Path, needed: int, free: int, reason: str) -> BadInput:
    return BadInput(
        f"{path} needs {needed:,} bytes, {free:,} are free on its disk: {reason}",
        where="nvme_path",
        remedy="free space there, or point nvme_path to a larger disk",
    )
