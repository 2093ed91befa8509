"""The answer of ``explain --time`` as text and JSON: every line of work with its amount, its rate and its time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zeroplan.search.explain_time import TimeExplanation


def time_text(explanations: Iterable[TimeExplanation]) -> str:
    """Return for every line of work its phase, milliseconds and purpose, and below it the amount, its formula and the rate."""
    out: list[str] = []
    for one in explanations:
        time = one.time
        out += [
            f"{one.engine}, {one.label}: {time.total:.3f} s a step "
            f"({1000 * time.forward:.0f} ms forward, {1000 * time.backward:.0f} backward, {1000 * time.step:.0f} step)",
            "",
        ]
        for line in one.derivations:
            item = line.item
            rate = f"{line.rate[0]} = {line.rate[1]:g}"
            out.append(
                f"  {item.phase.value:<8} {item.executor.value:<6} {1000 * item.seconds:9.2f} ms  {item.name}   # {item.doc}"
            )
            out.append(f"      {item.amount:,} = {item.formula}; {rate}")
            out += [f"      {name} = {value:,}" + (f"   {what}" if what else "") for name, value, what in line.values]
            if item.source:
                out.append(f"      source: {item.source}")
        out.append("")
    return "\n".join(out).rstrip()


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
                    "executor": line.item.executor.value,
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
