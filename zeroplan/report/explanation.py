"""The answer of ``explain`` as text and JSON: every line of the ledger with its formula and the values in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from zeroplan.core.buffers import Place
from zeroplan.core.sizes import format_bytes
from zeroplan.report.screen import LIST
from zeroplan.report.terminal import PLAIN, Terminal

if TYPE_CHECKING:
    from zeroplan.planner.explain import Explanation

#: Lines at the end of the first screen.
_FOOT = 2


def verdict(explanations: Sequence[Explanation]) -> str:
    """Return what there is most of on the GPU, with its formula, and how many lines there are."""
    lines = [one.item for explanation in explanations for one in explanation.derivations]
    count = f"{len(lines)} line" if len(lines) == 1 else f"{len(lines)} lines"
    what = "configurations" if explanations[0].stage is None else "pipeline ranks"
    plans = f" in {len(explanations)} {what}" if len(explanations) > 1 else ""
    top = max(lines, key=lambda item: (item.place is Place.HBM, item.bytes))
    return f"Largest of {count}{plans}: {top.buffer.value}, {format_bytes(top.bytes)} = {top.formula}."


def explanation_text(explanations: Sequence[Explanation], terminal: Terminal = PLAIN, *, quiet: bool = False) -> str:
    """Return for every line its bytes, formula, purpose and source, and below them the values of the names, each once.

    The first screen has the largest lines of the first configuration, with their formulas alone.
    """
    out = terminal.verdict(verdict(explanations), None)
    if quiet:
        return "\n".join(out)
    if not terminal.full:
        return "\n".join([*out, "", *_largest(explanations, terminal, LIST - len(out) - 1)])
    for explanation in explanations:
        heading = f"{explanation.engine}, {explanation.label}: bytes of {_rank(explanation)}"
        out += ["", *map(terminal.bold, terminal.wrap(heading))]
        values: dict[str, str] = {}
        for derivation in explanation.derivations:
            item = derivation.item
            where = f"{item.buffer.value} in {item.place.value}"
            out += ["", *terminal.wrap(f"{where:<28} {format_bytes(item.bytes):>11} = {item.formula}", hang=" " * 42)]
            out += terminal.wrap(item.doc, indent="  ")
            out += map(terminal.dim, terminal.wrap(f"source: {item.source}", indent="  ", hang="    ") if item.source else [])
            values |= {name: f"{name} = {value:,}" + (f": {text}" if text else "") for name, value, text in derivation.values}
        out += ["", terminal.bold("With"), *terminal.items(list(values.values()), mark="  ")] if values else []
    return "\n".join(out)


def _largest(explanations: Sequence[Explanation], terminal: Terminal, most: int) -> list[str]:
    """Return the first configuration's largest lines, in at most so many lines, and what else there is."""
    first = explanations[0]
    lines = [*map(terminal.bold, terminal.wrap(f"{first.engine}, {first.label}: bytes of {_rank(first)}"))]
    items = sorted((one.item for one in first.derivations), key=lambda item: (item.place is not Place.HBM, -item.bytes))
    shown = 0
    for item in items:
        row = f"{item.buffer.value + ' in ' + item.place.value:<28} {format_bytes(item.bytes):>11} = {item.formula}"
        more = terminal.wrap(row, hang=" " * 42)
        if len(lines) + len(more) > most - _FOOT:
            break
        lines += more
        shown += 1
    there = [f"{len(items) - shown} more lines"] if shown < len(items) else []
    other = len(explanations) - 1
    there += [f"{other} more {'configurations' if first.stage is None else 'pipeline ranks'}"] if other else []
    text = f"{', '.join([*there, 'purposes, sources and values'])}: --why. One buffer alone: --line {items[0].buffer.value}"
    return [*lines, *map(terminal.dim, terminal.wrap(text))]


def _rank(explanation: Explanation) -> str:
    """Name the rank: of a pipeline its place, its blocks, what is in flight, and its peak."""
    stage = explanation.stage
    if stage is None:
        return "one rank"
    blocks = " and ".join(f"{first}–{end - 1}" for first, end in stage.blocks if end > first)
    peak = "" if stage.peak_allocated is None else f", peak {format_bytes(stage.peak_allocated)} allocated"
    flying = f"{stage.in_flight} micro batches" if stage.in_flight > 1 else "1 micro batch"
    return f"pipeline rank {stage.rank}, {f'blocks {blocks}' if blocks else 'no blocks'}, {flying} in flight at most{peak}"


def explanation_json(explanations: Iterable[Explanation]) -> list[dict[str, object]]:
    """Return the same as values that JSON can hold; ``bytes`` are integers."""
    return [
        {
            "engine": explanation.engine,
            "configuration": explanation.label,
            "lines": [
                {
                    "line": d.item.name,
                    "buffer": d.item.buffer.value,
                    "place": d.item.place.value,
                    "bytes": d.item.bytes,
                    "formula": d.item.formula,
                    "purpose": d.item.doc,
                    "source": d.item.source,
                    "values": {name: value for name, value, _ in d.values},
                }
                for d in explanation.derivations
            ],
            **({} if explanation.stage is None else {"pipeline_rank": asdict(explanation.stage)}),
        }
        for explanation in explanations
    ]
