"""TRL's log-probabilities and entropies by one Triton kernel: four fp32 numbers a row, and a gradient of all logits.

Source: TRL 1.16, ``kernels/logprob_entropy.py`` (``_LogProbEntropyFunction``), ``trainer/utils.py`` (``selective_log_softmax``,
``selective_log_softmax_and_entropy``, ``entropy_from_logits``), which take it where Triton is there, as on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch

from zeroplan.capturing.hooks.imports import changes


class LogProbabilities(torch.autograd.Function):
    """logits: [..., V]; returns the chosen words' log-probabilities and the rows' entropies, [...]."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, index: torch.Tensor, row_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the logits, and two numbers a row."""
        chosen, entropy, sums, expected = (logits.new_empty(logits.shape[:-1], dtype=torch.float32) for _ in range(4))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, index, sums, expected, row_mask)
        return chosen, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the logits' gradient, whole where they are a slice."""
        logits = ctx.saved_tensors[0]
        found = torch.empty_like(logits, memory_format=torch.contiguous_format)
        held = [one.contiguous() for one in grads if one is not None]
        del held
        return found, None, None


def install(module: Any) -> None:
    """Let ``trl.trainer.utils`` take the kernel, as it does on a GPU; versions without it stay as they are."""
    if not hasattr(module, "_supports_trl_loss_kernel"):
        return
    changes(module)

    def chosen(
        logits: torch.Tensor, index: torch.Tensor, temperature: float = 1.0, row_mask: torch.Tensor | None = None
    ) -> Any:
        return LogProbabilities.apply(logits, index, row_mask)

    module.is_triton_available, module._fused_logprob_entropy = (lambda: True), chosen
