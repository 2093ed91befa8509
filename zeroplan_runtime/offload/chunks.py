"""How a unit's share is cut into the blocks of swap files."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from zeroplan.core.buffers import Buffer, Place
from zeroplan.core.layout import Layout


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements ``[begin, end)`` of a unit's share, or of its shard of frozen parameters."""

    unit: str
    begin: int
    end: int

    @property
    def numel(self) -> int:
        """Its elements."""
        return self.end - self.begin

    def block(self, buffer: Buffer) -> str:
        """The name of the block that holds one of its tensors."""
        return f"{self.unit}/{self.begin}/{buffer.value}"


def split_into_chunks(unit: str, numel: int, step: int) -> list[Chunk]:
    """Runs of `step` elements, the last of what is left."""
    return [Chunk(unit, a, b) for a, b in itertools.pairwise([*range(0, numel, step), numel])]


def optimizer_chunks(layout: Layout) -> dict[str, list[Chunk]]:
    """The chunks of the units whose update streams through files, each of at most one lane of the ring, by unit."""
    return {
        unit.shape.name: split_into_chunks(unit.shape.name, layout.share(unit), layout.swap_numel)
        for unit in layout.units
        if unit.streamed
    }


def param_chunks(layout: Layout) -> dict[str, list[tuple[Buffer, Chunk]]]:
    """The chunks of the units whose parameters are in files, trained ones cut as the update cuts them, by unit."""
    found: dict[str, list[tuple[Buffer, Chunk]]] = {}
    for unit in layout.units:
        if unit.param_place is not Place.NVME:
            continue
        name, chunks = unit.shape.name, found.setdefault(unit.shape.name, [])
        step = layout.swap_numel if unit.streamed else layout.param_buffer
        if unit.trainable is not None:
            chunks += [(Buffer.PARAM_SHARD, chunk) for chunk in split_into_chunks(name, unit.trainable.shard, step)]
        if unit.frozen is not None:
            chunks += [
                (Buffer.PARAM_FROZEN, chunk) for chunk in split_into_chunks(name, unit.frozen.shard, layout.param_buffer)
            ]
    return found


def block_sizes(chunks: Sequence[tuple[Buffer, Chunk]], element_size: int) -> dict[str, int]:
    """A swap file's blocks (name: bytes) for these chunks."""
    return {chunk.block(buffer): chunk.numel * element_size for buffer, chunk in chunks}
