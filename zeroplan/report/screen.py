"""The first screen of an answer: what decides comes first, and what does not fit on it waits for ``--why``."""

from __future__ import annotations

from collections.abc import Sequence

#: Lines of the answer about one plan, and of one with a list.
ONE, LIST = 12, 20


def counted_notes(notes: Sequence[str]) -> str:
    """Return ``"3 notes"``."""
    return "1 note" if len(notes) == 1 else f"{len(notes)} notes"


def first_screen(blocks: Sequence[tuple[int, Sequence[str]]], most: int) -> list[str]:
    """Return the lines of as many blocks as a screen holds, in the order given.

    Args:
        blocks: each with its rank: those of rank 0 are always there, others while there is room, the lowest rank first.
        most: lines.
    """
    left = most - sum(len(lines) for rank, lines in blocks if rank == 0)
    kept = {at for at, (rank, _) in enumerate(blocks) if rank == 0}
    for _, at in sorted((rank, at) for at, (rank, _) in enumerate(blocks) if rank):
        if len(blocks[at][1]) <= left:
            kept.add(at)
            left -= len(blocks[at][1])
    return [line for at, (_, lines) in enumerate(blocks) if at in kept for line in lines]
