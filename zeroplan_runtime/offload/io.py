"""Asynchronous transfers between files and host memory, which bypass the page cache where the file system allows it.

Three backends give the same results: ``io_uring`` and ``threads`` (``csrc/cpu/io.hpp``), and ``python`` without the native
library. ``auto`` takes the first that works here; containers often forbid io_uring (EPERM, ENOSYS).
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import weakref
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol

import torch

from zeroplan.core.arena.layout import PAGE
from zeroplan.core.errors import BadInput
from zeroplan.core.plumbing.native import library as shared_library
from zeroplan.core.zero_config import Aio
from zeroplan.ds_config.rules_runtime import require_io
from zeroplan_runtime.offload.io_python import PythonEngine

Backend = Literal["auto", "io_uring", "threads", "python"]

_BACKENDS = {"threads": 0, "io_uring": 1}
_WRITE, _CHECKSUM = 1, 2
_WAIT_MS = 200  # between two waits Python can handle a Ctrl-C


class DiskFault(OSError):
    """A read or write failed, or a read gave other bytes than were written; names the file, the place and the remedy."""

    def __str__(self) -> str:
        return self.strerror or ""


class _Options(ctypes.Structure):
    """``ZeroplanIoOptions``."""

    _fields_ = [
        ("block_size", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("backend", "queue_depth", "workers", "single_submit", "overlap_events")),
    ]


class _Request(ctypes.Structure):
    """``ZeroplanIoRequest``."""

    _fields_ = [
        ("memory", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("offset", "length", "after")),
        ("file", ctypes.c_int32),
        ("flags", ctypes.c_int32),
    ]


class _Result(ctypes.Structure):
    """``ZeroplanIoResult``."""

    _fields_ = [("offset", ctypes.c_int64), ("error", ctypes.c_int32), ("checksum", ctypes.c_uint32)]


class _Handles(Protocol):
    """A backend. `wait` returns (errno, offset of the failure, checksum), or None when the request is not done in time."""

    def submit(self, memory: int, offset: int, length: int, after: int, file: int, flags: int) -> int: ...
    def wait(self, handle: int, milliseconds: int) -> tuple[int, int, int] | None: ...
    def close(self) -> None: ...


class DiskFile:
    """An open file with two file descriptors: through the page cache, and past it (`direct`) where the file system allows it.

    Raises:
        DiskFault: when the file cannot be opened.
    """

    def __init__(self, path: Path, *, create: bool = False, direct: bool = True) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        try:
            self.buffered = os.open(path, flags, 0o600)
        except OSError as fault:
            raise DiskFault(fault.errno, f"{path} cannot be opened: {os.strerror(fault.errno or 0)}") from fault
        self.direct: int | None = None
        if direct and hasattr(os, "O_DIRECT"):
            try:
                self.direct = os.open(path, (flags & ~os.O_CREAT) | os.O_DIRECT)
            except OSError as fault:
                if fault.errno not in (errno.EINVAL, errno.ENOTSUP):
                    self.close()
                    raise
        self._owner = os.getpid()

    def handle(self, memory: int, offset: int, length: int) -> int:
        """The file descriptor for one transfer: direct if address, offset and length are multiples of a page."""
        if self.direct is None or (memory | offset | length) % PAGE:
            return self.buffered
        return self.direct

    def close(self) -> None:
        """Closes both file descriptors."""
        for handle in (self.buffered, self.direct):
            if handle is not None and handle >= 0:
                os.close(handle)
        self.buffered, self.direct = -1, None


@dataclass(slots=True, eq=False)
class IoRequest:
    """One transfer that has been submitted. It keeps the tensor alive."""

    handle: int
    file: DiskFile
    offset: int
    memory: torch.Tensor
    writes: bool
    checksum: int | None = None
    fault: DiskFault | None = None
    turn: threading.Lock = field(default_factory=threading.Lock)


class IoEngine:
    """Reads and writes in the background. Use it as a context manager, or :meth:`close` it; one that is dropped first ends its
    transfers, whose memory and files may go with it.

    Args:
        aio: DeepSpeed's ``aio`` section: ``block_size`` bytes of one system call, ``queue_depth`` of them in flight for each
            of ``intra_op_parallelism`` workers, ``single_submit`` and ``overlap_events`` for io_uring's submission.
        backend: the backend; "auto" takes the first that works.

    Attributes:
        backend: the name of the backend in use.
        why: why the better ones are not in use; empty if the best one is.

    Raises:
        BadInput: when an option is out of range or not supported, or the named backend does not work here.
    """

    def __init__(self, aio: Aio | None = None, backend: Backend = "auto") -> None:
        self.aio = aio or Aio()
        require_io(self.aio)
        self._engine, self.backend, self.why = _open(self.aio, backend)
        self._owner = os.getpid()
        self._files: list[DiskFile] = []
        self._end = weakref.finalize(self, _end, self._engine, self._files, self._owner)
        self._end.atexit = False  # the thread of updates may still use it
        self._lock = threading.Lock()
        self._open: dict[int, IoRequest] = {}

    def keep(self, file: DiskFile) -> DiskFile:
        """Closes `file` when this engine is closed or dropped, if it is open still."""
        self._files.append(file)
        return file

    def read(
        self, file: DiskFile, offset: int, into: torch.Tensor, *, after: IoRequest | None = None, checksum: bool = False
    ) -> IoRequest:
        """Submits a read from byte `offset` of `file` to the contiguous host tensor `into`, to start when `after` is done."""
        return self._submit(file, offset, into, after, _CHECKSUM if checksum else 0)

    def write(
        self, file: DiskFile, offset: int, source: torch.Tensor, *, after: IoRequest | None = None, checksum: bool = False
    ) -> IoRequest:
        """Submits a write of the contiguous host tensor `source` to byte `offset` of `file`, to start when `after` is done."""
        return self._submit(file, offset, source, after, _WRITE | (_CHECKSUM if checksum else 0))

    def wait(self, request: IoRequest) -> int:
        """Blocks until the transfer is done.

        Returns:
            The checksum of its bytes (CRC-32C; zlib's CRC-32 of the ``python`` backend), 0 if none was asked for.

        Raises:
            DiskFault: when it failed; names the file, the offset and the reason.
        """
        while self._pending(request) and not self._finish(request, _WAIT_MS):
            pass
        if request.fault is not None:
            raise request.fault
        return request.checksum or 0

    def drain(self) -> None:
        """Blocks until no transfer is under way, whether transfers fail or not."""
        for request in list(self._open.values()):
            while self._pending(request) and not self._finish(request, _WAIT_MS):
                pass

    def close(self) -> None:
        """Waits for transfers and ends the workers."""
        if self._owner == os.getpid() and self._engine is not None:
            self.drain()
            self._end()
            self._engine = None

    def __enter__(self) -> IoEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _submit(self, file: DiskFile, offset: int, memory: torch.Tensor, after: IoRequest | None, flags: int) -> IoRequest:
        if memory.device.type != "cpu" or not memory.is_contiguous():
            raise ValueError(
                f"expected a contiguous tensor in host memory, got one on {memory.device}, stride {memory.stride()}"
            )
        if self._engine is None:
            raise ValueError("the I/O engine is closed")
        address, length = memory.data_ptr(), memory.numel() * memory.element_size()
        request = IoRequest(0, file, offset, memory, bool(flags & _WRITE))
        with self._lock:
            before = after.handle if after is not None and after.handle in self._open else 0
            if after is not None and after.fault is not None:
                request.fault = _fault(request, errno.ECANCELED, offset)
                return request
            handle = file.handle(address, offset, length)
            request.handle = self._engine.submit(address, offset, length, before, handle, flags)
            self._open[request.handle] = request
        return request

    def _pending(self, request: IoRequest) -> bool:
        return request.checksum is None and request.fault is None

    def _finish(self, request: IoRequest, milliseconds: int) -> bool:
        assert self._engine is not None
        with request.turn:  # the backend gives each result only once
            if not self._pending(request):
                return True
            result = self._engine.wait(request.handle, milliseconds)
            if result is None:
                return False
            error, offset, checksum = result
            with self._lock:
                self._open.pop(request.handle, None)
                if error:
                    request.fault = _fault(request, error, offset)
                else:
                    request.checksum = checksum
        return True


def _end(engine: _Handles | None, files: list[DiskFile], owner: int) -> None:
    if owner == os.getpid():  # not in a forked child, which has no such threads
        if engine is not None:
            engine.close()
        for file in files:
            file.close()


class _Native:
    """The backends ``io_uring`` and ``threads`` of the native library."""

    def __init__(self, aio: Aio, backend: str) -> None:
        native = _library()
        if native is None:
            raise OSError(errno.ENOSYS, "the native library is not built")
        self._library = native
        options = _Options(
            aio.block_size,
            _BACKENDS[backend],
            aio.queue_depth,
            aio.intra_op_parallelism,
            int(aio.single_submit),
            int(aio.overlap_events),
        )
        error = ctypes.c_int32()
        self._engine = native.zeroplan_io_open(ctypes.byref(options), ctypes.byref(error))
        if not self._engine:
            raise OSError(error.value, os.strerror(error.value))

    def submit(self, memory: int, offset: int, length: int, after: int, file: int, flags: int) -> int:
        request = _Request(memory, offset, length, after, file, flags)
        handle: int = self._library.zeroplan_io_submit(self._engine, ctypes.byref(request))
        return handle

    def wait(self, handle: int, milliseconds: int) -> tuple[int, int, int] | None:
        result = _Result()
        if not self._library.zeroplan_io_wait(self._engine, handle, milliseconds, ctypes.byref(result)):
            return None
        return result.error, result.offset, result.checksum

    def close(self) -> None:
        self._library.zeroplan_io_close(self._engine)


def _open(aio: Aio, backend: Backend) -> tuple[_Handles | None, str, str]:
    """The backend, its name, and why better ones are not in use."""
    why = ""
    for name in ("io_uring", "threads") if backend == "auto" else (backend,):
        if name == "python":
            break
        try:
            return _Native(aio, name), name, why
        except OSError as fault:
            reason = f"{name}: {errno.errorcode.get(fault.errno or 0, fault.errno)}, {fault.strerror}"
            why = f"{why}; {reason}" if why else reason
    if backend not in ("auto", "python"):
        raise BadInput(f"{why}", where="file I/O", remedy='use the backend "auto"')
    return PythonEngine(aio.block_size, aio.queue_depth * aio.intra_op_parallelism), "python", why


def _fault(request: IoRequest, error: int, offset: int) -> DiskFault:
    doing = "writing" if request.writes else "reading"
    size = request.memory.numel() * request.memory.element_size()
    reason = {
        errno.ENODATA: "the file ends there: it was truncated",
        errno.ECANCELED: "not done, because the transfer before it failed",
    }.get(error, os.strerror(error))
    remedy = {
        errno.ENOSPC: "free space on that disk or point nvme_path to another",
        errno.EDQUOT: "raise the quota or point nvme_path elsewhere",
        errno.EFBIG: "raise `ulimit -f`, or point nvme_path to a file system without that limit",
    }.get(error, "check the disk (dmesg, smartctl) and resume from the last checkpoint")
    return DiskFault(
        error, f"{doing} {size:,} bytes at {request.offset:,} of {request.file.path} failed at {offset:,}: {reason}; {remedy}"
    )


@cache
def _library() -> ctypes.CDLL | None:
    """The library with its functions declared; None where it is not built, does not load, or lacks one of them."""
    found = shared_library()
    if found is None:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int
    try:
        found.zeroplan_io_open.argtypes, found.zeroplan_io_open.restype = [pointer, pointer], pointer
        found.zeroplan_io_close.argtypes, found.zeroplan_io_close.restype = [pointer], None
        found.zeroplan_io_submit.argtypes, found.zeroplan_io_submit.restype = [pointer, pointer], ctypes.c_int64
        found.zeroplan_io_wait.argtypes, found.zeroplan_io_wait.restype = [pointer, ctypes.c_int64, number, pointer], number
    except AttributeError:
        return None
    return found
