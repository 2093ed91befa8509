"""The answer of ``explain --time`` as text and JSON: every line of work with its amount, its rate and its time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from zeroplan.report.screen import LIST
from zeroplan.report.terminal import PLAIN, Terminal
from zeroplan.search.explain_time import TimeExplanation


def verdict(one: TimeExplanation) -> str:
    """Return the time of a step by phase, and what there is most of in it."""
    time = one.time
    top = max(one.derivations, key=lambda line: line.item.seconds, default=None)
    most = f" Most: {top.item.name}, {1000 * top.item.seconds:.0f} ms." if top is not None else ""
    beyond = " The card is too small for it by the figures: this is the time on one with room." if one.beyond else ""
    return (
        f"{time.total:.3f} s a step: {1000 * time.forward:.0f} ms forward, {1000 * time.backward:.0f} backward,"
        f" {1000 * time.step:.0f} step.{most}{beyond}"
    )


def time_text(explanations: Sequence[TimeExplanation], terminal: Terminal = PLAIN, *, quiet: bool = False) -> str:
    """Return for every line of work its phase, milliseconds, purpose, amount and rate, and the values of the names once.

    The first screen has the largest lines of one configuration, or a line for each of several.
    """
    if quiet:
        return "\n".join(line for one in explanations for line in terminal.verdict(verdict(one), None))
    if not terminal.full:
        return "\n".join(_short(explanations, terminal))
    out: list[str] = []
    for one in explanations:
        out += ["", *terminal.verdict(verdict(one), None), *terminal.wrap(f"{one.engine}, {one.label}"), ""]
        values: dict[str, str] = {}
        for line in one.derivations:
            item = line.item
            rate = f"{line.rate[0]} = {line.rate[1]:g}"
            head = f"{item.phase.value:<8} {item.resource.executor.value:<6} {1000 * item.seconds:9.2f} ms  {item.name}"
            out += terminal.wrap(f"{head}: {item.doc}", hang=" " * 30)
            out += map(terminal.dim, terminal.wrap(f"{item.amount:,} = {item.formula}; {rate}", indent="    ", hang="      "))
            out += map(
                terminal.dim, terminal.wrap(f"source: {item.source}", indent="    ", hang="      ") if item.source else []
            )
            values |= {name: f"{name} = {value:,}" + (f": {text}" if text else "") for name, value, text in line.values}
        out += ["", terminal.bold("With"), *terminal.items(list(values.values()), mark="  ")] if values else []
    return "\n".join(out[1:])


def _short(explanations: Sequence[TimeExplanation], terminal: Terminal) -> list[str]:
    """Return the verdict and the largest lines of work; of several configurations the seconds of each, the fastest first."""
    first = explanations[0]
    if len(explanations) > 1:
        fastest = sorted(explanations, key=lambda one: one.time.total)
        rows = [f"{one.time.total:9.3f} s a step  {one.label}" for one in fastest]
        return [*rows, "", terminal.dim("One of them alone: --stage N. Every line of each: --why")]
    work = sorted((line.item for line in first.derivations), key=lambda item: -item.seconds)
    lines = [*terminal.verdict(verdict(first), None), *terminal.wrap(f"{first.engine}, {first.label}"), ""]
    shown = work[: LIST - len(lines) - 2]
    lines += [
        f"{item.phase.value:<8} {item.resource.executor.value:<6} {1000 * item.seconds:9.2f} ms  {item.name}" for item in shown
    ]
    more = f"{len(work) - len(shown)} more lines, " if len(shown) < len(work) else ""
    return [*lines, "", terminal.dim(f"{more}amounts, rates and sources: --why")]


def time_json(explanations: Iterable[TimeExplanation]) -> list[dict[str, Any]]:
    """Return the same as values that JSON can hold; times are in seconds, amounts in the unit of their resource."""
    return [
        {
            "engine": one.engine,
            "configuration": one.label,
            "step_seconds": one.time.total,
            "lines": [
                {
                    "line": line.item.name,
                    "phase": line.item.phase.value,
                    "executor": line.item.resource.executor.value,
                    "resource": line.item.resource.value,
                    "amount": line.item.amount,
                    "seconds": line.item.seconds,
                    "formula": line.item.formula,
                    "purpose": line.item.doc,
                    "source": line.item.source,
                    "rate": {line.rate[0]: line.rate[1]},
                    "values": {name: value for name, value, _ in line.values},
                }
                for line in one.derivations
            ],
        }
        for one in explanations
    ]
