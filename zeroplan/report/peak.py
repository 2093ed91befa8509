"""The buffers that are alive when a plan's GPU memory peaks, and the module or parameter that each belongs to."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from zeroplan.core.buffers import Buffer
from zeroplan.core.sizes import format_bytes
from zeroplan.planner.simulated import family_at_peak
from zeroplan.report.table import render
from zeroplan.simulate.timeline import Note, Timeline
from zeroplan.tape.expanded import ExpandedTape

_Key = TypeVar("_Key")

#: The number of a transformer block in a module's name: ``.11`` in ``transformer.h.11.mlp``.
_NUMBER = re.compile(r"\.\d+(?=\.|$)")
#: The recorder notes a parameter's index for these buffers, and a module's index for all others.
_OF_PARAMETERS = frozenset(
    {
        Buffer.PARAM_FULL,
        Buffer.PARAM_SHARD,
        Buffer.PARAM_FROZEN,
        Buffer.PARAM_PERSISTENT,
        Buffer.PARAM_MASTER,
    }
)
#: Rows of the table of origins.
_MOST_ORIGINS = 20


def origin_in(tape: ExpandedTape) -> Callable[[Buffer, Note], str]:
    """Return a function that names the module or parameter that an allocation of this model belongs to.

    The function takes the allocation's buffer and its note (an index, or -1 for none).
    """

    def origin(buffer: Buffer, note: Note) -> str:
        if isinstance(note, str):
            return note
        names = tape.params if buffer in _OF_PARAMETERS else tape.modules
        if note < 0 or note >= len(names):
            return ""
        return names[note].name or "the whole model"

    return origin


def peak_tables(
    timeline: Timeline, tape: ExpandedTape, *, sharded: bool, style: str = "plain", width: int | None = None
) -> str:
    """Return two tables: bytes by family, and the largest origins. Modules of other blocks share a row.

    Args:
        timeline: the simulated run.
        tape: the model's tape that the run was laid over.
        sharded: whether parameters are sharded (stage 3).
        style: plain, github, html or csv.
        width: the most characters of a line of plain text.
    """
    origin, family = origin_in(tape), family_at_peak(tape, sharded=sharded)
    families: dict[str, int] = {}
    origins: dict[tuple[str, str], int] = {}
    for (buffer, note), count in timeline.alive_by_buffer_and_note().items():
        what = family(buffer, note).value
        families[what] = families.get(what, 0) + count
        where = (what, _NUMBER.sub(".*", origin(buffer, note)))
        origins[where] = origins.get(where, 0) + count
    by_family = [[what, format_bytes(count)] for what, count in _largest(families)]
    by_origin = [[what, where or "-", format_bytes(count)] for (what, where), count in _largest(origins)[:_MOST_ORIGINS]]
    return "\n\n".join(
        [
            render(["what", "bytes"], by_family, style, width=width),
            render(["what", "module or parameter", "bytes"], by_origin, style, width=width),
        ]
    )


def _largest(found: dict[_Key, int]) -> list[tuple[_Key, int]]:
    return sorted(found.items(), key=lambda item: -item[1])


def peak_json(timeline: Timeline, tape: ExpandedTape) -> dict[str, object]:
    """Return the same as values that JSON can hold, every origin by itself; ``bytes`` are integers."""
    origin = origin_in(tape)
    return {
        "mark": timeline.peak_mark(),
        "by_buffer": {buffer.value: count for buffer, count in timeline.alive_by_buffer().items()},
        "alive": [
            {"buffer": buffer.value, "origin": origin(buffer, note), "bytes": count}
            for (buffer, note), count in timeline.alive_by_buffer_and_note().items()
        ],
    }
