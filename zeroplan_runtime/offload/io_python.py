"""The I/O backend without the native library: ``os.preadv`` and ``os.pwritev`` in threads, as csrc/cpu/io_engine.cpp."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import os
import zlib
from concurrent.futures import Future, ThreadPoolExecutor, wait

from zeroplan.core.arena.layout import PAGE

_WRITE, _CHECKSUM = 1, 2
_MOST_THREADS = 64

_Result = tuple[int, int, int]


class PythonEngine:
    """Runs each request in a thread, block by block. Checksums are zlib's CRC-32.

    Args:
        block_size: bytes of one system call.
        threads: requests at a time, at most 64.
    """

    def __init__(self, block_size: int, threads: int) -> None:
        self._block_size = block_size
        self._pool = ThreadPoolExecutor(min(threads, _MOST_THREADS), thread_name_prefix="zeroplan-io")
        self._requests: dict[int, Future[_Result]] = {}
        self._handles = itertools.count(1)

    def submit(self, memory: int, offset: int, length: int, after: int, file: int, flags: int) -> int:
        """Submits a transfer and returns its handle; `after` is the handle of a transfer that must be done first, or 0."""
        handle = next(self._handles)
        # Requests start in order, so the one that a thread waits for has a thread: the pool cannot deadlock.
        before = self._requests.get(after)
        self._requests[handle] = self._pool.submit(self._move, memory, offset, length, before, file, flags)
        return handle

    def wait(self, handle: int, milliseconds: int) -> _Result | None:
        """(errno, offset of the failure, checksum), or None when the request is not done in time."""
        future = self._requests.get(handle)
        if future is None:
            return errno.EINVAL, 0, 0
        done, _ = wait([future], milliseconds / 1000)
        if not done:
            return None
        del self._requests[handle]
        return future.result()

    def close(self) -> None:
        """Waits for transfers and ends the threads."""
        self._pool.shutdown()

    def _move(self, memory: int, offset: int, length: int, before: Future[_Result] | None, file: int, flags: int) -> _Result:
        if before is not None and before.result()[0]:
            return errno.ECANCELED, offset, 0
        if length == 0:
            return 0, 0, 0
        view = memoryview((ctypes.c_char * length).from_address(memory)).cast("B")
        direct = bool(fcntl.fcntl(file, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0))
        moved = 0
        while moved < length:
            part = view[moved : moved + self._block_size - moved % self._block_size]
            try:
                count = os.pwritev(file, [part], offset + moved) if flags & _WRITE else os.preadv(file, [part], offset + moved)
            except OSError as fault:
                return fault.errno or errno.EIO, offset + moved, 0
            if direct and moved + count < length:
                count -= count % PAGE
            if count == 0:
                return errno.EIO if flags & _WRITE else errno.ENODATA, offset + moved, 0
            moved += count
        return 0, 0, zlib.crc32(view) if flags & _CHECKSUM else 0
