"""What a stream of tape events amounts to: live and peak bytes by phase, and what is live at the peak."""

from __future__ import annotations

from dataclasses import dataclass

from zeroplan.core.tape import Kind, Mark, Op, Stream


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


def summarise(stream: Stream, *, largest: int = 10) -> Summary:
    """The summary of one micro batch."""
    live: dict[int, int] = {}  # storage -> its ALLOC event
    total = gradients = after_forward = 0
    peaks = [0, 0]
    best: list[int] = []
    backward = 0
    stale = False  # whether `best` has to be taken again before anything is freed
    for i, (op, arg) in enumerate(zip(stream.op, stream.arg, strict=True)):
        if op == Op.ALLOC:
            live[arg] = i
            total += stream.aux[i]
            if total > peaks[backward]:
                stale = stale or total > max(peaks)
                peaks[backward] = total
        elif op == Op.FREE:
            if stale:
                best, stale = list(live.values()), False
            total -= stream.aux[live.pop(arg)]
        elif op == Op.GRAD:
            gradients += stream.aux[live[stream.aux[i]]]
        elif op == Op.MARK and arg == Mark.FORWARD_END:
            after_forward = total
        elif op == Op.MARK and arg == Mark.BACKWARD_BEGIN:
            backward = 1
    by_kind: dict[Kind, int] = {}
    for i in best:
        by_kind[Kind(stream.kind[i])] = by_kind.get(Kind(stream.kind[i]), 0) + stream.aux[i]
    top = sorted(best, key=lambda i: -stream.aux[i])[:largest]
    named = [
        (stream.modules[stream.module[i]].name if stream.module[i] >= 0 else "", Kind(stream.kind[i]), stream.aux[i])
        for i in top
    ]
    order = dict(sorted(by_kind.items(), key=lambda item: -item[1]))
    return Summary(len(stream), after_forward, peaks[0], peaks[1], gradients, order, named)
