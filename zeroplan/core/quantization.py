"""Quantised bases: what bitsandbytes keeps of a linear layer's weight, under frozen parameters that adapters stand beside.

Source: bitsandbytes 0.50 ``functional.py`` (``quantize_4bit``, ``quantize_blockwise``), ``nn/modules.py`` (``Int8Params``) and
``backends/cuda/ops.py`` (``int8_vectorwise_quant``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from zeroplan.core.errors import BadInput, member_named

#: Elements that share a scale, and scales that share one in turn (double quantisation).
BLOCK, NESTED_BLOCK = 64, 256
_FP32, _WORD, _HALF = 4, 4, 2
_PACKED = re.compile(r"(gptq|awq|torchao)-([2348])-([1-9]\d{0,4}|row)")
_LEVELS = 16
#: Bytes of the table of 8-bit levels, which the nested scales of all layers share.
_SCALE_LEVELS = 256 * _FP32


class Products(StrEnum):
    """How a layer multiplies by its quantised weight. A tape depends on this alone."""

    NESTED = "4bit"
    SINGLE = "4bit-single"
    INT8 = "8bit"
    PACKED = "packed"
    CHANNELS = "channels"


class Quantization(StrEnum):
    """Formats in which the base's linear layers are kept.

    NF4 and FP4 keep 4 bits with scales that are quantised again, their SINGLE forms with scales in fp32; INT8 is LLM.int8(),
    a scale for each row.
    """

    NF4 = "nf4"
    FP4 = "fp4"
    NF4_SINGLE = "nf4-single"
    FP4_SINGLE = "fp4-single"
    INT8 = "int8"

    @property
    def products(self) -> Products:
        """How its layers multiply."""
        if self is Quantization.INT8:
            return Products.INT8
        return Products.SINGLE if self.value.endswith("-single") else Products.NESTED

    @property
    def bits(self) -> int:
        """Bits of one value, scales left out."""
        return 8 if self is Quantization.INT8 else 4

    def blocks_of_weight(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Bytes of each block that one weight of shape ``(out, in)`` is kept in: its values, then what scales them.

        In 4 bits a scale serves 64 values, wherever rows begin; it takes a byte and a share of an fp32 number for each 256
        scales where scales are quantised again, else an fp32 number. The table of the 16 levels comes with each weight.
        """
        numel = math.prod(shape)
        if self is Quantization.INT8:
            return (numel, _FP32 * shape[0])
        packed, scales = -(-numel // 2), -(-numel // BLOCK)
        if self.products is Products.SINGLE:
            return (packed, _FP32 * scales, _FP32 * _LEVELS)
        return (packed, scales, _FP32 * -(-scales // NESTED_BLOCK), _FP32 * _LEVELS, _FP32)

    def stored_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of one weight's values in a 16-bit dtype (``bnb_4bit_quant_storage``), in which engines shard and gather them.

        Bytes are stored as they are; values in 4 bits may lose an odd byte at their end, as they do in bitsandbytes.
        """
        numel = math.prod(shape)
        return (-(-numel // 2) if self is Quantization.INT8 else (numel + 1) // 4, 1)

    def states_of_weight(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Bytes of each block that scales one weight of shape ``(out, in)``; the layer holds them, whole."""
        return self.blocks_of_weight(shape)[1:]

    @property
    def shared_bytes(self) -> int:
        """Bytes of what all layers share."""
        return _SCALE_LEVELS if self.products is Products.NESTED else 0


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """How a checkpoint of GPTQ, AWQ or torchao keeps a linear layer's weight: integers, with zeros and scales for each group.

    GPTQ's and AWQ's integers of 32 bits are buffers of their layer, which no engine shards. torchao's bytes are one tensor with
    their scales and zeros.

    Attributes:
        method: ``gptq``, ``awq`` or ``torchao``.
        bits: of one value.
        group: inputs that share a zero and a scale; -1 for all of a row.

    Source: gptqmodel, ``nn_modules/qlinear/__init__.py`` (the buffers that a layer registers); torchao 0.18,
    ``quantization/quantize_/workflows/int8/int8_tensor.py`` (``Int8Tensor.from_hp``).
    """

    method: str
    bits: int
    group: int

    shared_bytes = 0

    @property
    def products(self) -> Products:
        """How its layers multiply."""
        return Products.CHANNELS if self.method == "torchao" else Products.PACKED

    def __str__(self) -> str:
        return f"{self.method}-{self.bits}-{'row' if self.group < 0 else self.group}"

    def blocks_of_weight(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Bytes of each block that one weight of shape ``(out, in)`` is kept in: ``qweight``, ``qzeros``, ``scales`` and, with
        GPTQ, ``g_idx``. Whole integers hold the values along the inputs with GPTQ, and along the outputs with AWQ. torchao
        keeps a byte a value, and for each output a scale in fp32 and a zero of a byte.
        """
        out, inputs = shape
        if self.method == "torchao":
            return (out * inputs, _FP32 * out, out)
        groups = 1 if self.group < 0 else -(-inputs // self.group)
        zeros = groups * self._words(out)
        if self.method == "awq":
            return (_WORD * inputs * self._words(out), _WORD * zeros, _HALF * groups * out)
        return (_WORD * self._words(inputs) * out, _WORD * zeros, _HALF * groups * out, _WORD * inputs)

    def _words(self, values: int) -> int:
        return -(-values * self.bits // (8 * _WORD))

    def stored_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of ``qweight`` in 16-bit numbers."""
        return (self.blocks_of_weight(shape)[0] // _HALF, 1)

    def states_of_weight(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Bytes of each block that comes with one weight's integers."""
        return self.blocks_of_weight(shape)[1:]


#: How a frozen base is kept.
Base = Quantization | PackedWeights


def parse_quantization(text: str, where: str = "--quantize") -> Base:
    """Return the quantisation of this name, such as ``nf4``, ``gptq-4-128`` for 4 bits in groups of 128, or ``torchao-8-row``.

    Raises:
        BadInput: an unknown name, or a kind whose memory is not modelled.
    """
    packed = _PACKED.fullmatch(text.strip().lower())
    if packed is not None:
        method, bits, group = packed.groups()
        if method == "awq" and bits != "4":
            raise BadInput(f"AWQ keeps 4 bits, not {bits}", where=where, remedy="use awq-4-128")
        if method == "torchao" and (bits, group) != ("8", "row"):
            what = f"torchao's {bits} bits {'a row' if group == 'row' else f'in groups of {group}'} are not modelled"
            raise BadInput(what, where=where, remedy="use torchao-8-row: transformers trains over torchao's 8 bits alone")
        return PackedWeights(method, int(bits), -1 if group == "row" else int(group))
    if text.strip().lower().startswith(("gptq", "awq", "torchao")):
        raise BadInput(
            f"{text[:40]!r} is no packed format",
            where=where,
            remedy="use gptq-4-128 (bits, weights a group or row), awq-4-128 or torchao-8-row",
        )
    return member_named(Quantization, text, where=where, fault="{} is not modelled")
