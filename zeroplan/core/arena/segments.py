"""Sizes of the tables by which LAMB takes the norms of whole tensors in a flat buffer. Integers only.

A flat buffer holds runs (one an optimizer group) of segments (one a tensor); segments are cut into tiles, one a thread block.
The memory is one tensor of fp32 words for each flat buffer, the same on every rank and every backend: a rank's share may be
cut where another's is not, so the tiles have room for the most that there can be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

#: Elements one thread block takes: enough to hide its start, few enough to give every multiprocessor several.
TILE = 1 << 14

#: Words of 4 bytes. Norms and partial sums: two fp64 each; a tile: begin, end and segment; a segment's first tile.
_NORMS, _PARTIAL, _TILE, _FIRST = 4, 4, 6, 2


@dataclass(frozen=True, slots=True)
class SegmentTable:
    """`segments` tensors in `runs` runs, cut into at most `tiles` tiles."""

    segments: int
    runs: int
    tiles: int

    @classmethod
    def of(cls, numel: int, segments: int, runs: int = 1) -> SegmentTable:
        """Size the table for any cut of `numel` elements into these: each run begins a tile, and so do multiples of it and
        segments within.
        """
        return cls(segments, runs, -(-numel // TILE) + segments - 1 if numel and segments else 0)

    def parts(self) -> Iterator[tuple[str, int]]:
        """Name and words of each part, in the order in which they lie; those read by 16 bytes come first."""
        yield "norms", _NORMS * self.segments
        yield "partial", _PARTIAL * self.tiles
        yield "tiles", _TILE * self.tiles
        yield "first_tile", _FIRST * (self.segments + self.runs)

    @property
    def words(self) -> int:
        """fp32 words of the whole."""
        return sum(words for _, words in self.parts())
