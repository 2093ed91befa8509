"""Cross entropy over a vocabulary without fp32 copies of the logits.

What it returns is autograd's, activations like those of the operations that it stands for, so it is not the Arena's.
"""

from __future__ import annotations

from types import ModuleType

import torch

from zeroplan_runtime.kernels import cuda_backend, torch_backend
from zeroplan_runtime.kernels.backends import backend


def _path(logits: torch.Tensor) -> ModuleType:
    return cuda_backend if backend(logits.device) is cuda_backend else torch_backend  # host memory is not what it saves


def _check(logits: torch.Tensor, labels: torch.Tensor) -> None:
    if logits.dim() != 2 or not logits.is_contiguous() or labels.shape != logits.shape[:1] or labels.dtype != torch.int64:
        raise ValueError(f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)} {labels.dtype} do not fit together")


@torch.no_grad()
def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, ignore: int = -100) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's log-sum-exp and loss, as ``torch.nn.functional.cross_entropy`` with ``reduction="none"`` in fp32.

    Args:
        logits: [rows, vocabulary], contiguous, bf16, fp16 or fp32.
        labels: [rows], int64; a row whose label is `ignore` has loss 0.

    Returns:
        Two fp32 tensors of [rows].

    Raises:
        ValueError: for tensors that do not fit together.
    """
    _check(logits, labels)
    lse, losses = (torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device) for _ in range(2))
    _path(logits).cross_entropy(logits, labels, ignore, lse, losses)
    return lse, losses


@torch.no_grad()
def cross_entropy_grad(
    logits: torch.Tensor, labels: torch.Tensor, lse: torch.Tensor, scale: torch.Tensor, ignore: int = -100
) -> torch.Tensor:
    """The gradient of `scale` × the sum of the rows' losses with respect to `logits`, in their dtype.

    ``(softmax(logits) − onehot(label)) × scale`` in fp32, rounded once; zero in rows whose label is `ignore`.

    Args:
        lse: what :func:`cross_entropy` gave.
        scale: one fp32 element on the logits' device, read there.

    Raises:
        ValueError: for tensors that do not fit together.
    """
    _check(logits, labels)
    grad = torch.empty_like(logits)
    _path(logits).cross_entropy_grad(logits, labels, ignore, lse, scale, grad)
    return grad
