"""What ``recommend --layouts`` prints: the layout that was chosen, and those before it with what they need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from zeroplan.core.units import format_bytes
from zeroplan.report.terminal import Terminal
from zeroplan.report.words import degrees_text, gpus_text

if TYPE_CHECKING:
    from zeroplan.search.layouts import LaidOut, LayoutAnswer


def layouts_text(answer: LayoutAnswer, *, terminal: Terminal, quiet: bool = False, next_command: Sequence[str] = ()) -> str:
    """Write the verdict, the way to it, and the command that plans the layout; the verdict alone if `quiet`."""
    best = answer.best
    verdict = f"Fits: {_named(best)}, {_need(best)} a GPU." if best is not None else "Nothing fits: no layout that was tried."
    lines = terminal.verdict(verdict, best is not None)
    if quiet:
        return "\n".join(lines)
    told = _tried(answer)
    if told:
        lines.append("")
        lines += terminal.wrap("Layouts that need more than the card has:" if best is not None else "What they need:")
        for text in told:
            lines += terminal.wrap(text, indent="  ", hang="    ")
    if best is not None:
        lines.append("")
        lines += terminal.wrap(_speed(best))
        lines += terminal.wrap(
            "Why: of the layouts that fit, this one is modelled to be the fastest. Times of layouts are a model of their work "
            "and links, and were not measured."
        )
        lines += terminal.command("Next: ", next_command) if next_command else []
    for text in answer.warnings:
        lines += terminal.wrap(f"Warning: {text}")
    return "\n".join(lines)


#: What a step's seconds are spent on, in words.
_SPENT = {
    "compute": "computing",
    "tensor": "summing over tensor-parallel ranks",
    "ring": "passing keys and values",
    "experts": "exchanging tokens between experts",
    "waiting": "waiting for other pipeline stages",
    "sharding": "gathering and reducing",
    "optimizer": "the optimizer",
}


def _speed(one: LaidOut) -> str:
    """Say the modelled speed and what its time is spent on, the most first; less than a hundredth is left out."""
    time = one.time
    parts = sorted(((seconds / time.total, _SPENT[name]) for name, seconds in time.parts.items()), reverse=True)
    spent = ", ".join(f"{share:.0%} {what}" for share, what in parts if share >= 0.01).replace("%", " %")
    speed = f"{time.tokens_per_second:,.0f} tokens/s, {time.total:.2f} s a step, MFU {100 * time.utilization:.0f} %"
    return f"Modelled: {speed}: {spent}."


def _tried(answer: LayoutAnswer) -> list[str]:
    """Return a line for each layout that was simulated, and one for all of a cluster that need too much by counts alone."""
    found = []
    for one in answer.too_large:
        count = f"{one.layouts} layouts" if one.layouts > 1 else "1 layout"
        least, usable = (format_bytes(size, digits=1) for size in (one.least, one.usable))
        where = gpus_text(one.nodes, one.gpus)
        found.append(f"{where}: {count} of {least} of {usable} and more without activations within blocks")
    return [*found, *(f"{_named(one)}: {_need(one)}" for one in answer.tried)]


def _named(one: LaidOut) -> str:
    request = one.request
    text = f"{gpus_text(request.nodes, request.gpus)} as {degrees_text(one.to_dict()['layout'])}, ZeRO-{one.plan.stage}"
    return text + (", checkpointing" if request.gradient_checkpointing else "")


def _need(one: LaidOut) -> str:
    gpu = one.plan.gpu
    usable = f"of {format_bytes(gpu.usable or 0, digits=1)}"
    if gpu.total is None:
        return f"{format_bytes(gpu.model_states, digits=1)} {usable} and activations that are not known"
    most = f" (at most {format_bytes(gpu.interval[1], digits=1)})" if gpu.interval else ""
    return f"{format_bytes(gpu.total, digits=1)} {usable}{most}"
