"""Which elements of a flat buffer belong to which tensor, for optimizers that look at whole tensors (LAMB)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

#: Elements one thread block takes: enough to hide its start, few enough to give every multiprocessor several.
TILE = 1 << 14


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


def make_segments(bounds: Sequence[int], device: torch.device | str) -> Segments:
    """The segments [bounds[i], bounds[i+1]) of a flat buffer on `device`. A segment may be empty on this rank.

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
    count = len(bounds) - 1
    return Segments(
        bounds=tuple(bounds),
        tiles=torch.tensor(tiles, dtype=torch.int64).reshape(-1, 3).to(device),
        first_tile=torch.tensor(first_tile, dtype=torch.int64).to(device),
        partial=torch.zeros(len(tiles), 2, dtype=torch.float64, device=device),
        norms=torch.zeros(count, 2, dtype=torch.float64, device=device),
    )
