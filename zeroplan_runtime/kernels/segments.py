"""The bounds of the tensors in a flat buffer, for LAMB, which needs the norm of each tensor (a segmented reduction)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from zeroplan.core.arena.segments import TILE, SegmentTable


@dataclass(frozen=True, slots=True)
class TensorSegments:
    """The tensors of a flat buffer (segments), cut into tiles for the kernels. Make it by :func:`make_segments`.

    Attributes:
        bounds: [count + 1], the first element of each segment, then the end of the last.
        tiles: int64 [tiles, 3], begin, end and segment of each tile; no tile crosses a bound.
        first_tile: int64 [count + 1], the index of each segment's first tile, then the number of tiles.
        partial: fp64 [tiles, 2], scratch: the squared norms of the parameter and of its update direction, by tile.
        norms: fp64 [count, 2], the same by segment.
    """

    bounds: tuple[int, ...]
    tiles: torch.Tensor
    first_tile: torch.Tensor
    partial: torch.Tensor
    norms: torch.Tensor

    @property
    def count(self) -> int:
        """The number of segments, empty ones included."""
        return len(self.bounds) - 1


class SegmentWorkspace:
    """Memory for the :class:`TensorSegments` of one unit's slices.

    Args:
        words: fp32, zeroed, of ``table.words`` elements.
        table: the sizes of the parts.
    """

    def __init__(self, words: torch.Tensor, table: SegmentTable) -> None:
        norms, partial, tiles, first = torch.split(words, [size for _, size in table.parts()])
        self._norms, self._partial = norms.view(torch.float64).view(-1, 2), partial.view(torch.float64).view(-1, 2)
        self._tiles, self._first = tiles.view(torch.int64).view(-1, 3), first.view(torch.int64)

    def take(self, bounds: Sequence[int], tiles: Sequence[tuple[int, int, int]], first_tile: Sequence[int]) -> TensorSegments:
        """Returns the segments of the next slice, whose tables it writes to the memory."""
        count, used = len(bounds) - 1, len(tiles)
        made = TensorSegments(
            tuple(bounds), self._tiles[:used], self._first[: count + 1], self._partial[:used], self._norms[:count]
        )
        self._tiles, self._first = self._tiles[used:], self._first[count + 1 :]
        self._partial, self._norms = self._partial[used:], self._norms[count:]
        made.tiles.copy_(torch.tensor(tiles, dtype=torch.int64, device="cpu").view(-1, 3))
        made.first_tile.copy_(torch.tensor(first_tile, dtype=torch.int64, device="cpu"))
        return made


def make_segments(
    bounds: Sequence[int], device: torch.device | str, workspace: SegmentWorkspace | None = None
) -> TensorSegments:
    """The segments ``[bounds[i], bounds[i + 1])`` of a flat buffer; a segment may be empty on this rank.

    Args:
        bounds: [count + 1], not decreasing, from 0.
        device: where the flat buffer is.
        workspace: has the memory; by default it is allocated here.

    Raises:
        ValueError: when `bounds` decrease or do not begin at 0.
    """
    if not bounds or bounds[0] != 0 or any(b < a for a, b in pairwise(bounds)):
        raise ValueError(f"expected bounds that rise from 0 but got {list(bounds)[:8]}")
    tiles: list[tuple[int, int, int]] = []
    first_tile = [0]
    for i, (begin, end) in enumerate(pairwise(bounds)):
        # Tiles begin at multiples of TILE, so only the first and last vectors of a segment are not aligned.
        cuts = [begin, *range((begin // TILE + 1) * TILE, end, TILE), end]
        tiles += [(a, b, i) for a, b in pairwise(cuts) if a < b]
        first_tile.append(len(tiles))
    if workspace is None:
        table = SegmentTable.of(bounds[-1], len(bounds) - 1)
        workspace = SegmentWorkspace(torch.zeros(table.words, dtype=torch.float32, device=device), table)
    return workspace.take(bounds, tiles, first_tile)
