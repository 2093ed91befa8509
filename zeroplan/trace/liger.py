"""Liger's kernels over a model of transformers, by what they allocate, keep and overwrite.

Note [Liger's head]
    Head and loss run together, a chunk of tokens at a time, and make the gradients of both in the forward: of the hidden states
    and of the head's weight, which are all that waits for the backward. A chunk has the least power of two of tokens that so
    many chunks hold all of as the head is wider than the hidden states, and one is alive at once. Its products go into the
    gradients in place. Under autocast both factors are cast for each chunk, the product comes back through a tensor of its
    own, and the gradient of an fp32 weight takes a cast chunk. In fp32 the weight's part is made beside it. The head's module
    is never called. Versions before 0.8.3 hold a second chunk, and in 16 bits two copies of the weight's gradient beside it.

RMSNorm keeps its input and a number a row; its gradient lies where the output's was, unless the family forbids it. SwiGLU and
GEGLU keep both inputs and write the gradients over them. The rotary embedding turns queries and keys where they lie.

Source: liger-kernel 0.8.5, ops/fused_linear_cross_entropy.py, rms_norm.py, swiglu.py, geglu.py, rope.py, cross_entropy.py;
transformers/monkey_patch.py, transformers/model/llama.py and loss_utils.py
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from zeroplan.core.losses import IGNORED_LABEL
from zeroplan.trace.kernels import block
from zeroplan.trace.replaced import Replace, fused_head, replaced, without_adapters

_WIDE, _INDEX = 4, 8
_ROTARY, _LOSS = "apply_rotary_pos_emb", "cross_entropy"


class RmsNorm(torch.autograd.Function):
    """Normalised rows of [..., H]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, in_place: bool) -> torch.Tensor:
        """Keep the input and one fp32 number a row."""
        x = x.contiguous()
        y = torch.empty_like(x)
        ctx.save_for_backward(x, weight, x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32))
        ctx.in_place = in_place
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Sum up the weight's gradient from one fp32 row of each multiprocessor."""
        x, weight, _ = ctx.saved_tensors
        grad = grads[0].contiguous()
        rows = block(("per_multiprocessor", _WIDE * x.shape[-1])) if ctx.needs_input_grad[1] else None
        dx = grad if ctx.in_place else torch.zeros_like(grad)
        if rows is None:
            return dx, None, None
        total = torch.empty_like(weight, dtype=torch.float32)
        del rows
        return dx, total.to(weight.dtype), None


class GatedUnit(torch.autograd.Function):
    """The activation of one matrix times another."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Keep both."""
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Write both gradients over what was kept."""
        grads[0].contiguous()
        gate, up = ctx.saved_tensors
        return gate, up


class Rotary(torch.autograd.Function):
    """Queries and keys, [B, heads, S, D], turned in place."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        """Keep the angles."""
        q, k = (x.transpose(1, 2).contiguous() for x in (q, k))
        ctx.save_for_backward(cos.contiguous(), sin.contiguous())
        return q.transpose(1, 2), k.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Turn the gradients back in place."""
        dq, dk = (x.transpose(1, 2).contiguous() for x in grads)
        return dq.transpose(1, 2), dk.transpose(1, 2), None, None


class CrossEntropy(torch.autograd.Function):
    """The loss of logits, [tokens, words], whose gradient is written over them."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Keep the gradient in place of the logits."""
        mask = block(labels.numel())
        losses = logits.new_zeros(logits.shape[0])
        ctx.save_for_backward(logits.contiguous().detach())
        del mask
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Return it, scaled in place."""
        return ctx.saved_tensors[0], None


class FusedLinearCrossEntropy(torch.autograd.Function):
    """The mean loss of hidden states, [tokens, H], and labels, with the head's weight, [words, H]. See Note [Liger's head]."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Make loss and gradients chunk by chunk; chunks are alike from the second on, which meets autocast's kept cast."""
        (tokens, width), words = hidden.shape, weight.shape[0]
        autocasts = torch.is_autocast_enabled("meta") and weight.dtype == torch.float32
        compute = 2 if autocasts else weight.element_size()
        parts = -(-words // width)
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight) if weight.requires_grad else None
        losses = torch.zeros(tokens, dtype=torch.float32, device=hidden.device)
        mask, counted = block(tokens), block(_INDEX)
        del counted

        def chunk(row: int) -> torch.Tensor:
            return block(("token_chunk", tokens, parts, row))

        for _ in range(min(parts, 2)):
            casts = [chunk(width * compute), block(words * width * compute)] if autocasts else []
            logits = chunk(words * compute)
            casts.clear()
            if autocasts:
                torch.mm(weight.new_empty(1, words), weight)  # whose cast autocast keeps until its region ends
                product = chunk(width * compute)
                del product
            if grad_weight is not None and autocasts:
                casts.append(chunk(width * compute))
            elif grad_weight is not None and compute == _WIDE:
                casts.append(block(words * width * compute))
            del logits, casts
        del mask
        ctx.save_for_backward(grad_hidden, grad_weight)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Return the gradients, scaled in place."""
        return *ctx.saved_tensors, None


@contextlib.contextmanager
def liger_kernels(model: nn.Module, kernels: Any) -> Iterator[None]:
    """Let a model run with Liger's kernels while the context lasts.

    Args:
        model: on the meta device, with or without adapters.
        kernels: a :class:`zeroplan.techniques.liger.Kernels`.
    """
    with replaced() as replace:
        put_kernels(model, kernels, replace)
        yield


def put_kernels(model: nn.Module, kernels: Any, replace: Replace) -> None:
    """Put Liger's kernels in place of a model's own functions, as :func:`liger_kernels` does."""
    base = without_adapters(model)
    for name, module in base.named_modules():
        last, kind = name.rpartition(".")[2], type(module).__name__
        if kind.endswith("RMSNorm") and last in kernels.norms:
            replace(module, "forward", partial(_normalized, module, kernels.norms[last]))
        elif kernels.gated and kind.endswith("MLP") and hasattr(module, "down_proj"):
            replace(module, "forward", partial(_gated, module))
    if kernels.rotary:
        replace(sys.modules[type(base).__module__], _ROTARY, _turned)
    if kernels.loss:
        replace(nn.functional, _LOSS, partial(_loss, nn.functional.cross_entropy))
    if kernels.head:
        fused_head(model, replace, _fused_loss)


def _normalized(module: Any, in_place: bool, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = RmsNorm.apply(x, module.weight, in_place)
    return found


def _gated(module: Any, x: torch.Tensor) -> Any:
    if hasattr(module, "gate_up_proj"):
        gate, up = module.gate_up_proj(x).chunk(2, dim=-1)
        return module.down_proj(GatedUnit.apply(gate, up))
    return module.down_proj(GatedUnit.apply(module.gate_proj(x), module.up_proj(x)))


def _turned(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: Any, **__: Any) -> Any:
    return Rotary.apply(q, k, cos, sin)


def _loss(plain: Any, logits: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if logits.dim() != 2 or target.dim() != 1:
        return plain(logits, target, *args, **kwargs)
    return CrossEntropy.apply(logits, target)


def _fused_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    shifted = nn.functional.pad(labels, (0, 1), value=IGNORED_LABEL)[..., 1:].contiguous()
    rows = hidden.view(-1, hidden.shape[-1])
    found: torch.Tensor = FusedLinearCrossEntropy.apply(rows, weight, shifted.view(-1))
    return found
