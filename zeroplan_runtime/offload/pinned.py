"""Host memory of exactly the size asked for, page-locked in place, on 4096-byte boundaries that direct I/O accepts.

``torch.empty(pin_memory=True)`` rounds up to a power of two and keeps what was freed. Here a block is mapped, its pages are
brought in by several threads (as huge pages where the kernel has them), and CUDA registers the block where it lies, so
nothing is copied and nothing is rounded but the last page. It goes when the last tensor on it goes, or at :func:`release`.

Note [Fork]
    A child process would share these pages until either side writes to them, and the device would go on with the old ones.
    So children do not inherit the blocks (``MADV_DONTFORK``): a tensor on one must not be used in a forked process.
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
from functools import cache
from typing import Any

import torch

from zeroplan.core.errors import BadInput
from zeroplan.core.layout import PAGE

_HUGE = 2 << 20
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process
_FAILED = ctypes.c_void_p(-1).value
_MOST_THREADS = 16

#: Live blocks by address, while they are registered or hold pages.
_blocks: dict[int, _Block] = {}


class _Block:
    """One mapping. It is unmapped when nothing refers to it any more, emptied at :meth:`release`."""

    def __init__(self, size: int) -> None:
        self.size = -(-size // PAGE) * PAGE
        self.registered = False
        self._owner = os.getpid()
        address = _libc().mmap(None, self.size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if address in (None, _FAILED):
            raise _no_memory(size, os.strerror(ctypes.get_errno()))
        self.address = int(address)

    def advise(self, advice: int, begin: int = 0, size: int | None = None) -> bool:
        """``madvise`` over a part of the block; False where the kernel does not know the advice."""
        code: int = _libc().madvise(self.address + begin, self.size if size is None else size, advice)
        return code == 0

    def touch(self, threads: int) -> None:
        """Brings in every page, zeroed, each thread a part."""
        part = -(-self.size // max(1, threads))
        part = -(-part // _HUGE) * _HUGE  # no huge page is faulted in by two threads

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
        """Page-locks the block for CUDA."""
        runtime = _cuda_runtime()
        code = int(runtime.cudaHostRegister(self.address, self.size, _PORTABLE))
        if code:
            reason = str(runtime.cudaGetErrorString(runtime.cudaError(code)))
            raise _no_memory(self.size, f"CUDA error {code}, {reason}")
        self.registered = True

    def release(self) -> None:
        """Gives the pages back at once. The addresses stay mapped, so that a tensor left over reads zeros."""
        if self._owner != os.getpid():
            return
        self._unregister()
        self.advise(mmap.MADV_DONTNEED)

    def unmap(self) -> None:
        """Gives the addresses back too. In a forked child, which never had the block, nothing is done."""
        if self._owner != os.getpid():
            return
        self._unregister()
        _libc().munmap(self.address, self.size)

    def _unregister(self) -> None:
        if self.registered:
            self.registered = False
            _cuda_runtime().cudaHostUnregister(self.address)


def allocate(numel: int, dtype: torch.dtype, *, register: bool, threads: int | None = None) -> torch.Tensor:
    """A zeroed 1-D tensor of `numel` elements on a block of its own, page-aligned and with every page in memory.

    Args:
        numel: elements; the block is their bytes, rounded up to a page of 4096.
        dtype: the elements' type.
        register: page-lock the block for CUDA. Without a GPU the same memory, pageable.
        threads: that touch the pages first; by default one for each core that this process may use, at most 16.

    Raises:
        BadInput: when the memory cannot be had or CUDA refuses to lock it.
    """
    size = numel * dtype.itemsize
    if size == 0:
        return torch.empty(0, dtype=dtype)
    if not sys.platform.startswith("linux"):
        return torch.zeros(numel, dtype=dtype, pin_memory=register)
    block = _Block(size)
    try:
        if block.size >= _HUGE:
            block.advise(mmap.MADV_HUGEPAGE)
        block.advise(mmap.MADV_DONTFORK)  # Note [Fork]
        block.touch(threads or default_threads(block.size))
        if register:
            block.register()
    except BaseException:
        block.unmap()
        raise
    # torch holds the array for as long as a tensor uses its storage; the array does not own the memory, the block does.
    array = (ctypes.c_char * size).from_address(block.address)
    tensor = torch.frombuffer(array, dtype=dtype, count=numel)
    _blocks[block.address] = block
    weakref.finalize(array, _drop, block.address).atexit = False  # at exit the kernel takes it all
    return tensor


def release(tensor: torch.Tensor) -> None:
    """Unlocks and empties the block under `tensor`, at once, whoever else still refers to it.

    Raises:
        KeyError: when :func:`allocate` did not make it.
    """
    if tensor.numel() and sys.platform.startswith("linux"):
        _blocks[tensor.untyped_storage().data_ptr()].release()


class Release:
    """:func:`release` for later, which does not keep the tensor's block alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        block = _blocks.get(tensor.untyped_storage().data_ptr())
        self._block = None if block is None else weakref.ref(block)

    def alive(self) -> bool:
        """Whether the block is still there."""
        return self._block is not None and self._block() is not None

    def __call__(self) -> None:
        """Unlocks and empties the block, if it is still there."""
        block = None if self._block is None else self._block()
        if block is not None:
            block.release()


def registered_bytes() -> int:
    """Bytes that are page-locked for CUDA now, whole pages."""
    return sum(block.size for block in _blocks.values() if block.registered)


def block_bytes() -> int:
    """Bytes of all live blocks, whole pages, locked or not."""
    return sum(block.size for block in _blocks.values())


def default_threads(size: int) -> int:
    """Threads that touch a block of `size` bytes first: the cores of this process, at least 64 MiB for each."""
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)), math.ceil(size / (64 << 20))))


def _drop(address: int) -> None:
    _blocks.pop(address).unmap()


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


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
