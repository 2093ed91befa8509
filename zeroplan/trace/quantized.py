"""Linear layers over a quantised base, as bitsandbytes and peft run them: here those in 4 bits, in :mod:`.int8` the others.

In 4 bits the weight is dequantised for each product. The layer's input is not kept for the weight's gradient, since there is
none. Its forward and its backward each make the scales in fp32, where they are quantised themselves, and the weight in 16 bits,
and free both when the product is done.

Source: bitsandbytes 0.50 ``autograd/_functions.py`` (``MatMul4Bit``), ``backends/cuda/ops.py`` (``_dequant_linear_fallback``,
which runs from about 512 tokens on; for fewer, a fused kernel may spare the forward's copy), ``nn/modules.py``
(``Linear4bit``); peft 0.21 ``tuners/lora/bnb.py``.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn

from zeroplan.core.quantization import BLOCK, Products
from zeroplan.trace.int8 import Linear8bitLt


def _scales(weight: torch.Tensor) -> torch.Tensor:
    return weight.new_empty(-(-weight.numel() // BLOCK), dtype=torch.float32)


class _Product(torch.autograd.Function):
    """y = x·Wᵀ + b with a weight that is dequantised into `x`'s dtype, and again for the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        # the nested scales' offset is added out of place
        scales = [_scales(weight), _scales(weight)] if layer.nested else []
        whole = _dequantized(layer, weight, x.dtype)
        out = torch.nn.functional.linear(x, whole, bias)
        del scales
        ctx.layer, ctx.weight, ctx.input = layer, weight, x if layer.keeps_input else None
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        weight: torch.Tensor = ctx.weight
        scales = _scales(weight) if ctx.layer.nested else None
        whole = _dequantized(ctx.layer, weight, grad.dtype)
        del scales
        return torch.matmul(grad, whole), None, None, None


def _dequantized(layer: Any, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The whole weight in `dtype`; made in fp16 first, where it was quantised from that."""
    return weight.new_empty(weight.shape, dtype=torch.float16 if layer.from_half else dtype).to(dtype)


class Linear4bit(nn.Linear):
    """A linear layer whose frozen weight is kept in 4 bits; it computes in `compute_dtype` and answers in its input's.

    Attributes:
        nested: whether scales are quantised again.
        from_half: whether the weight was quantised from fp16 and is dequantised into that, whatever it is used in.
        keeps_input: whether a product keeps its input, as bitsandbytes did before 0.43.2 (``ctx.tensors``).
    """

    compute_dtype = torch.bfloat16
    nested = True
    from_half = False
    keeps_input = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in]; returns [..., out]."""
        return multiplied(self, x, self.weight, self.bias)


def multiplied(layer: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return the product by a weight in 4 bits, in the input's dtype. x: [..., in], weight: [out, in]; returns [..., out]."""
    bias = None if bias is None else bias.to(layer.compute_dtype)
    out: torch.Tensor = _Product.apply(x.to(layer.compute_dtype), layer, weight, bias)
    return out.to(x.dtype)


class Linear4bitSingle(Linear4bit):
    """The same with scales that are not quantised in turn."""

    nested = False


class PackedLinear(nn.Linear):
    """A linear layer over a base of GPTQ or AWQ, as gptqmodel's kernel for training runs it.

    It makes the whole weight in fp16 and in its input's dtype, and multiplies by it under autograd, which keeps it for the
    backward. What a compiler leaves of the integers on the way is not traced.
    Source: gptqmodel, ``nn_modules/qlinear/torch.py`` (``TorchQuantLinear``).
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in]; returns [..., out]."""
        rows = x.reshape(-1, x.shape[-1])
        whole = self.weight.new_empty((self.in_features, self.out_features), dtype=torch.float16).to(x.dtype)
        out = torch.matmul(rows, whole).reshape(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out.add_(self.bias.to(x.dtype))


class ChannelInt8Linear(nn.Linear):
    """A linear layer over torchao's int8 weights with a scale for each output (``Int8WeightOnlyConfig``).

    It multiplies by the values in its input's dtype under autograd, which keeps that copy of them for the backward, and then by
    the scales.
    Source: torchao 0.18, ``quantization/quantize_/workflows/int8/int8_tensor.py`` (``torch.nn.functional.linear``).
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in]; returns [..., out]."""
        values = self.weight.new_empty((self.in_features, self.out_features), dtype=x.dtype)
        product = torch.mm(x.reshape(-1, x.shape[-1]), values)
        del values
        out = product * self.weight.new_empty(self.out_features, dtype=product.dtype)
        out = out.reshape(*x.shape[:-1], self.out_features)
        if self.bias is not None:
            out += self.bias
        return out.to(x.dtype)


_LAYERS: dict[Products, type[nn.Linear]] = {
    Products.NESTED: Linear4bit,
    Products.SINGLE: Linear4bitSingle,
    Products.INT8: Linear8bitLt,
    Products.PACKED: PackedLinear,
    Products.CHANNELS: ChannelInt8Linear,
}


def quantize(model: Any, products: Products) -> None:
    """Quantise the weights of the linear layers, but for the output projection, as transformers does."""
    head = model.get_output_embeddings()
    for module in model.modules():
        if type(module) is nn.Linear and module is not head:
            module.__class__ = _LAYERS[products]
            module.requires_grad_(False)


def adapt(model: Any, *, autocast: bool, half: bool = False) -> None:
    """Let peft's adapters run as they do beside a quantised layer; in 16 bits where `half`."""
    for name, parameter in model.named_parameters():
        if half and ".lora_" in name:
            parameter.data = parameter.data.to(torch.bfloat16)
    for module in model.modules():
        if isinstance(getattr(module, "base_layer", None), (Linear4bit, Linear8bitLt)):
            module.forward = MethodType(_with_autocast if autocast else _without_autocast, module)


def _base(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """The base's own answer; peft copies that of a 4-bit layer alone."""
    result: torch.Tensor = layer.base_layer(x)
    return result.clone() if isinstance(layer.base_layer, Linear4bit) else result


def _with_autocast(layer: Any, x: torch.Tensor) -> torch.Tensor:
    result = _base(layer, x)
    for name in layer.active_adapters:
        output = layer.lora_B[name](layer.lora_A[name](layer.lora_dropout[name](x))) * layer.scaling[name]
        result = result + output
    return result


def _without_autocast(layer: Any, x: torch.Tensor) -> torch.Tensor:
    result = _base(layer, x)
    for name in layer.active_adapters:
        dtype = result.dtype
        x = x.to(layer.lora_A[name].weight.dtype)
        output = (layer.lora_B[name](layer.lora_A[name](layer.lora_dropout[name](x))) * layer.scaling[name]).to(dtype)
        result = result + output
    return result
