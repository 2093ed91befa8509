"""CRC-32 of what is written, while it is written, and of what a file holds.

zlib's ``crc32`` is in every Python, releases the interpreter's lock and is faster than disks; it finds every flipped bit, every
burst of up to 32 bits, and of anything else all but one in 2³². It does not protect against an attacker.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import torch

#: Bytes that are written, or read, at a time.
_CHUNK = 16 << 20
#: Bytes after which a file is flushed to the disk, so that no flush takes so long that it looks like a hang.
_FLUSH = 1 << 30


class SummedStream:
    """A file that ``torch.save`` writes to.

    Args:
        file: the file.
        moved: called after each chunk.

    Attributes:
        checksum: of what was written since it was last set to 0.
        fault: the first error of the file, which ``torch.save`` replaces by one of its own.
    """

    def __init__(self, file: BinaryIO, moved: Callable[[], None]) -> None:
        self._file, self._moved = file, moved
        self._unflushed = 0
        self.checksum = 0
        self.fault: OSError | None = None

    def write(self, data: Any) -> int:
        """Writes all of `data`, an object with a buffer."""
        whole = memoryview(data).cast("B")
        for begin in range(0, len(whole), _CHUNK):
            part = whole[begin : begin + _CHUNK]
            self.checksum = zlib.crc32(part, self.checksum)
            try:
                self._file.write(part)
                self._unflushed += len(part)
                if self._unflushed >= _FLUSH:
                    self.sync()
            except OSError as fault:
                self.fault = self.fault or fault
                raise
            self._moved()
        return len(whole)

    def flush(self) -> None:
        """Does nothing; see :meth:`sync`."""

    def sync(self) -> None:
        """Blocks until the disk has all that was written."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._unflushed = 0


@contextmanager
def without_torchs_checksums() -> Iterator[None]:
    """Enters a context in which ``torch.save`` forms no checksums: nothing reads them, and they take as long as ours."""
    options = torch.serialization
    before = options.get_crc32_options()
    options.set_crc32_options(False)
    try:
        yield
    finally:
        options.set_crc32_options(before)


def checksum_of(file: int, begin: int, length: int, moved: Callable[[], None]) -> int:
    """Forms the checksum of `length` bytes of an open file from byte `begin`, or of those that there are.

    Args:
        file: the file's descriptor.
        begin, length: the bytes.
        moved: called after each chunk.
    """
    buffer = memoryview(bytearray(min(length, _CHUNK)))
    total, end = 0, begin + length
    while begin < end:
        count = os.preadv(file, [buffer[: end - begin]], begin)
        if not count:
            break
        total = zlib.crc32(buffer[:count], total)
        begin += count
        moved()
    return total
