"""What ranks send of a unit that is gathered in 8 bits, as values."""

from __future__ import annotations

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
    # There is no native CPU routine.
    chosen = cuda_backend if backend(messages.device) is cuda_backend else torch_backend
    chosen.widen_messages(messages, out)
