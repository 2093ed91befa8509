"""Asynchronous reads and writes of host memory, past the page cache where the file system allows it.

Three backends with the same results: ``io_uring`` and ``threads`` (``csrc/cpu/io.hpp``), and ``python`` where the library
cannot be had. ``auto`` takes the first of them that works here; containers often forbid io_uring (EPERM, ENOSYS).
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol

import torch

from zeroplan.core.errors import BadInput, did_you_mean
from zeroplan.core.layout import PAGE
from zeroplan.core.native import library as shared_library
from zeroplan.core.zero_config import Aio
from zeroplan.ds_config.rules_runtime import require_io
from zeroplan_runtime.offload.io_python import PythonEngine

Backend = Literal["auto", "io_uring", "threads", "python"]

_BACKENDS = {"threads": 0, "io_uring": 1}
_WRITE, _CHECKSUM = 1, 2
_WAIT_MS = 200  # a wait this long lets a Ctrl-C through


class DiskFault(OSError):
    """A read or write that failed, or gave other bytes than were written: the file, the place in it, and the remedy."""

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
    """What a backend does. `wait` gives (errno, offset, checksum), or None when the request is not done in time."""

    def submit(self, memory: int, offset: int, length: int, after: int, file: int, flags: int) -> int: ...
    def wait(self, handle: int, milliseconds: int) -> tuple[int, int, int] | None: ...
    def close(self) -> None: ...


class DiskFile:
    """An open file, with a handle past the page cache (`direct`) where the file system gives one."""

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
        """The handle for one transfer: direct when memory, offset and length are whole pages."""
        if self.direct is None or (memory | offset | length) % PAGE:
            return self.buffered
        return self.direct

    def close(self) -> None:
        """Closes both handles."""
        for handle in (self.buffered, self.direct):
            if handle is not None and handle >= 0:
                os.close(handle)
        self.buffered, self.direct = -1, None


@dataclass(slots=True, eq=False)
class IoRequest:
    """One transfer under way. It keeps the tensor alive until :meth:`IoEngine.wait`."""

    handle: int
    file: DiskFile
    offset: int
    memory: torch.Tensor
    writes: bool
    checksum: int | None = None
    fault: DiskFault | None = None
    turn: threading.Lock = field(default_factory=threading.Lock)


class IoEngine:
    """Reads and writes in the background. Use as a context manager, or :meth:`close` it.

    Args:
        aio: DeepSpeed's knobs. ``block_size`` bytes a transfer, ``queue_depth`` of them in flight for each of
            ``intra_op_parallelism`` workers; ``single_submit`` and ``overlap_events`` shape how io_uring is fed.
        backend: which to use; "auto" probes.

    Raises:
        BadInput: when a knob is out of range, GPUDirect Storage is asked for, or the named backend does not work here.
    """

    def __init__(self, aio: Aio | None = None, backend: Backend = "auto") -> None:
        self.aio = aio or Aio()
        require_io(self.aio)
        self._engine, self.backend, self.why = _open(self.aio, backend)
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._open: dict[int, IoRequest] = {}

    @property
    def algorithm(self) -> str:
        """The checksum's name: "crc32c", or "crc32" (zlib) without the library."""
        return "crc32" if self.backend == "python" else "crc32c"

    def read(
        self, file: DiskFile, offset: int, into: torch.Tensor, *, after: IoRequest | None = None, checksum: bool = False
    ) -> IoRequest:
        """Begins to fill the contiguous host tensor `into` from byte `offset` of `file`, once `after` is done."""
        return self._submit(file, offset, into, after, _CHECKSUM if checksum else 0)

    def write(
        self, file: DiskFile, offset: int, source: torch.Tensor, *, after: IoRequest | None = None, checksum: bool = False
    ) -> IoRequest:
        """Begins to write the contiguous host tensor `source` to byte `offset` of `file`, once `after` is done."""
        return self._submit(file, offset, source, after, _WRITE | (_CHECKSUM if checksum else 0))

    def done(self, request: IoRequest) -> bool:
        """Whether :meth:`wait` would return at once."""
        return not self._pending(request) or self._finish(request, 0)

    def wait(self, request: IoRequest) -> int:
        """Returns when the transfer is done.

        Returns:
            The checksum of its bytes, 0 when none was asked for.

        Raises:
            DiskFault: when it failed; names the file, the offset and the reason.
        """
        while self._pending(request) and not self._finish(request, _WAIT_MS):
            pass
        if request.fault is not None:
            raise request.fault
        return request.checksum or 0

    def drain(self) -> None:
        """Waits for everything under way, whether it fails or not."""
        for request in list(self._open.values()):
            while self._pending(request) and not self._finish(request, _WAIT_MS):
                pass

    def close(self) -> None:
        """Finishes what is under way and ends the workers."""
        if self._owner == os.getpid() and self._engine is not None:
            self.drain()
            self._engine.close()
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
        with request.turn:  # the backend gives a result once
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


