"""The buffers that are alive when a plan's GPU memory peaks, and the module or parameter that each belongs to."""

from __future__ import annotations

import re
from collections.abc import Callable

from zeroplan.core.buffers import Buffer
from zeroplan.core.tape import ExpandedTape
from zeroplan.core.units import format_bytes
from zeroplan.report.table import render
from zeroplan.simulate.timeline import Note, Timeline

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
    timeline: Timeline, tape: ExpandedTape, *, most: int = 20, style: str = "plain", width: int | None = None
) -> str:
    """Return two tables: the buffers, and the `most` largest origins. Modules of other blocks share a row."""
    origin = origin_in(tape)
    by_buffer = [[buffer.value, format_bytes(count)] for buffer, count in timeline.alive_by_buffer().items()]
    totals: dict[tuple[str, str], int] = {}
    for (buffer, note), count in timeline.alive_by_buffer_and_note().items():
        where = (buffer.value, _NUMBER.sub(".*", origin(buffer, note)))
        totals[where] = totals.get(where, 0) + count
    largest = sorted(totals.items(), key=lambda item: -item[1])[:most]
    by_origin = [[buffer, where or "-", format_bytes(count)] for (buffer, where), count in largest]
    return "\n\n".join(
        [
            render(["buffer", "bytes"], by_buffer, style, width=width),
            render(["buffer", "module or parameter", "bytes"], by_origin, style, width=width),
        ]
    )


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
