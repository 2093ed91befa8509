"""Pinned host memory of exactly the requested size, on 4096-byte boundaries as direct I/O requires.

``torch.empty(pin_memory=True)`` rounds up to a power of two and caches freed memory. Here a block is mapped, several threads
fault its pages in (as huge pages where the kernel has them), and CUDA registers the block in place, so only the last page is
rounded. The block is freed when its last tensor is, or by :class:`Release`.

Note [Fork]
    A forked child would share these pages until one side writes to them, and the device would keep using the old pages. So
    children do not inherit the blocks (``MADV_DONTFORK``): a tensor on one must not be used in a forked process.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from zeroplan.core.arena.layout import PAGE
from zeroplan.core.errors import BadInput

_HUGE = 2 << 20
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process
_FAILED = ctypes.c_void_p(-1).value
_MOST_THREADS = 16

#: The live blocks by address.
_blocks: dict[int, _Mapping] = {}


class _Mapping:
    """One mapping of whole pages. It is unmapped when no tensor uses it any more."""

    def __init__(self, size: int) -> None:
        self.size = -(-size // PAGE) * PAGE
        self.registered = False
        self._owner = os.getpid()
        address = _libc().mmap(None, self.size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if address in (None, _FAILED):
            raise _no_memory(size, os.strerror(ctypes.get_errno()))
        self.address = int(address)

    def advise(self, advice: int, begin: int = 0, size: int | None = None) -> bool:
        """Calls ``madvise`` for a part of the block; False if the kernel refuses."""
        code: int = _libc().madvise(self.address + begin, self.size if size is None else size, advice)
        return code == 0

    def touch(self, threads: int) -> None:
        """Faults in every page, zeroed; each thread does a part."""
        part = -(-self.size // max(1, threads))
        part = -(-part // _HUGE) * _HUGE  # so that two threads do not fault in the same huge page

        def populate(begin: int) -> None:
            size = min(part, self.size - begin)
            if not self.advise(_POPULATE_WRITE, begin, size):
                if ctypes.get_errno() == errno.ENOMEM:
                    raise _no_memory(self.size, os.strerror(errno.ENOMEM))
                ctypes.memset(self.address + begin, 0, size)

        begins = range(0, self.size, part)
        if len(begins) == 1:
            populate(0)
        else:
            with ThreadPoolExecutor(len(begins)) as pool:
                list(pool.map(populate, begins))

    def register(self) -> None:
        """Pins the block for CUDA."""
        runtime = _cuda_runtime()
        code = int(runtime.cudaHostRegister(self.address, self.size, _PORTABLE))
        if code:
            reason = str(runtime.cudaGetErrorString(runtime.cudaError(code)))
            raise _no_memory(self.size, f"CUDA error {code}, {reason}")
        self.registered, self._device = True, torch.cuda.current_device()

    def release(self) -> None:
        """Unpins and frees the pages at once. The addresses stay mapped, so remaining tensors read zeros."""
        if self._owner != os.getpid():
            return
        self._unregister()
        self.advise(mmap.MADV_DONTNEED)

    def unmap(self) -> None:
        """Unpins and unmaps the block. Does nothing in a forked child, which does not have it."""
        if self._owner != os.getpid():
            return
        self._unregister()
        _libc().munmap(self.address, self.size)

    def _unregister(self) -> None:
        if self.registered:
            self.registered = False
            with suppress(RuntimeError):  # of a device that has failed
                torch.cuda.synchronize(self._device)  # copies may be under way
            _cuda_runtime().cudaHostUnregister(self.address)


def allocate(numel: int, dtype: torch.dtype, *, register: bool, threads: int | None = None) -> torch.Tensor:
    """Allocates a zeroed 1-D tensor of `numel` elements on its own page-aligned block, with all pages in memory.

    Args:
        numel: elements; the block has their bytes, rounded up to a page of 4096 bytes.
        dtype: the dtype.
        register: pin the block for CUDA; otherwise it is pageable.
        threads: threads that fault the pages in; by default one for each core of this process, at most 16 and at most one
            for each 64 MiB.

    Raises:
        BadInput: when the memory cannot be allocated or pinned.
    """
    size = numel * dtype.itemsize
    if size == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    if not sys.platform.startswith("linux"):
        return torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=register)
    block = _Mapping(size)
    try:
        if block.size >= _HUGE:
            block.advise(mmap.MADV_HUGEPAGE)
        block.advise(mmap.MADV_DONTFORK)  # Note [Fork]
        block.touch(threads or _default_threads(block.size))
        if register:
            block.register()
    except BaseException:
        block.unmap()
        raise
    # torch keeps the array as long as a tensor uses its storage. The array does not own the memory; the block does.
    array = (ctypes.c_char * size).from_address(block.address)
    tensor = torch.frombuffer(array, dtype=dtype, count=numel)
    _blocks[block.address] = block
    weakref.finalize(array, _drop, block.address).atexit = False  # at exit the kernel frees it
    return tensor


class Release:
    """Unpins and frees the block of `tensor` when it is called, even if tensors still use it; they read zeros then.

    It does not keep the block alive.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        block = _blocks.get(tensor.untyped_storage().data_ptr())
        self._block = None if block is None else weakref.ref(block)

    def alive(self) -> bool:
        """Returns whether the block still exists."""
        return self._block is not None and self._block() is not None

    def __call__(self) -> None:
        """Unpins and frees the block, if it still exists."""
        block = None if self._block is None else self._block()
        if block is not None:
            block.release()


def _default_threads(size: int) -> int:
    """Returns the number of threads that fault in a block of `size` bytes: one a core of this process, each at least 64 MiB."""
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)), math.ceil(size / (64 << 20))))


def _drop(address: int) -> None:
    _blocks.pop(address).unmap()


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()


def _no_memory(size: int, reason: str) -> BadInput:
    return BadInput(
        f"{size:,} bytes of host memory could not be allocated and pinned: {reason}",
        where="pinned memory",
        remedy="offload less (ratio, smaller buffers), give the container more memory, or raise `ulimit -l`",
    )


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    number, pointer, size = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
    libc.mmap.argtypes, libc.mmap.restype = [pointer, size, number, number, number, ctypes.c_longlong], pointer
    libc.madvise.argtypes = [pointer, size, number]
    libc.munmap.argtypes = [pointer, size]
    return libc
