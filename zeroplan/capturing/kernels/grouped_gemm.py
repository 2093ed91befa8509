"""The package grouped_gemm: a product of each expert's rows with its own matrix; unmeasured.

The forward keeps both factors, and allocates nothing beside its output and its gradients.

Source: grouped_gemm 0.3, ``grouped_gemm/ops.py`` (``GroupedGemm``), ``backend.py`` (``_allocate_output``).
"""

from __future__ import annotations

from typing import Any

import torch


class GroupedProduct(torch.autograd.Function):
    """rows: [T, K]; matrices: [E, K, N], or [E, N, K] where they are transposed; returns [T, N]."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, matrices: torch.Tensor, transposed: bool) -> torch.Tensor:
        """Keep both."""
        ctx.save_for_backward(rows, matrices)
        return rows.new_empty((rows.shape[0], matrices.shape[1 if transposed else 2]))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return both gradients, those that are asked for."""
        rows, matrices = ctx.saved_tensors
        found = [torch.empty_like(one) if asked else None
                 for one, asked in zip((rows, matrices), ctx.needs_input_grad[:2], strict=True)]  # fmt: skip
        return *found, None


def gmm(a: torch.Tensor, b: torch.Tensor, batch_sizes: torch.Tensor, trans_b: bool = False) -> torch.Tensor:
    """The products of `batch_sizes` rows of `a` with each matrix of `b`."""
    found: torch.Tensor = GroupedProduct.apply(a, b, trans_b)
    return found


RULES = {"gmm": gmm}
