"""Fused adapters over a model of transformers with peft's LoRA, by what they allocate, keep and overwrite.

A part of a block is one function of autograd: queries, keys and values; the attention's output; gate, up and down. Each keeps
its input, that after dropout where there is one, and the adapters in the input's dtype. The MLP keeps gate and up beside, whose
gradients are written over them, as what it makes again for ``down`` is over that one's gradient. Each product makes a quantised
weight whole and lets it go; adapters are added in place.
Source: axolotl 0.18, kernels/lora.py (LoRA_MLP, LoRA_QKV, LoRA_O, matmul_lora), swiglu.py, quantize.py (_ctypes_nf4_dequant);
which modules have them: monkeypatch/lora_kernels.py (apply_lora_kernel_patches). Unsloth's kernels/fast_lora.py, of which these
come, writes the input's gradient over the input as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from zeroplan.trace.quantized import Linear4bit, scales_of
from zeroplan.trace.replaced import Replace, replaced, without_adapters

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Layer:
    """A frozen layer and its adapters, [r, in] and [out, r]."""

    base: Any
    first: torch.Tensor
    second: torch.Tensor
    dropout: nn.Module

    @classmethod
    def of(cls, module: Any) -> _Layer:
        """Return those of one of peft's layers."""
        name = module.active_adapters[0]
        return cls(module.base_layer, module.lora_A[name].weight, module.lora_B[name].weight, module.lora_dropout[name])

    def weight(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the base's weight, [out, in]; a quantised one made whole."""
        if not isinstance(self.base, Linear4bit):
            found: torch.Tensor = self.base.weight
            return found
        whole = self.base.weight.new_empty(self.base.weight.shape, dtype=dtype)
        if self.base.nested:
            scales_of(self.base.weight)
        return whole

    def product(self, x: torch.Tensor, dropped: torch.Tensor | None) -> torch.Tensor:
        """x, and what dropout left of it: [B, S, in]; returns [B, S, out]."""
        rows = x.view(-1, x.shape[-1])
        out = torch.matmul(rows, self.weight(x.dtype).t())
        first, second = self.first.to(x.dtype), self.second.to(x.dtype)
        out.addmm_((rows if dropped is None else dropped.view(rows.shape)) @ first.t(), second.t())
        if self.base.bias is not None:
            out += self.base.bias
        return out.view(*x.shape[:-1], -1)


def _casts(layers: Sequence[_Layer], dtype: torch.dtype) -> list[torch.Tensor]:
    return [one.to(dtype) for layer in layers for one in (layer.first, layer.second)]


def _gradients(first: torch.Tensor, second: torch.Tensor, rows: torch.Tensor, grad: torch.Tensor) -> Tensors:
    """The gradients of a layer's adapters, then the gradient of what lies between them, [tokens, r].

    rows: what the adapters read, [tokens, in]; grad: of the layer's output, [tokens, out].
    """
    between = grad @ second
    grads = torch.empty_like(first.t()), torch.empty_like(second.t())
    grads[0].addmm_(rows.t(), between, beta=0)
    grads[1].addmm_(first @ rows.t(), grad, beta=0)
    return grads[0].t(), grads[1].t(), between


class _Fused(torch.autograd.Function):
    """Layers that read one input, in one function: their outputs, each [B, S, out]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dropped: torch.Tensor | None, layers: Sequence[_Layer], *_: Any) -> Any:
        """Keep the input and the adapters."""
        outs = tuple(layer.product(x, dropped) for layer in layers)
        ctx.save_for_backward(x, x if dropped is None else dropped, *_casts(layers, x.dtype))
        ctx.layers, ctx.drops = layers, dropped is not None
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Make the gradients of the adapters, then that of the input."""
        x, dropped, *adapters = ctx.saved_tensors
        rows = dropped.reshape(-1, dropped.shape[-1])
        outs = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        pairs = list(zip(adapters[::2], adapters[1::2], strict=True))
        made = [_gradients(*pair, rows, grad) for pair, grad in zip(pairs, outs, strict=True)]
        dx = torch.mm(outs[0], ctx.layers[0].weight(x.dtype))
        for layer, grad in zip(ctx.layers[1:], outs[1:], strict=True):
            dx.addmm_(grad, layer.weight(x.dtype))
        if ctx.drops and len(pairs) == 1:  # of one layer, times its scale, out of place
            behind = (made[0][2] @ pairs[0][0]) * 2
        else:
            behind = torch.zeros_like(rows) if ctx.drops else dx
            for (first, _), (*_, between) in zip(pairs, made, strict=True):
                behind.addmm_(between, first)
        shaped = dx.view(x.shape), behind.view(x.shape) if ctx.drops else None
        return *shaped, None, *(one for both in made for one in both[:2])


class _FusedMlp(torch.autograd.Function):
    """A gated MLP: down(act(gate(x)) · up(x))."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dropped: torch.Tensor | None, layers: Sequence[_Layer], *_: Any) -> Any:
        """Keep the input, gate and up, and the adapters."""
        gate, up = (layer.product(x, dropped) for layer in layers[:2])
        hidden = torch.empty_like(gate)
        out = layers[2].product(hidden, None)
        ctx.save_for_backward(x, x if dropped is None else dropped, gate, up, *_casts(layers, x.dtype))
        ctx.layers, ctx.drops = layers, dropped is not None
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Write over gate and up, and make the gradients of the adapters, from the last layer to the first."""
        x, dropped, gate, up, *adapters = ctx.saved_tensors
        rows = dropped.view(-1, dropped.shape[-1])
        (gate_a, gate_b), (up_a, up_b), (down_a, down_b) = zip(adapters[::2], adapters[1::2], strict=True)
        of_gate, of_up, of_down = ctx.layers
        grad = grads[0].view(-1, grads[0].shape[-1])
        hidden = torch.matmul(grad, of_down.weight(x.dtype))
        hidden.addmm_(grad @ down_b, down_a)
        gate, up = (one.view(-1, one.shape[-1]) for one in (gate, up))
        *down, _between = _gradients(down_a, down_b, hidden, grad)
        *ups, between_up = _gradients(up_a, up_b, rows, up)
        *gates, between_gate = _gradients(gate_a, gate_b, rows, gate)
        dx = torch.matmul(up, of_up.weight(x.dtype))
        dx.addmm_(gate, of_gate.weight(x.dtype))
        behind = torch.zeros_like(rows) if ctx.drops else dx
        behind.addmm_(between_up, up_a)
        behind.addmm_(between_gate, gate_a)
        shaped = dx.view(x.shape), behind.view(x.shape) if ctx.drops else None
        return *shaped, None, *gates, *ups, *down


def _run(function: Any, layers: Sequence[_Layer], x: torch.Tensor) -> Any:
    """Run a function over layers, which have one mask of dropout for what they read."""
    drop = layers[0].dropout
    dropped = drop(x) if isinstance(drop, nn.Dropout) and drop.training else None
    return function.apply(x, dropped, layers, *(one for layer in layers for one in (layer.first, layer.second)))


class _Attention:
    """Queries, keys and values, which are made when queries are asked for."""

    def __init__(self, layers: Sequence[_Layer]) -> None:
        self._layers = layers
        self._waiting: list[torch.Tensor] = []

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """Return queries, and let the others wait."""
        found: torch.Tensor
        found, *self._waiting = _run(_Fused, self._layers, x)
        return found

    def next(self, _: torch.Tensor) -> torch.Tensor:
        """Return keys, then values."""
        return self._waiting.pop(0)


@contextlib.contextmanager
def fused_adapters(model: nn.Module, parts: Mapping[str, Sequence[str]]) -> Iterator[None]:
    """Let a model run with fused adapters while the context lasts.

    Args:
        model: on the meta device, with peft's adapters: a part of a block is fused where all of its layers have some.
        parts: ``mlp``, ``qkv`` and ``o``, or some of them, and the names of their layers.
    """
    base = without_adapters(model)
    text = getattr(base, "model", base)
    blocks = getattr(getattr(text, "language_model", text), "layers", ())
    with replaced() as replace:
        for block in blocks:
            for part, names in parts.items():
                owner = getattr(block, "mlp" if part == "mlp" else "self_attn", None)
                found: list[Any] = [getattr(owner, name, None) for name in names]
                if all(hasattr(one, "lora_A") for one in found):
                    _fuse(part, owner, found, replace)
        yield


def _first(layers: Sequence[_Layer], x: torch.Tensor) -> torch.Tensor:
    (found,) = _run(_Fused, layers, x)
    result: torch.Tensor = found
    return result


def _fuse(part: str, owner: Any, found: Sequence[Any], replace: Replace) -> None:
    layers = [_Layer.of(one) for one in found]
    if part == "mlp":
        replace(owner, "forward", partial(_run, _FusedMlp, layers))
    elif part == "o":
        replace(found[0], "forward", partial(_first, layers))
    else:
        attention = _Attention(layers)
        for one, call in zip(found, (attention.queries, attention.next, attention.next), strict=True):
            replace(one, "forward", call)
