"""Which elements of a flat buffer belong to which tensor, for optimizers that look at whole tensors (LAMB)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from zeroplan.core.segments import TILE, SegmentTable


@dataclass(frozen=True, slots=True)
class Segments:
    """The tensors of a flat buffer, cut into tiles that cross no boundary. Made once, by :func:`make_segments`.

    `bounds` [count + 1]: where each begins, and the end. `tiles` int64 [tiles, 3]: begin, end, segment. `first_tile` int64
    [count + 1]. `partial` fp64 [tiles, 2] and `norms` fp64 [count, 2] are scratch of the update: squared norms of the
    parameter and of its direction.
    """

    bounds: tuple[int, ...]
    tiles: torch.Tensor
    first_tile: torch.Tensor
    partial: torch.Tensor
    norms: torch.Tensor

    @property
    def count(self) -> int:
        """Number of tensors, empty ones included."""
        return len(self.bounds) - 1


class SegmentWorkspace:
    """Memory for the :class:`Segments` of a flat buffer's runs: `words` fp32, zeroed, as long as `table` says."""

    def __init__(self, words: torch.Tensor, table: SegmentTable) -> None:
        norms, partial, tiles, first = torch.split(words, [size for _, size in table.parts()])
        self._norms, self._partial = norms.view(torch.float64).view(-1, 2), partial.view(torch.float64).view(-1, 2)
        self._tiles, self._first = tiles.view(torch.int64).view(-1, 3), first.view(torch.int64)

    def take(self, bounds: Sequence[int], tiles: Sequence[tuple[int, int, int]], first_tile: Sequence[int]) -> Segments:
        """The next run's segments, its tables written."""
        count, used = len(bounds) - 1, len(tiles)
        made = Segments(tuple(bounds), self._tiles[:used], self._first[: count + 1], self._partial[:used], self._norms[:count])
        self._tiles, self._first = self._tiles[used:], self._first[count + 1 :]
        self._partial, self._norms = self._partial[used:], self._norms[count:]
        made.tiles.copy_(torch.tensor(tiles, dtype=torch.int64).view(-1, 3))
        made.first_tile.copy_(torch.tensor(first_tile, dtype=torch.int64))
        return made


def make_segments(bounds: Sequence[int], device: torch.device | str, room: SegmentWorkspace | None = None) -> Segments:
    """The segments [bounds[i], bounds[i+1]) of a flat buffer on `device`. A segment may be empty on this rank.

    `room` has the memory; without one it is allocated here.

    Raises:
        ValueError: when `bounds` do not rise from 0.
    """
    if not bounds or bounds[0] != 0 or any(b < a for a, b in pairwise(bounds)):
        raise ValueError(f"expected bounds that rise from 0 but got {list(bounds)[:8]}")
    tiles: list[tuple[int, int, int]] = []
    first_tile = [0]
    for i, (begin, end) in enumerate(pairwise(bounds)):
        # Cuts lie on multiples of the tile, which keeps all but a segment's first and last vectors aligned.
        cuts = [begin, *range((begin // TILE + 1) * TILE, end, TILE), end]
        tiles += [(a, b, i) for a, b in pairwise(cuts) if a < b]
        first_tile.append(len(tiles))
    if room is None:
        table = SegmentTable.of(bounds[-1], len(bounds) - 1)
        room = SegmentWorkspace(torch.zeros(table.words, dtype=torch.float32, device=device), table)
    return room.take(bounds, tiles, first_tile)
