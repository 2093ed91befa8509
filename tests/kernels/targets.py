"""The implementations under test: each backend, on each instruction set or device that this machine has."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from zeroplan_runtime.kernels import backends, cuda_backend, functional, native_backend, one_bit, torch_backend

#: name → (path module, device type, instruction set of the native routines)
TARGETS = {
    "torch": (torch_backend, "cpu", None),
    "native-plain": (native_backend, "cpu", "plain"),
    "native-avx2": (native_backend, "cpu", "avx2"),
    "native-avx512": (native_backend, "cpu", "avx512"),
    "cuda": (cuda_backend, "cuda", None),
    "torch-cuda": (torch_backend, "cuda", None),
}

all_targets = pytest.mark.parametrize(
    "target", [pytest.param(name, marks=pytest.mark.gpu) if name.endswith("cuda") else name for name in TARGETS]
)


@contextmanager
def using(target: str):
    """Routes the public functions to one target and yields its device; skips where this machine lacks it."""
    path, device, instructions = TARGETS[target]
    if device == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        if path is cuda_backend:
            fault = backends.cuda_fault(0)
            assert not fault, fault
    if path is native_backend:
        if native_backend.library() is None:
            pytest.skip("libzeroplan_cpu is not built")
        if not native_backend.use_instructions(instructions):
            pytest.skip(f"this processor has no {instructions}")
    try:
        with (
            mock.patch.object(functional, "backend", return_value=path),
            mock.patch.object(one_bit, "backend", functional.backend),
        ):
            yield torch.device(device)
    finally:
        if path is native_backend:
            native_backend.use_instructions(None)


def buffer(values: torch.Tensor, device: torch.device, offset: int = 0) -> torch.Tensor:
    """A copy of `values` that begins `offset` elements after a boundary of 64 bytes."""
    room = torch.empty(values.numel() + 64, dtype=values.dtype, device=device)
    first = (-room.data_ptr() % 64) // room.element_size() + offset
    part = room[first : first + values.numel()]
    part.copy_(values)
    return part


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, all NaN alike."""
    a, b = a.cpu(), b.cpu()
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return bool(((a.view(kind) == b.view(kind)) | (a.isnan() & b.isnan())).all())
