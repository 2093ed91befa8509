"""What ``recommend --layouts`` prints: the layout that was chosen, and those before it with what they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING

from zeroplan.core.parallel import DEFAULT_SCHEDULE
from zeroplan.core.sizes import GIB, format_bytes
from zeroplan.planner.describe import describe_layout
from zeroplan.report.terminal import Terminal
from zeroplan.report.verdict import fit_text, of_usable, unknown_text
from zeroplan.report.words import degrees_text, gpus_text
from zeroplan.search.layout_recomputation import recomputed
from zeroplan.search.policy import EQUALLY_FAST, HOST_DECIDES, NOTABLE

if TYPE_CHECKING:
    from zeroplan.search.layout_answer import LaidOut, LayoutAnswer


def layouts_text(answer: LayoutAnswer, *, terminal: Terminal, quiet: bool = False, next_command: Sequence[str] = ()) -> str:
    """Write the verdict, the way to it, and the command that plans the layout; the verdict alone if `quiet`."""
    best, may = answer.best, answer.may
    lines = terminal.verdict(_verdict(answer), best is not None if may is None else None)
    if quiet:
        return "\n".join(lines)
    told = _tried(answer)
    unknown = [f"{_named(one)}: {_need(one)}" for one in answer.tried if one.plan.undecided and one is not may]
    sure = "Layouts that need more than the card has:" if best is not None or may is not None else "What they need:"
    for heading, texts in ((sure, told), ("Layouts of which it is not known whether they fit:", unknown)):
        if texts:
            lines.append("")
            lines += terminal.wrap(heading)
        for text in texts:
            lines += terminal.wrap(text, indent="  ", hang="    ")
    chosen = answer.chosen
    if chosen is not None:
        lines.append("")
        lines += terminal.wrap(_speed(chosen))
        for sentence in (
            host_text(chosen.step_seconds, chosen.slow_host_seconds),
            _links(chosen),
            _otherwise(chosen),
            _plainest(answer),
        ):
            lines += terminal.wrap(sentence) if sentence else []
        lines += terminal.wrap(_why(answer))
        lines += terminal.command("Next: ", next_command) if next_command else []
    for text in answer.warnings:
        lines += terminal.wrap(f"Warning: {text}")
    return "\n".join(lines)


def _verdict(answer: LayoutAnswer) -> str:
    best, may = answer.best, answer.may
    if best is not None:
        return f"Fits: {_named(best)}, {fit_text(best.plan)}."
    if may is not None:
        text = f"Unknown: no layout is known to fit. The fastest that may is {_named(may)}, {_need(may)}."
        return f"{text} {unknown_text(may.plan)}"
    kept = f" with {answer.fixed}" if answer.fixed else ""
    known = "is known to fit" if any(one.plan.undecided for one in answer.tried) else "fits"
    return f"Nothing {known}: no layout{kept} that was tried."


def _plainest(answer: LayoutAnswer) -> str:
    """Name the plainest layout that is as fast as far as such times tell, and what it costs."""
    one, best = answer.plainest, answer.best
    if one is None or best is None:
        return ""
    slower = 1 - one.compared / best.compared
    return f"Plainest within {EQUALLY_FAST:.0%}: {_named(one)}, {slower:.1%} slower, {_need(one)}.".replace("%", " %")


def _why(answer: LayoutAnswer) -> str:
    which = "that fit" if answer.best is not None else "that may fit"
    kept = f" with {answer.fixed}" if answer.fixed else ""
    faster = reason(answer)
    return (
        f"Why: of the layouts{kept} {which}, this one is modelled to be the fastest{f'; {faster}' if faster else ''}. Times of "
        "layouts are a model of their work and links, and were not measured."
    )


def reason(answer: LayoutAnswer) -> str:
    """Say what the layout would need that is the most like the answer and faster, and where ranks share its matrices, tokens or
    layers, what it would without that; else what it would need without checkpointing; empty where neither was looked at.
    """
    chosen = answer.chosen
    assert chosen is not None, "an answer without a layout has no reason"
    faster = [
        one
        for one in answer.tried
        if one.compared >= NOTABLE * chosen.compared and one.plan.gpu.needed > (one.plan.gpu.usable or 0)
    ]
    least = answer.without_checkpointing
    said = [] if least is None else [f"without checkpointing it needs {format_bytes(least, digits=1)} and more"]
    again = recomputed(chosen.request)
    alike = [one for one in faster if least is None or recomputed(one.request) == again]
    if alike:
        nearest = min(alike, key=lambda one: (_unlike(one, chosen), -one.compared))
        gain = f"{nearest.compared / chosen.compared - 1:.0%}".replace("%", " %")
        said.append(f"{layout_name(nearest)} would be {gain} faster and needs {_need(nearest)}")
        alone = (one for one in alike if one.layout.dp == one.layout.world_size)
        said += [
            f"{layout_name(one)} needs {_need(one)}" for one in alone if one is not nearest and recomputed(one.request) == again
        ][:1]
    return "; ".join(said)


def _unlike(one: LaidOut, other: LaidOut) -> int:
    """Count what tells two layouts apart: degrees, stage, recomputation."""
    told = [(*astuple(each.layout), each.plan.stage, recomputed(each.request)) for each in (one, other)]
    return sum(first != second for first, second in zip(*told, strict=True))


def layouts_table(answer: LayoutAnswer, style: str = "plain") -> str:
    """Return a row for the chosen layout and for each that was simulated, sizes in GiB.

    Args:
        answer: what the search found.
        style: plain, github, html or csv.

    Raises:
        BadInput: an unknown style.
    """
    from zeroplan.report.table import render

    rows = [
        [_named(one), str(one.request.grad_accum or 1), f"{one.tokens_per_second:,.0f}", _need(one), _FITS[one.fits]]
        for one in answer.listed
    ]
    return render(["layout", "passes", "tokens/s", "needs", "fits"], rows, style)


_FITS = {True: "yes", False: "no", None: "unknown"}
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


def host_text(seconds: float, slow: float) -> str:
    """Say how long a step of so many seconds takes on a slow host, where that decides."""
    if slow < HOST_DECIDES * seconds:
        return ""
    text = f"On a slow host, which issues kernels later than the GPU runs them, a step takes {slow:.2f} s"
    return f"{text}: zeroplan doctor --calibrate measures this one."


#: Groups of ranks, in words.
_GROUPS = {"pp": "pp {}", "shards": "shards over {} ranks", "replicas": "{} replicas of the shards"}


def _links(one: LaidOut) -> str:
    """Say which groups of ranks lie within a node, and what they send over."""
    places: dict[str, list[str]] = {}
    for link in one.links:
        where = f"{'within a node' if link.inside else 'between nodes'} at {_rate(link.gbs)} GB/s"
        places.setdefault(where, []).append(_GROUPS.get(link.group, link.group + " {}").format(link.ranks))
    return "Links: " + "; ".join(f"{', '.join(groups)} {where}" for where, groups in places.items()) + "." if places else ""


def _rate(gbs: float) -> str:
    return f"{gbs:,.0f}" if gbs >= 10 else f"{gbs:.2g}"


def _otherwise(one: LaidOut) -> str:
    """Say of a variant what the same degrees would do without it."""
    request, plain = one.request, one.simpler
    if plain is None:
        return ""
    if request.pp > 1:
        how = f"1f1b, one chunk a rank, would wait for {plain.bubble:.0%} of a step"
    else:
        replicas = f" in {request.dp_replicate} replicas" if request.dp_replicate > 1 else ""
        instead = f"ZeRO-{one.plan.stage}{replicas} in place of ZeRO-3 over all ranks"
        how = f"{instead}, which would gather and reduce for {plain.sharding / plain.total:.0%} of a step"
    return f"{how}, at {plain.tokens_per_second:,.0f} tokens/s.".replace("%", " %")


def _tried(answer: LayoutAnswer) -> list[str]:
    """Return a line for each layout that was simulated, and one for all of a cluster that need too much by counts alone."""
    found = []
    for one in answer.too_large:
        count = f"{one.layouts} layouts" if one.layouts > 1 else "1 layout"
        least, usable = one.least / GIB, format_bytes(one.usable, digits=1)
        where = gpus_text(one.nodes, one.gpus)
        found.append(f"{where}: {count} of {least:,.1f} of {usable} a GPU and more by counts alone")
    return [*found, *(f"{_named(one)}: {_need(one)}" for one in answer.tried if not one.plan.undecided)]


def _named(one: LaidOut) -> str:
    return f"{gpus_text(one.request.nodes, one.request.gpus)} as {layout_name(one)}"


def layout_name(one: LaidOut) -> str:
    """Return ``"dp 4 × tp 2 with split tokens, ZeRO-3, checkpointing"``."""
    request = one.request
    text = degrees_text(describe_layout(one.layout))
    text += f", {request.schedule}" if request.schedule != DEFAULT_SCHEDULE else ""
    text += f", ZeRO-{one.plan.stage}"
    policy, compiled = recomputed(request), request.value("compile")
    text += f", {policy} checkpointing".replace(" full", "") if policy else ""
    return text + (f", compiled {compiled}" if compiled else "")


def _need(one: LaidOut) -> str:
    return of_usable(one.plan) + (" and activations that are not known" if one.plan.gpu.total is None else "")
