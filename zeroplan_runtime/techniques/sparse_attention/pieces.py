"""A layout as lists for :mod:`.block_kernels`: blocks of keys that each block of queries meets, and the reverse, in pieces."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Pieces:
    """One side's lists; see Note [Pieces] in :mod:`.block_kernels`.

    Attributes:
        table: (block, first, count, slot) of each piece, int32 [layouts, pieces, 4]; a block of -1 is none.
        entries: the blocks that are met, int32 [layouts, entries].
        long: (block, first slot, slots) of each block of several pieces, int32 [layouts, blocks of such, 3].
        slots: partial results, of the layout with most.
    """

    table: torch.Tensor
    entries: torch.Tensor
    long: torch.Tensor
    slots: int

    @classmethod
    def of(cls, blocks: torch.Tensor, most: int) -> Pieces:
        """Returns the pieces of rows of `blocks`, bool [layouts, blocks, blocks], of at most `most` entries each."""
        made = [cls._of_one(one, most) for one in blocks]
        slots = max(each.slots for each in made)
        return cls(
            _stacked([each.table for each in made]),
            _stacked([each.entries for each in made]),
            _stacked([each.long for each in made]),
            slots,
        )

    @classmethod
    def _of_one(cls, blocks: torch.Tensor, most: int) -> Pieces:
        counts = blocks.sum(1)
        entries = blocks.nonzero()[:, 1]
        first = counts.cumsum(0) - counts
        pieces = (counts + most - 1).div(most, rounding_mode="floor").clamp(min=1)
        row = torch.arange(len(blocks)).repeat_interleave(pieces)
        number = torch.arange(len(row)) - (pieces.cumsum(0) - pieces).repeat_interleave(pieces)
        count = (counts[row] - number * most).clamp(min=0, max=most)
        several = pieces > 1
        parts = torch.where(several, pieces, 0)
        slot = torch.where(several[row], (parts.cumsum(0) - parts)[row] + number, -1)
        table = torch.stack([row, first[row] + number * most, count, slot], 1)
        order = torch.argsort(count, descending=True, stable=True)  # the longest start first
        long = several.nonzero()[:, 0]
        spans = torch.stack([long, (parts.cumsum(0) - parts)[long], pieces[long]], 1)
        return cls(table[order].int(), entries.int(), spans.int(), int(parts.sum()))

    def to(self, device: torch.device) -> Pieces:
        """Returns the lists on a device."""
        return replace(self, table=self.table.to(device), entries=self.entries.to(device), long=self.long.to(device))


def _stacked(tables: list[torch.Tensor]) -> torch.Tensor:
    """Returns tables of several lengths as one, filled up with -1."""
    longest = max(len(table) for table in tables)
    if not longest:
        return torch.full((len(tables), 1, *tables[0].shape[1:]), -1, dtype=torch.int32)
    short = [torch.full((longest - len(table), *table.shape[1:]), -1, dtype=torch.int32) for table in tables]
    return torch.stack([torch.cat(pair) for pair in zip(tables, short, strict=True)])
