"""Optimizer states in 8 or 4 bits: the maps from codes to values, and their arithmetic in torch operations.

Note [Blockwise states]
    Both moments of Adam are cut into blocks (256 elements in 8 bits, 128 in 4). A block is kept as codes and one fp32 scale,
    the element of largest magnitude; an element stands for level(code) · scale (Dettmers et al. 2022, sections 2.1 and 2.2; Li
    et al. 2023, section 4). One pass over a block decodes both moments, steps Adam in fp32, and encodes the new moments with
    the block's new scales.

    The first moment has the signed dynamic map: of 8 bits 127 magnitudes a sign, in seven decades from 10⁻⁷, with 1, 2, 4 … 64
    evenly spaced levels each; of 4 bits 7 in three decades; and 0 and 1. The scale keeps its element's sign, so the largest
    element is always exactly level 1, and what is decoded encodes to the same codes and scale. The second moment has no level
    0, which an element could be divided by (Li et al. 2023, section 4.1): of 8 bits the unsigned dynamic map with 10⁻⁷ in
    place of 0, of 4 bits 1/16, 2/16 … 1.

    An element becomes the nearest level; one in the middle of two becomes the larger. A block whose largest magnitude is below
    2⁻¹²⁰ has scale 0, as one of memory full of zeros has. Codes of the first moment are a magnitude's rank for numbers of zero
    and more, and the rank plus half of the codes for negative ones; of the second moment the rank. Two codes of 4 bits share
    a byte, the earlier element's in the low half.

Note [Bins]
    The kernels find a magnitude's rank without a search: the upper 16 bits of its fp32 choose a bin, which holds the rank of
    the bin's first number and the lower 16 bits at which the next rank begins. No bin has more than one such border.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from dataclasses import dataclass
from functools import cache, cached_property

import torch

from zeroplan.core.optimizer_row import MAP_BINS
from zeroplan_runtime.kernels.update import UpdateArgs

#: Blocks whose largest magnitude is below this have scale 0, so that its reciprocal is finite.
LEAST_SCALE = 2.0**-120
#: The lower bits of an fp32, and the upper 16 of the first bin's.
_LOW_BITS, _FIRST_BIN = 16, (127 - 24) << 7


def _decades(count: int, least: int) -> list[float]:
    """Magnitudes below 1: of `count` decades the i-th has ``least · 2^i`` even cells, whose middles are the levels."""
    found = []
    for i in range(count):
        cells = least * 2**i
        found += [10.0 ** (i - count + 1) * (0.1 + 0.9 * (k + 0.5) / cells) for k in range(cells)]
    return found


def _fp32(x: float) -> float:
    return float(struct.unpack("f", struct.pack("f", x))[0])


def _bits(x: float) -> int:
    return int(struct.unpack("I", struct.pack("f", x))[0])


@dataclass(frozen=True)
class Map:
    """One moment's map.

    Attributes:
        bits: of a code.
        magnitudes: the levels of zero and more, rising, as fp32 holds them; the last is 1.
        signed: negative numbers have codes: all magnitudes but 0 and 1.
    """

    bits: int
    magnitudes: tuple[float, ...]
    signed: bool

    @cached_property
    def levels(self) -> tuple[float, ...]:
        """The level of each code."""
        negative = [-x for x in self.magnitudes[1:-1]] if self.signed else []
        return (*self.magnitudes, *negative)

    @cached_property
    def borders(self) -> tuple[float, ...]:
        """The least magnitude of each rank from 1 on, as fp32."""
        pairs = zip(self.magnitudes, self.magnitudes[1:], strict=False)
        return tuple(_fp32((a + b) / 2) for a, b in pairs)

    def bins(self) -> list[int]:
        """The words of Note [Bins]: rank in the lowest 8 bits, above them the lower bits at which the next one begins.

        Raises:
            ValueError: when two ranks begin within one bin, or one below the second bin, which smaller numbers never reach.
        """
        words: list[int] = []
        borders, width = [_bits(x) for x in self.borders], 1 << _LOW_BITS
        for first in range(_FIRST_BIN << _LOW_BITS, (_FIRST_BIN + MAP_BINS) << _LOW_BITS, width):
            rank, following = bisect_left(borders, first), bisect_left(borders, first + width)
            if following - rank > 1 or (following and not words):
                raise ValueError(f"a bin cannot hold the ranks {rank} to {following}")
            words.append(((borders[rank] - first if following > rank else width) << 8) | rank)
        return words


@dataclass(frozen=True)
class BlockFormat:
    """How the states of one optimizer are kept: see Note [Blockwise states].

    Attributes:
        bits: of a code.
        block: elements that share a scale.
        first, second: the maps of the two moments.
    """

    bits: int
    block: int
    first: Map
    second: Map

    @property
    def codes_a_byte(self) -> int:
        """Elements whose codes share a byte."""
        return 8 // self.bits

    def blocks(self, numel: int) -> int:
        """Blocks of `numel` elements, the last of which may have fewer."""
        return -(-numel // self.block)


def block_format(bits: int, block: int) -> BlockFormat:
    """The format of 8 or 4 bits with this many elements a block."""
    return _formats()[bits, block]


@cache
def _formats() -> dict[tuple[int, int], BlockFormat]:
    signed = {bits: tuple(map(_fp32, [0.0, *_decades(bits - 1, 1), 1.0])) for bits in (8, 4)}
    second = {8: tuple(map(_fp32, [1e-7, *_decades(7, 2), 1.0])), 4: tuple((i + 1) / 16 for i in range(16))}
    return {
        (bits, block): BlockFormat(bits, block, Map(bits, signed[bits], True), Map(bits, second[bits], False))
        for bits, block in ((8, 256), (4, 128))
    }


@cache
def map_words(bits: int, block: int, device: torch.device) -> torch.Tensor:
    """The tables for the kernels, int32 on `device`: levels of both moments (as the bits of fp32), then bins of both."""
    kept = block_format(bits, block)
    words = [_bits(x) for one in (kept.first, kept.second) for x in one.levels]
    words += [word for one in (kept.first, kept.second) for word in one.bins()]
    return torch.tensor(words, dtype=torch.int64).to(torch.int32).to(device)


@dataclass(frozen=True, slots=True)
class BlockwiseArgs:
    """One update with blockwise states.

    Attributes:
        update: everything but the states.
        format: how they are kept.
        first, second: uint8, the moments' codes, updated in place.
        scales: fp32 [2 × blocks], of each block the first moment's and the second's.
        maps: :func:`map_words` on the buffers' device.
    """

    update: UpdateArgs
    format: BlockFormat
    first: torch.Tensor
    second: torch.Tensor
    scales: torch.Tensor
    maps: torch.Tensor

    def check(self) -> None:
        """Checks the buffers.

        Raises:
            ValueError: unless they fit together, are whole blocks, and begin where the kernels can load vectors.
        """
        n, kept, device = self.update.param.numel(), self.format, self.update.param.device
        if n % kept.block:
            raise ValueError(f"expected a multiple of {kept.block} elements, the block, but got {n}")
        codes, scales = n // kept.codes_a_byte, 2 * kept.blocks(n)
        for name, tensor, numel, dtype in (
            ("first state", self.first, codes, torch.uint8),
            ("second state", self.second, codes, torch.uint8),
            ("scales", self.scales, scales, torch.float32),
        ):
            if tensor.dtype != dtype or tensor.numel() != numel or tensor.device != device or not tensor.is_contiguous():
                what = f"{tensor.numel()} of {tensor.dtype} on {tensor.device}"
                raise ValueError(f"expected {numel} contiguous {name} of {dtype} on {device} but got {what}")
        vectors = [(t, 4 * t.element_size()) for t in self.update.buffers()]
        vectors += [(self.first, 4 // kept.codes_a_byte), (self.second, 4 // kept.codes_a_byte), (self.scales, 8)]
        if any(tensor.data_ptr() % size for tensor, size in vectors):
            raise ValueError("expected buffers that begin on a multiple of four elements")


def encode(values: torch.Tensor, kept: BlockFormat, which: Map) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes, uint8, and scales, fp32, of `values`: fp32 [blocks × block]."""
    rows = values.view(-1, kept.block)
    bits = rows.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    negative = bits < 0
    # The largest magnitude, as its bits; of a negative and a positive one that are equally large the negative.
    largest = (magnitude.to(torch.int64) * 2 + negative).amax(1)
    scale = (largest >> 1).to(torch.int32).view(torch.float32)
    scale = torch.where(largest % 2 == 1, -scale, scale)
    scale = torch.where(scale.abs() < LEAST_SCALE, torch.zeros_like(scale), scale)
    inverse = torch.where(scale == 0, torch.zeros_like(scale), torch.ones_like(scale) / scale)
    scaled = rows * inverse.unsqueeze(1)
    borders = torch.tensor(which.borders, dtype=torch.float32, device=values.device)
    rank = torch.bucketize(scaled.abs(), borders, right=True, out_int32=True)
    if which.signed:
        half = 2 ** (kept.bits - 1)
        rank = torch.where((scaled < 0) & (rank > 0), half + rank.clamp(max=half - 1), rank)
    codes = rank.to(torch.uint8).view(-1)
    if kept.bits == 4:
        codes = codes[0::2] | (codes[1::2] << 4)
    return codes, scale


def decode(codes: torch.Tensor, scales: torch.Tensor, kept: BlockFormat, which: Map) -> torch.Tensor:
    """Returns the values, fp32 [blocks × block], of `codes`, uint8, with one scale a block."""
    if kept.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), 1)
    levels = torch.tensor(which.levels, dtype=torch.float32, device=codes.device)
    return (levels[codes.reshape(-1).int()].view(-1, kept.block) * scales.unsqueeze(1)).view(-1)
