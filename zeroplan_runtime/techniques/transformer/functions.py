"""The two parts of a transformer layer around its attention, each with a backward of its own that keeps what the flags say.

Note [What a layer keeps]: with T tokens of width H, intermediate width I and elements of e bytes, beside its parameters,

    post-LN  T·e·(H input + 3H query, key, value + H context + H normed + I before GELU)
             + T·e·I GELU's output, unless gelu_checkpoint
             + 2·T·e·H the norms' inputs and 8·T their means, or T·e·H the output, with normalize_invertible
             + 8·T the norms' reciprocal deviations, and 8 bytes of seed
    pre-LN   T·e·(H normed input + 3H + H context + H normed + I), GELU's output as above,
             + 2·T·e·H the norms' inputs and 8·T their means, or nothing, with normalize_invertible; + 8·T + 8

and what attention keeps (:mod:`.attention`). A layer's post-LN output is the next one's input, so
it takes memory once. In-place products add to gradients that these functions made themselves and nobody else holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from zeroplan_runtime.kernels import layer as kernels
from zeroplan_runtime.kernels.philox import Dropout


@dataclass(frozen=True, slots=True)
class LayerFlags:
    """What both parts are told.

    Attributes:
        heads: attention heads.
        eps: added to variances.
        pre_norm: norms before attention and feed-forward part, not behind them.
        invertible: keep no input of a norm.
        gelu_checkpoint: keep no output of GELU.
        approximate: how GELU is computed.
        ratio: dropout of what is added to the residual stream; 0 for none.
        salt: see :class:`.philox.Dropout`.
    """

    heads: int
    eps: float
    pre_norm: bool
    invertible: bool
    gelu_checkpoint: bool
    approximate: str
    ratio: float
    salt: int

    def dropout(self, seed: torch.Tensor | None, stream: int) -> Dropout | None:
        """Returns the dropout with this seed; None where nothing is dropped."""
        return None if seed is None or round(self.ratio * 2**16) == 0 else Dropout(self.ratio, seed, self.salt, stream)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


class Projections(Function):
    """Query, key and value of hidden states, in one product with one bias; before it the norm, with pre-LN.

    The hidden states are returned, too, for the residual sum: so its gradient comes here and the products' are added to it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        norm_weight: torch.Tensor | None,
        norm_shift: torch.Tensor | None,
        flags: LayerFlags,
    ) -> tuple[torch.Tensor, ...]:
        """Returns query, key and value [samples, heads, tokens, width], which share their memory, and `hidden`.

        Args:
            ctx: autograd's context.
            hidden: [samples, tokens, columns], contiguous.
            weight: [3 · columns, columns], of query, key and value one under the other.
            bias: [3 · columns].
            norm_weight: [columns], with pre-LN.
            norm_shift: [columns], with pre-LN.
            flags: see :class:`LayerFlags`.
        """
        samples, tokens, columns = hidden.shape
        rows, mean, rstd = _rows(hidden), None, None
        if norm_weight is not None and norm_shift is not None:
            rows, mean, rstd = kernels.norm(rows, (norm_weight, norm_shift, flags.eps))
        made = torch.addmm(bias, rows, weight.t()).view(samples, tokens, 3, flags.heads, columns // flags.heads)
        keep = flags.pre_norm and not flags.invertible
        ctx.save_for_backward(rows, weight, norm_weight, norm_shift, rstd, hidden if keep else None, mean if keep else None)
        ctx.shape = hidden.shape
        query, key, value = (made[:, :, i].transpose(1, 2) for i in range(3))
        return query, key, value, hidden

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Returns the gradients of the hidden states, of weight and bias, and of the norm."""
        rows, weight, norm_weight, norm_shift, rstd, hidden, mean = ctx.saved_tensors
        columns = rows.shape[1]
        residual = _rows(grads[3].contiguous())
        grad_weight, grad_bias = torch.empty_like(weight), weight.new_empty(3 * columns)
        grad_rows = residual if norm_weight is None else None
        for i, grad in enumerate(grads[:3]):
            one = grad.transpose(1, 2).reshape(-1, columns)
            part = slice(i * columns, (i + 1) * columns)
            torch.mm(one.t(), rows, out=grad_weight[part])
            torch.sum(one, 0, out=grad_bias[part])
            grad_rows = torch.mm(one, weight[part]) if grad_rows is None else grad_rows.addmm_(one, weight[part])
        assert grad_rows is not None
        if norm_weight is None:
            return grad_rows.view(ctx.shape), grad_weight, grad_bias, None, None, None
        saved, shift = (rows, norm_shift) if hidden is None else (_rows(hidden), None)
        grad_hidden, *of_norm = kernels.norm_backward(
            grad_rows, saved, mean, rstd, norm_weight, shift, extra=residual, bias=False, out=grad_rows
        )
        return grad_hidden.view(ctx.shape), grad_weight, grad_bias, *of_norm, None


class OutputAndFeedForward(Function):
    """What follows attention: its output product, a residual sum, the feed-forward part, another residual sum, and norms."""

    @staticmethod
    def forward(
        ctx: Any,
        context: torch.Tensor,
        hidden: torch.Tensor,
        out_weight: torch.Tensor,
        out_bias: torch.Tensor,
        attn_norm_weight: torch.Tensor,
        attn_norm_shift: torch.Tensor,
        inter_weight: torch.Tensor,
        inter_bias: torch.Tensor,
        output_weight: torch.Tensor,
        output_bias: torch.Tensor,
        norm_weight: torch.Tensor | None,
        norm_shift: torch.Tensor | None,
        seed: torch.Tensor | None,
        flags: LayerFlags,
    ) -> torch.Tensor:
        """Returns the layer's output [samples, tokens, columns].

        Args:
            ctx: autograd's context.
            context: [samples, tokens, columns], the attention's output.
            hidden: [samples, tokens, columns], the layer's input.
            out_weight: [columns, columns], of the attention's output product.
            out_bias: [columns].
            attn_norm_weight: [columns], of the norm between attention and feed-forward part.
            attn_norm_shift: [columns].
            inter_weight: [intermediate, columns].
            inter_bias: [intermediate].
            output_weight: [columns, intermediate].
            output_bias: [columns].
            norm_weight: [columns], of the norm of the output, with post-LN.
            norm_shift: [columns], with post-LN.
            seed: one int64 element; None drops nothing.
            flags: see :class:`LayerFlags`.
        """
        attended, keep = _rows(context), not flags.invertible
        drops = flags.dropout(seed, 0), flags.dropout(seed, 1)
        product = torch.mm(attended, out_weight.t())
        how = (attn_norm_weight, attn_norm_shift, flags.eps)
        normed, summed, mean, rstd = kernels.add_norm(
            product, out_bias, _rows(hidden), drops[0], how, keep=keep or flags.pre_norm
        )
        del product
        inner = torch.mm(normed, inter_weight.t())
        active = kernels.bias_gelu(inner, inter_bias, flags.approximate)
        product = torch.mm(active, output_weight.t())
        last_sum = last_mean = last_rstd = last_out = None
        if norm_weight is None or norm_shift is None:
            assert summed is not None
            out = kernels.add(product, output_bias, summed, drops[1])
        else:
            how = (norm_weight, norm_shift, flags.eps)
            out, last_sum, last_mean, last_rstd = kernels.add_norm(product, output_bias, normed, drops[1], how, keep=keep)
            last_out = None if keep else out
        ctx.save_for_backward(
            *(attended, normed, inner, None if flags.gelu_checkpoint else active),
            *(summed if keep else None, mean if keep else None, rstd),
            *(last_sum, last_mean if keep else None, last_rstd),
            *(out_weight, attn_norm_weight, attn_norm_shift, inter_weight, inter_bias, output_weight, norm_weight, norm_shift),
            seed,
            last_out.view(hidden.shape) if last_out is not None else None,
        )
        ctx.flags, ctx.shape = flags, hidden.shape
        return out.view(hidden.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Returns the gradients of context, hidden states and parameters."""
        attended, normed, inner, active, summed, mean, rstd, last_sum, last_mean, last_rstd, *rest = ctx.saved_tensors
        out_weight, attn_weight, attn_shift, inter_weight, inter_bias, output_weight, norm_weight, norm_shift, *rest = rest
        seed, last_out = rest
        flags: LayerFlags = ctx.flags
        drops = flags.dropout(seed, 0), flags.dropout(seed, 1)
        grad = _rows(grad.contiguous())
        of_norm: tuple[torch.Tensor | None, ...] = (None, None)
        if norm_weight is None:
            grad_sum = grad
            grad_product, grad_output_bias = kernels.add_backward(grad, drops[1])
        else:
            saved, shift = (last_sum, None) if last_out is None else (_rows(last_out), norm_shift)
            grad_sum, *norms, grad_product, grad_output_bias = kernels.norm_backward(
                grad, saved, last_mean, last_rstd, norm_weight, shift, dropout=drops[1]
            )
            of_norm = tuple(norms)
        if active is None:
            active = kernels.bias_gelu(inner, inter_bias, flags.approximate)
        grad_output_weight = torch.mm(grad_product.t(), active)
        del active
        grad_inner = torch.mm(grad_product, output_weight)
        del grad_product
        grad_inter_bias = kernels.bias_gelu_backward(grad_inner, inner, inter_bias, flags.approximate)
        grad_inter_weight = torch.mm(grad_inner.t(), normed)
        if norm_weight is None:
            grad_normed, extra = torch.mm(grad_inner, inter_weight), grad_sum
        else:
            grad_normed, extra = grad_sum.addmm_(grad_inner, inter_weight), None
        del grad_inner
        saved, shift = (normed, attn_shift) if summed is None else (summed, None)
        grad_hidden, of_attn_weight, of_attn_shift, grad_product, grad_out_bias = kernels.norm_backward(
            grad_normed, saved, mean, rstd, attn_weight, shift, extra=extra, dropout=drops[0], out=grad_normed
        )
        grad_out_weight = torch.mm(grad_product.t(), attended)
        grad_context = torch.mm(grad_product, out_weight)
        return (
            *(grad_context.view(ctx.shape), grad_hidden.view(ctx.shape), grad_out_weight, grad_out_bias),
            *(of_attn_weight, of_attn_shift, grad_inter_weight, grad_inter_bias, grad_output_weight, grad_output_bias),
            *(*of_norm, None, None),
        )
