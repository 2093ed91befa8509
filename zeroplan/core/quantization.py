"""Quantised bases: what bitsandbytes keeps of a linear layer's weight, under frozen parameters that adapters stand beside.

Source: bitsandbytes 0.50 ``functional.py`` (``quantize_4bit``, ``quantize_blockwise``) and ``nn/modules.py``.
"""

from __future__ import annotations

from enum import StrEnum

from zeroplan.core.errors import BadInput, did_you_mean

#: Elements that share a scale, and scales that share one in turn (double quantisation).
BLOCK, NESTED_BLOCK = 64, 256
_FP32 = 4
_LEVELS = 16


class Quantization(StrEnum):
    """Formats in which the base's linear layers are kept: 4 bits with scales that are quantised again. Either takes the same
    bytes.
    """

    NF4 = "nf4"
    FP4 = "fp4"


def parse_quantization(text: str, where: str = "--quantize") -> Quantization:
    """Return the quantisation called `name`.

    Raises:
        BadInput: an unknown name, or a kind whose memory is not modelled.
    """
    name = text.strip().lower()
    try:
        return Quantization(name)
    except ValueError:
        remedy = did_you_mean(name, list(Quantization)) or f"use {' or '.join(Quantization)}"
        raise BadInput(f"{text[:40]!r} is not modelled", where=where, remedy=remedy) from None


def blocks_of_weight(numel: int) -> tuple[int, ...]:
    """Bytes of each block that one 4-bit weight is kept in.

    They are the packed values, a byte for each scale, an fp32 number for each 256 scales, the table of the 16 levels and the
    scales' offset.
    """
    scales = -(-numel // BLOCK)
    return (-(-numel // 2), scales, _FP32 * -(-scales // NESTED_BLOCK), _FP32 * _LEVELS, _FP32)


#: Bytes of the table of 8-bit levels, which all layers share.
SCALE_LEVELS = 256 * _FP32
