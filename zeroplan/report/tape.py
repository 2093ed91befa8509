"""The answer of ``trace`` as text and JSON: the bytes that one micro batch keeps and needs, and its largest allocations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zeroplan.core.sizes import format_bytes
from zeroplan.report.terminal import PLAIN, Terminal
from zeroplan.tape.expanded import Kind
from zeroplan.tape.summary import Summary

_WORDS = {
    Kind.SAVED: "activations",
    Kind.TEMP: "temporaries",
    Kind.GRAD: "gradients",
    Kind.LOGITS: "logits",
    Kind.LOSS: "logits and loss",
    Kind.CHECKPOINT: "checkpointed inputs",
    Kind.CAST: "16-bit copies of weights",
    Kind.WORKSPACE: "workspaces",
    Kind.INPUT: "the batch",
    Kind.ACT_GRAD: "activations' gradients",
}


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


def tape_text(traced: TracedBatch, terminal: Terminal = PLAIN, *, quiet: bool = False) -> str:
    """Return the highest peak with its phase, the peaks, what is alive at the highest, and the largest allocations there."""
    summary = traced.summary
    phase, peak = max(("backward", summary.peak_backward), ("forward", summary.peak_forward), key=lambda one: one[1])
    lines = terminal.verdict(
        f"{format_bytes(peak)} at the peak, in the {phase}: {traced.model}, micro batch {traced.micro_batch},"
        f" {traced.seq_len} tokens.",
        None,
    )
    if quiet:
        return "\n".join(lines)
    lines += terminal.wrap(f"Tape {traced.source}, {round(traced.seconds, 3)} s, {summary.events:,} events.")
    lines += [
        "",
        f"live after the forward  {format_bytes(summary.live_after_forward):>12}",
        f"peak of the forward     {format_bytes(summary.peak_forward):>12}",
        f"peak of the backward    {format_bytes(summary.peak_backward):>12}  with all gradients kept "
        f"({format_bytes(summary.gradients)})",
        "",
        terminal.bold("At the highest point"),
        *(f"{_WORDS[kind]:<24}{format_bytes(size):>12}" for kind, size in summary.at_peak.items()),
        "",
        terminal.bold("Largest blocks there"),
    ]
    for name, kind, size in summary.largest:
        lines += terminal.wrap(f"{_WORDS[kind]:<24}{format_bytes(size):>12}  {name}".rstrip(), hang=" " * 38)
    return "\n".join(lines)
