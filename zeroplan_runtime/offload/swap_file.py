"""Swap files: named blocks of fixed size in a preallocated file, each with a checksum that every read is compared with.

A swap file holds what a running job can lose, as a resumed job starts from its checkpoint. So the file has no header, and the
checksums are kept in memory.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from zeroplan.core.arena.layout import PAGE
from zeroplan.core.errors import BadInput
from zeroplan_runtime.offload.io import DiskFault, DiskFile, IoEngine, IoRequest

_RESUME = "check the disk (dmesg, smartctl) and resume from the last checkpoint"


@dataclass(slots=True)
class _StoredBlock:
    """One block: its place in the file, the bytes written last, and their checksum (None until they are written whole)."""

    offset: int
    size: int
    written: int = 0
    checksum: int | None = None


@dataclass(slots=True, eq=False)
class Transfer:
    """A read or write of a block that is under way; :meth:`SwapFile.finish` waits for it."""

    block: str
    request: IoRequest
    size: int
    engine: IoEngine
    expected: int | None = None  # the checksum of what a read should give
    follows: Transfer | None = None  # the write of the same block that a read follows, whose checksum is not known yet

    def wait_until_idle(self) -> None:
        """Blocks until the transfer does not use the memory any more, whether it failed or not."""
        with contextlib.suppress(DiskFault):
            self.engine.wait(self.request)


class SwapFile:
    """One file of named blocks. Make one by :meth:`zeroplan_runtime.offload.swap_folder.SwapFolder.file`.

    A block holds up to its size, rounded up to a page, and must be read with as many bytes as were written last
    (:meth:`stored_bytes`). Transfers of whole pages bypass the page cache.
    """

    def __init__(self, file: DiskFile, blocks: dict[str, _StoredBlock], engine: IoEngine) -> None:
        self.file, self.engine = file, engine
        self._blocks = blocks

    @classmethod
    def create(cls, path: Path, blocks: Mapping[str, int], engine: IoEngine, *, direct: bool = True) -> SwapFile:
        """Creates a file for `blocks` (bytes by name), with all of its space reserved on the disk.

        Raises:
            BadInput: when the disk has too little free space.
        """
        placed, total = _place(blocks)
        room = os.statvfs(path.parent)
        free = room.f_bavail * room.f_frsize
        if total > free:
            raise _no_room(path, total, free, os.strerror(errno.ENOSPC))
        file = engine.keep(DiskFile(path, create=True, direct=direct))
        try:
            if total:
                os.posix_fallocate(file.buffered, 0, total)
        except OSError as fault:
            file.close()
            path.unlink()
            raise _no_room(path, total, free, os.strerror(fault.errno or 0)) from fault
        return cls(file, placed, engine)

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self.file.path

    @property
    def bytes(self) -> int:
        """The size of the file in bytes."""
        return sum(_pages(block.size) for block in self._blocks.values())

    def write(self, block: str, source: torch.Tensor, *, after: Transfer | None = None) -> Transfer:
        """Starts to write `source`, a contiguous host tensor, to a block; until :meth:`finish` the block cannot be read.

        Args:
            block: the block's name.
            source: the tensor; it must not change until :meth:`finish`.
            after: a transfer of this or another file that must be done first.

        Raises:
            ValueError: when the tensor is larger than the block.
        """
        place, size = self._at(block, source)
        place.checksum = None
        place.written = size
        request = self.engine.write(self.file, place.offset, source, after=after.request if after else None, checksum=True)
        return Transfer(block, request, size, self.engine)

    def read(self, block: str, into: torch.Tensor, *, after: Transfer | None = None) -> Transfer:
        """Starts to read a block into `into`, a contiguous host tensor.

        Args:
            block: the block's name.
            into: the tensor, of :meth:`stored_bytes` bytes.
            after: a transfer of this or another file that must be done first. If it is the write of the same block, the
                read is compared with that write's checksum.


        Raises:
            DiskFault: when the block was never written whole.
            ValueError: when the tensor has another size than what was written.
        """
        place, size = self._at(block, into)
        follows = after if after is not None and after.request.writes and after.block == block else None
        if place.checksum is None and follows is None:
            raise DiskFault(errno.ENODATA, f"block {block!r} of {self.path} holds nothing: it was never written whole")
        if size != place.written:
            raise ValueError(f"block {block!r} of {self.path} holds {place.written} bytes, the tensor {size}")
        request = self.engine.read(self.file, place.offset, into, after=after.request if after else None, checksum=True)
        return Transfer(block, request, size, self.engine, expected=place.checksum, follows=follows)

    def finish(self, transfer: Transfer) -> None:
        """Blocks until a transfer of this file is done; checks the checksum of a read, keeps that of a write.

        Raises:
            DiskFault: when it failed, or the bytes are not those that were written.
        """
        try:
            checksum = self.engine.wait(transfer.request)
        except DiskFault as fault:
            if transfer.follows is not None and fault.errno == errno.ECANCELED:
                self.finish(transfer.follows)  # the write failed
            raise DiskFault(fault.errno, f"block {transfer.block!r}: {fault.strerror}") from fault
        if transfer.request.writes:
            self._blocks[transfer.block].checksum = checksum
            return
        expected = self.engine.wait(transfer.follows.request) if transfer.follows is not None else transfer.expected
        if checksum != expected:
            raise DiskFault(
                errno.EBADMSG,
                f"block {transfer.block!r} of {self.path} (bytes {transfer.request.offset:,} to "
                f"{transfer.request.offset + transfer.size:,}) is corrupted: its checksum is {checksum:08x}, that of what was "
                f"written {expected or 0:08x}; {_RESUME}",
            )

    def stored_bytes(self, block: str) -> int:
        """Returns the bytes written last to a block; 0 at first."""
        return self._blocks[block].written

    def close(self) -> None:
        """Closes the file; it is not removed."""
        self.file.close()

    def _at(self, block: str, tensor: torch.Tensor) -> tuple[_StoredBlock, int]:
        place, size = self._blocks[block], tensor.numel() * tensor.element_size()
        if size > _pages(place.size):
            raise ValueError(f"block {block!r} of {self.path} is of {place.size} bytes, the tensor of {size}")
        return place, size


def _place(blocks: Mapping[str, int]) -> tuple[dict[str, _StoredBlock], int]:
    placed, offset = {}, 0
    for name, size in blocks.items():
        placed[name] = _StoredBlock(offset, size)
        offset += _pages(size)
    return placed, offset


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _no_room(path: Path, needed: int, free: int, reason: str) -> BadInput:
    return BadInput(
        f"{path} needs {needed:,} bytes, {free:,} are free on its disk: {reason}",
        where="nvme_path",
        remedy="free space there, or point nvme_path to a larger disk",
    )
