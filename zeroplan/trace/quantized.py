"""Linear layers over a 4-bit base, as bitsandbytes and peft run them: the weight is dequantised for each product.

The layer's input is not kept for the weight's gradient, since there is none. Its forward and its backward each make the scales
in fp32, the weight in 16 bits, and free both when the product is done.

Source: bitsandbytes 0.50 ``autograd/_functions.py`` (``MatMul4Bit``), ``backends/cuda/ops.py`` (``_dequant_linear_fallback``,
which runs from about 512 tokens on; for fewer, a fused kernel may spare the forward's copy), ``nn/modules.py``
(``Linear4bit``); peft 0.21 ``tuners/lora/bnb.py``.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn

from zeroplan.core.quantization import BLOCK


def _scales(weight: torch.Tensor) -> torch.Tensor:
    return weight.new_empty(-(-weight.numel() // BLOCK), dtype=torch.float32)


class _Product(torch.autograd.Function):
    """y = x·Wᵀ + b with a weight that is dequantised into `x`'s dtype, and again for the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        scales = _scales(weight)
        shifted = _scales(weight)  # the nested scales' offset is added out of place
        whole = weight.new_empty(weight.shape, dtype=x.dtype)
        out = torch.nn.functional.linear(x, whole, bias)
        del scales, shifted
        ctx.weight = weight
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        weight: torch.Tensor = ctx.weight
        scales = _scales(weight)
        whole = weight.new_empty(weight.shape, dtype=grad.dtype)
        del scales
        return torch.matmul(grad, whole), None, None


class Linear4bit(nn.Linear):
    """A linear layer whose frozen weight is kept in 4 bits; it computes in `compute_dtype` and answers in its input's."""

    compute_dtype = torch.bfloat16

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in]; returns [..., out]."""
        dtype = x.dtype
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        out: torch.Tensor = _Product.apply(x.to(self.compute_dtype), self.weight, bias)
        return out.to(dtype)


def quantize(model: Any) -> None:
    """Keep the weights of the linear layers in 4 bits, but for the output projection, as transformers does."""
    head = model.get_output_embeddings()
    for module in model.modules():
        if type(module) is nn.Linear and module is not head:
            module.__class__ = Linear4bit
            module.requires_grad_(False)


def adapt(model: Any, *, autocast: bool, half: bool = False) -> None:
    """Let peft's adapters run as they do beside a 4-bit layer; in 16 bits where `half`."""
    for name, parameter in model.named_parameters():
        if half and ".lora_" in name:
            parameter.data = parameter.data.to(torch.bfloat16)
    for module in model.modules():
        if isinstance(getattr(module, "base_layer", None), Linear4bit):
            module.forward = MethodType(_with_autocast if autocast else _without_autocast, module)


def _with_autocast(layer: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = layer.base_layer(x).clone()
    for name in layer.active_adapters:
        output = layer.lora_B[name](layer.lora_A[name](layer.lora_dropout[name](x))) * layer.scaling[name]
        result = result + output
    return result


def _without_autocast(layer: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = layer.base_layer(x).clone()
    for name in layer.active_adapters:
        dtype = result.dtype
        x = x.to(layer.lora_A[name].weight.dtype)
        output = (layer.lora_B[name](layer.lora_A[name](layer.lora_dropout[name](x))) * layer.scaling[name]).to(dtype)
        result = result + output
    return result
