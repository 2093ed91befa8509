"""CRC-32C by the native library, called as the I/O engine's C++ does, and by its definition."""

from __future__ import annotations

import ctypes

import torch

from zeroplan.core.plumbing.native import library


def native(data: torch.Tensor, *, threads: int = 1, plain: bool = False) -> int:
    """Of a contiguous host tensor's bytes; `plain` does without the processor's CRC instruction."""
    found = library()
    assert found is not None
    function = found.zeroplan_crc32c
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int]
    function.restype = ctypes.c_uint32
    value: int = function(data.data_ptr(), data.numel() * data.element_size(), threads, int(plain))
    return value


def bitwise(data: bytes) -> int:
    """The definition, bit by bit."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF
