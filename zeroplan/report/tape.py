"""The answer of ``trace`` as text and JSON: the bytes that one micro batch keeps and needs, and its largest allocations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zeroplan.core.tape_summary import Summary
from zeroplan.core.units import format_bytes


@dataclass(frozen=True, slots=True)
class TracedBatch:
    """One micro batch, traced.

    `source` says whether the tape was at hand or is new. `seconds` is the time that finding or making it took. `seq_len` is in
    tokens.
    """

    model: str
    source: str
    seconds: float
    micro_batch: int
    seq_len: int | None
    summary: Summary


def tape_json(traced: TracedBatch) -> dict[str, Any]:
    """Return one object that JSON can hold; sizes are bytes."""
    summary = traced.summary
    return {
        "schema": 1,
        "model": traced.model,
        "source": traced.source,
        "seconds": round(traced.seconds, 3),
        "micro_batch": traced.micro_batch,
        "seq_len": traced.seq_len,
        "events": summary.events,
        "live_after_forward": summary.live_after_forward,
        "peak_forward": summary.peak_forward,
        "peak_backward": summary.peak_backward,
        "gradients": summary.gradients,
        "at_peak": {kind.name.lower(): size for kind, size in summary.at_peak.items()},
        "largest": [{"module": name, "kind": kind.name.lower(), "bytes": size} for name, kind, size in summary.largest],
    }


def tape_text(traced: TracedBatch) -> str:
    """Return the peaks by phase, what is alive at the highest of them, and the largest allocations there."""
    summary = traced.summary
    lines = [
        f"{traced.model}: micro batch {traced.micro_batch}, {traced.seq_len} tokens; {traced.source}, "
        f"{round(traced.seconds, 3)} s, {summary.events:,} events",
        f"  live after the forward  {format_bytes(summary.live_after_forward):>12}",
        f"  peak of the forward     {format_bytes(summary.peak_forward):>12}",
        f"  peak of the backward    {format_bytes(summary.peak_backward):>12}   with all gradients kept "
        f"({format_bytes(summary.gradients)})",
        "at the highest point:",
        *(f"  {kind.name.lower():<12}{format_bytes(size):>12}" for kind, size in summary.at_peak.items()),
        "largest blocks there:",
        *(f"  {format_bytes(size):>12}  {kind.name.lower():<10} {name or '-'}" for name, kind, size in summary.largest),
    ]
    return "\n".join(lines)
