"""Cross entropy over a vocabulary without fp32 copies of the logits.

Its results are activations, as those of the operations that it replaces, so torch allocates them and not the Arena.
"""

from __future__ import annotations

from types import ModuleType

import torch

from zeroplan.core.losses import IGNORED_LABEL
from zeroplan_runtime.kernels import cuda_backend, torch_backend
from zeroplan_runtime.kernels.backends import backend


def _impl(logits: torch.Tensor) -> ModuleType:
    return cuda_backend if backend(logits.device) is cuda_backend else torch_backend  # there is no native CPU routine


def _check(logits: torch.Tensor, labels: torch.Tensor) -> None:
    if logits.dim() != 2 or not logits.is_contiguous() or labels.shape != logits.shape[:1] or labels.dtype != torch.int64:
        raise ValueError(f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)} {labels.dtype} do not fit together")


@torch.no_grad()
def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    ignore: int = IGNORED_LABEL,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the loss of each row, as ``torch.nn.functional.cross_entropy`` with ``reduction="none"`` does in fp32.

    Args:
        logits: [rows, vocabulary], contiguous, bf16, fp16 or fp32.
        labels: [rows], int64; a row whose label is `ignore` has loss 0.
        ignore: the label of rows without loss.
        out: what to write to and return.

    Returns:
        The log-sum-exp and the loss of each row, fp32 [rows] each.

    Raises:
        ValueError: for tensors that do not fit together.
    """
    _check(logits, labels)
    made = (torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device) for _ in range(2))
    lse, losses = made if out is None else out
    _impl(logits).cross_entropy(logits, labels, ignore, lse, losses)
    return lse, losses


@torch.no_grad()
def cross_entropy_grad(
    logits: torch.Tensor,
    labels: torch.Tensor,
    lse: torch.Tensor,
    scale: torch.Tensor,
    ignore: int = IGNORED_LABEL,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes the gradient of `scale` × the sum of the rows' losses with respect to `logits`.

    (softmax(logits) − onehot(label)) · `scale`, computed in fp32 and rounded once; 0 in rows whose label is `ignore`.

    Args:
        logits: [rows, vocabulary], as given to :func:`cross_entropy`.
        labels: [rows], int64.
        lse: [rows], the log-sum-exp that :func:`cross_entropy` returned.
        scale: one fp32 element on the logits' device.
        ignore: the label of rows without loss.
        out: what to write to and return; it may be `logits`.

    Returns:
        [rows, vocabulary] in the dtype of `logits`.

    Raises:
        ValueError: for tensors that do not fit together.
    """
    _check(logits, labels)
    grad = torch.empty_like(logits) if out is None else out
    _impl(logits).cross_entropy_grad(logits, labels, ignore, lse, scale, grad)
    return grad
