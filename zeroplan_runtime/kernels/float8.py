"""What 8-bit products need beside torch's operations: gathered messages as values, and factors that lie the other way round."""

from __future__ import annotations

from types import ModuleType

import torch

from zeroplan.core.arena.layout import FLOAT8_HEAD
from zeroplan_runtime.kernels import cuda_backend, torch_backend
from zeroplan_runtime.kernels.backends import backend


@torch.no_grad()
def widen_messages(messages: torch.Tensor, out: torch.Tensor) -> None:
    """Writes the values of the ranks' messages, one rank's behind another's.

    Args:
        messages: uint8 [ranks, bytes], contiguous: a rank's scale, fp32, then from :data:`FLOAT8_HEAD` on its elements in e4m3.
        out: bf16 [ranks × elements of a rank].

    Raises:
        ValueError: for sizes that do not fit together.
    """
    ranks, size = messages.shape
    shard = out.numel() // ranks
    if out.numel() % (ranks * FLOAT8_HEAD) or size % FLOAT8_HEAD or size < FLOAT8_HEAD + shard or not messages.is_contiguous():
        raise ValueError(f"messages {tuple(messages.shape)} do not hold {out.numel()} elements of {ranks} ranks")
    _backend(messages.device).widen_messages(messages, out)


@torch.no_grad()
def turned(bits: torch.Tensor) -> torch.Tensor:
    """Returns the transpose of `bits` [rows, columns], 8-bit floats, contiguous [columns, rows].

    Raises:
        ValueError: for a matrix that is not contiguous, or whose sizes are no multiples of 16.
    """
    if not bits.is_contiguous() or bits.element_size() != 1 or any(size % 16 for size in bits.shape):
        raise ValueError(f"a matrix {tuple(bits.shape)} of {bits.dtype} cannot be turned")
    out = bits.new_empty((bits.shape[1], bits.shape[0]))
    _backend(bits.device).turn_float8(bits, out)
    return out


def _backend(device: torch.device) -> ModuleType:
    return cuda_backend if backend(device) is cuda_backend else torch_backend  # there is no native CPU routine