def read_aio(section: Mapping[str, Any]) -> Aio:
    """The ``aio`` section of a ds_config. ``thread_count``, the older name of ``intra_op_parallelism``, is understood.

    Raises:
        BadInput: for an unknown key, a value of another type or out of range, or ``use_gds``.
    """
    types = {name: type(getattr(Aio(), name)) for name in Aio.__dataclass_fields__}
    given = {}
    for key, value in section.items():
        name = "intra_op_parallelism" if key == "thread_count" else key
        if name not in types:
            raise BadInput("unknown key", where=f"aio.{key}", remedy=did_you_mean(key, types) or "remove it")
        if value == "auto":
            continue
        if type(value) is not types[name]:
            kind = "true or false" if types[name] is bool else "an integer"
            raise BadInput(f"{value!r} is not {kind}", where=f"aio.{key}", remedy=f"give {kind}")
        given[name] = value
    aio = Aio(**given)
    require_io(aio)
    return aio


def probe_io_uring() -> str:
    """Why io_uring cannot be used here, or an empty string when it can."""
    if _library() is None:
        return "the native library is not built"
    try:
        _Native(Aio(queue_depth=1), "io_uring").close()
    except OSError as fault:
        return f"{errno.errorcode.get(fault.errno or 0, fault.errno)}: {os.strerror(fault.errno or 0)}"
    return ""


def checksum(data: torch.Tensor, *, threads: int = 1, plain: bool = False) -> int:
    """CRC-32C of a contiguous host tensor's bytes, by the library; `plain` without the processor's instruction.

    Raises:
        RuntimeError: when the library cannot be had.
    """
    native = _library()
    if native is None:
        raise RuntimeError("CRC-32C needs the native library, which is not built")
    value: int = native.zeroplan_crc32c(data.data_ptr(), data.numel() * data.element_size(), threads, int(plain))
    return value


class _Native:
    """``io_uring`` and ``threads``."""

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
    """The engine, its backend's name, and why no better one is in use."""
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
        raise BadInput(f"{why}", where="file I/O", remedy="leave the choice of a backend to the probe (auto)")
    return PythonEngine(aio.block_size, aio.queue_depth * aio.intra_op_parallelism), "python", why


def _fault(request: IoRequest, error: int, offset: int) -> DiskFault:
    doing = "writing" if request.writes else "reading"
    size = request.memory.numel() * request.memory.element_size()
    reason = {
        errno.ENODATA: "the file ends there: it was truncated",
        errno.ECANCELED: "not done, as the transfer that it waited for failed",
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
    """The library with these functions declared, or None where it cannot be had or is older than they are."""
    found = shared_library()
    if found is None:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int
    try:
        found.zeroplan_io_open.argtypes, found.zeroplan_io_open.restype = [pointer, pointer], pointer
        found.zeroplan_io_close.argtypes, found.zeroplan_io_close.restype = [pointer], None
        found.zeroplan_io_submit.argtypes, found.zeroplan_io_submit.restype = [pointer, pointer], ctypes.c_int64
        found.zeroplan_io_wait.argtypes, found.zeroplan_io_wait.restype = [pointer, ctypes.c_int64, number, pointer], number
        found.zeroplan_crc32c.argtypes = [pointer, ctypes.c_int64, number, number]
        found.zeroplan_crc32c.restype = ctypes.c_uint32
    except AttributeError:
        return None
    return found
