"""Linear layers over a quantised base, as bitsandbytes and peft run them: here those in 4 bits, in :mod:`.int8` the others.

In 4 bits the weight is dequantised for each product. The layer's input is not kept for the weight's gradient, since there is
none. Its forward and its backward each make the scales in fp32, where they are quantised themselves, and the weight in 16 bits,
and free both when the product is done.

Source: bitsandbytes 0.50 ``autograd/_functions.py`` (``MatMul4Bit``), ``backends/cuda/ops.py`` (``_dequant_linear_fallback``,
which runs from about 512 tokens on; for fewer, a fused kernel may spare the forward's copy), ``nn/modules.py``
(``Linear4bit``); peft 0.21 ``tuners/lora/bnb.py``.

The forward rounds its input to int8 row by row and looks for outliers on the way; the product comes in int32, then in fp16,
then in the input's dtype. The input itself is kept for the backward, though nothing there reads it. The backward makes the
whole weight in the input's dtype, which after ``prepare_model_for_kbit_training`` is fp32 wherever a norm made it.

Columns with outliers, whose number the data decide, are not traced: each takes two copies (input and weight, 16 or 32 bits).

Source: bitsandbytes 0.50 ``autograd/_functions.py`` (``MatMul8bitLt``), ``backends/cuda/ops.py`` (``int8_vectorwise_quant``,
``int8_mm_dequant``), ``backends/default/ops.py`` (``int8_mixed_scaled_mm``), ``nn/modules.py`` (``Linear8bitLt``).

transformers 5 keeps all experts of a block in two parameters, which bitsandbytes leaves as they are. Before, each expert's
three matrices were layers, which it replaced by its own.

Source: transformers 4.40, ``models/mixtral/modeling_mixtral.py`` (``MixtralSparseMoeBlock``, ``MixtralBlockSparseTop2MLP``).
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn

from zeroplan.core.quantization import BLOCK, Products

#: What transformers' ``llm_int8_threshold`` is by default; its value changes no size.
_THRESHOLD = 6.0


def _round_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """rows: [tokens, in] in fp16; returns int8 [tokens, in] and the rows' scales, fp32 [tokens]."""
    scales = rows.new_empty(rows.shape[0], dtype=torch.float32)
    codes = rows.new_empty(rows.shape, dtype=torch.int8)
    outliers = rows.abs() >= _THRESHOLD
    del outliers
    return codes, scales


class _Int8Product(torch.autograd.Function):
    """y = x·Wᵀ + b in int8, and the gradient of x through the weight in x's dtype."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        rounded = _round_rows(rows.to(torch.float16))
        codes = rounded[0]
        sums = codes.new_empty((codes.shape[0], weight.shape[0]), dtype=torch.int32)
        narrow = torch.empty_like(sums, dtype=torch.float16)
        if bias is not None:
            narrow.add_(bias)
        out = narrow.to(x.dtype)
        del narrow, sums
        ctx.weight, ctx.rows, ctx.shape = weight, rows, x.shape
        return out.reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        weight: torch.Tensor = ctx.weight
        grad = grad.reshape(-1, grad.shape[-1]).contiguous()
        whole = weight.new_empty(weight.shape, dtype=ctx.rows.dtype)
        whole.mul_(weight.new_empty((weight.shape[0], 1), dtype=torch.float32))
        return torch.matmul(grad.to(ctx.rows.dtype), whole).view(ctx.shape), None, None


class Linear8bitLt(nn.Linear):
    """A linear layer whose frozen weight is kept in int8; it answers in its input's dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in]; returns [..., out]."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        out: torch.Tensor = _Int8Product.apply(x, self.weight, bias)
        return out


def scales_of(weight: torch.Tensor) -> torch.Tensor:
    """Return the fp32 scales of a weight's blocks."""
    return weight.new_empty(-(-weight.numel() // BLOCK), dtype=torch.float32)


class _Product(torch.autograd.Function):
    """y = x·Wᵀ + b with a weight that is dequantised into `x`'s dtype, and again for the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        # the nested scales' offset is added out of place
        scales = [scales_of(weight), scales_of(weight)] if layer.nested else []
        whole = _dequantized(layer, weight, x.dtype)
        out = torch.nn.functional.linear(x, whole, bias)
        del scales
        ctx.layer, ctx.weight, ctx.input = layer, weight, x if layer.keeps_input else None
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        weight: torch.Tensor = ctx.weight
        scales = scales_of(weight) if ctx.layer.nested else None
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
    for parameter in model.parameters():
        if half and parameter.requires_grad:
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


class Experts4bit(nn.Module):
    """Experts with ``gate_up_proj`` (experts, 2 inner, hidden) and ``down_proj`` (experts, hidden, inner) in 4 bits.

    Each gets an even share of the tokens: which ones a router sends decides no size but that.
    """

    compute_dtype = Linear4bit.compute_dtype
    nested = Linear4bit.nested
    from_half = Linear4bit.from_half
    keeps_input = Linear4bit.keeps_input
    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    act_fn: Any

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """hidden_states: [tokens, hidden], the others [tokens, k]; returns [tokens, hidden]."""
        out = torch.zeros_like(hidden_states)
        experts, _, inner = self.down_proj.shape
        share = max(1, top_k_index.numel() // experts)
        for expert in range(experts):
            tokens = top_k_index.new_empty(share)
            state = hidden_states[tokens]
            gate_up = self.gate_up_proj[expert]
            passed = self.act_fn(multiplied(self, state, gate_up[:inner])) * multiplied(self, state, gate_up[inner:])
            answer = multiplied(self, passed, self.down_proj[expert])
            answer = answer * top_k_weights.reshape(-1)[tokens, None]
            out.index_add_(0, tokens, answer.to(out.dtype))
        return out


class Experts4bitSingle(Experts4bit):
    """The same with scales that are not quantised in turn."""

    nested = Linear4bitSingle.nested


def quantize_experts(model: Any, products: Products) -> None:
    """Let modules that hold all experts of a block in two parameters run them as layers in 4 bits."""
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        if own.keys() == {"gate_up_proj", "down_proj"} and all(weight.dim() == 3 for weight in own.values()):
            module.__class__ = Experts4bit if products is Products.NESTED else Experts4bitSingle
            module.requires_grad_(False)
