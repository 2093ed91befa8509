"""Division of a unit's share into chunks, each of which is a block of a swap file."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from zeroplan.core.arena.layout import PAGE, ArenaLayout
from zeroplan.core.buffers import Buffer, Place
from zeroplan_runtime.offload.swap_file import SwapFile, Transfer


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements ``[begin, end)`` of a unit's share, or of its shard of frozen parameters."""

    unit: str
    begin: int
    end: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.end - self.begin

    def block(self, buffer: Buffer) -> str:
        """Returns the name of the file's block that holds the chunk of `buffer`, such as the masters or a moment."""
        return f"{self.unit}/{self.begin}/{buffer.value}"


def split_into_chunks(unit: str, numel: int, step: int) -> list[Chunk]:
    """Chunks of `step` elements that cover `numel` elements; the last may be shorter."""
    return [Chunk(unit, a, b) for a, b in itertools.pairwise([*range(0, numel, step), numel])]


def optimizer_chunks(layout: ArenaLayout) -> dict[str, list[Chunk]]:
    """Returns the chunks of each unit whose update reads or writes files, by unit. A chunk fits into a buffer of the
    pipeline.
    """
    return {
        unit.shape.name: split_into_chunks(unit.shape.name, layout.share(unit), layout.swap_numel)
        for unit in layout.units
        if unit.streamed
    }


def param_chunks(layout: ArenaLayout) -> dict[str, list[tuple[Buffer, Chunk]]]:
    """The chunks of each unit whose parameters are in files, by unit. Trainable ones are divided as the update does it."""
    found: dict[str, list[tuple[Buffer, Chunk]]] = {}
    for unit in layout.units:
        if unit.param_place is not Place.NVME:
            continue
        name, chunks = unit.shape.name, found.setdefault(unit.shape.name, [])
        step = layout.swap_numel if unit.streamed else layout.param_buffer
        if unit.trainable is not None:
            chunks += [(Buffer.PARAM_SHARD, chunk) for chunk in split_into_chunks(name, unit.trainable.shard, step)]
        if unit.frozen is not None:
            frozen = split_into_chunks(name, unit.frozen.shard, layout.param_buffer)
            chunks += [(Buffer.PARAM_FROZEN, chunk) for chunk in frozen]
    return found


def block_sizes(chunks: Sequence[tuple[Buffer, Chunk]], element_size: int) -> dict[str, int]:
    """Returns the bytes of the swap file's block of each chunk, by the block's name."""
    return {chunk.block(buffer): chunk.numel * element_size for buffer, chunk in chunks}


def write_share(
    file: SwapFile, buffer: Buffer, chunks: Iterable[Chunk], values: torch.Tensor | None, memory: Sequence[torch.Tensor]
) -> None:
    """Writes a share of `buffer`, chunk by chunk, through `memory`: pinned rooms for a chunk each, which take turns. Nothing
    else may use them meanwhile. `values` None writes zeros.
    """
    under_way: deque[Transfer] = deque()
    for chunk, room in zip(chunks, itertools.cycle(memory), strict=False):
        if len(under_way) == len(memory):
            file.finish(under_way.popleft())
        if values is None:
            room[: chunk.numel].zero_()
        else:
            room[: chunk.numel].copy_(values[chunk.begin : chunk.end])
        pages = -(-chunk.numel * room.element_size() // PAGE) * PAGE
        under_way.append(file.write(chunk.block(buffer), room.view(torch.uint8)[:pages]))
    for transfer in under_way:
        file.finish(transfer)


def read_share(
    file: SwapFile, buffer: Buffer, chunks: Iterable[Chunk], begin: int, end: int, memory: torch.Tensor
) -> torch.Tensor:
    """Returns elements ``[begin, end)`` of a share of `buffer`, read through `memory` as long as a chunk, in new memory."""
    found = torch.empty(end - begin, dtype=memory.dtype, device="cpu")
    for chunk in chunks:
        first, last = max(begin, chunk.begin), min(end, chunk.end)
        if first < last:
            block = chunk.block(buffer)
            file.finish(file.read(block, memory.view(torch.uint8)[: file.stored_bytes(block)]))
            found[first - begin : last - begin].copy_(memory[first - chunk.begin : last - chunk.begin])
    return found
