"""A stream of tape events summed up: live and peak bytes by phase, and what is live at the peak."""

from __future__ import annotations

from dataclasses import dataclass

from zeroplan.tape.expanded import ExpandedTape, Kind, Mark, Op


@dataclass(frozen=True, slots=True)
class Summary:
    """Bytes as requested (an allocator rounds them up), gradients included as if nothing took them.

    `at_peak` holds bytes by kind, and `largest` (module name, kind, bytes) of the largest blocks, at the highest point.
    """

    events: int
    live_after_forward: int
    peak_forward: int
    peak_backward: int
    gradients: int
    at_peak: dict[Kind, int]
    largest: list[tuple[str, Kind, int]]


def summarise(tape: ExpandedTape, *, largest: int = 10) -> Summary:
    """Sum up one micro batch."""
    live: dict[int, int] = {}  # storage -> its ALLOC event
    total = gradients = after_forward = 0
    peaks = [0, 0]
    best: list[int] = []
    backward = 0
    stale = False  # whether `best` has to be taken again before anything is freed
    for i, (op, arg) in enumerate(zip(tape.op, tape.arg, strict=True)):
        if op == Op.ALLOC:
            live[arg] = i
            total += tape.aux[i]
            if total > peaks[backward]:
                stale = stale or total > max(peaks)
                peaks[backward] = total
        elif op == Op.FREE:
            if stale:
                best, stale = list(live.values()), False
            total -= tape.aux[live.pop(arg)]
        elif op == Op.GRAD:
            gradients += tape.aux[live[tape.aux[i]]]
        elif op == Op.MARK and arg == Mark.FORWARD_END:
            after_forward = total
        elif op == Op.MARK and arg == Mark.BACKWARD_BEGIN:
            backward = 1
    by_kind: dict[Kind, int] = {}
    for i in best:
        by_kind[Kind(tape.kind[i])] = by_kind.get(Kind(tape.kind[i]), 0) + tape.aux[i]
    top = sorted(best, key=lambda i: -tape.aux[i])[:largest]
    named = [(tape.modules[tape.module[i]].name if tape.module[i] >= 0 else "", Kind(tape.kind[i]), tape.aux[i]) for i in top]
    order = dict(sorted(by_kind.items(), key=lambda item: -item[1]))
    return Summary(len(tape), after_forward, peaks[0], peaks[1], gradients, order, named)
