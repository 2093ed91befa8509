"""The answer of ``explain`` as text and JSON: every line of the ledger with its formula and the values in it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from zeroplan.core.units import format_bytes

if TYPE_CHECKING:
    from zeroplan.planner.explain import Explanation


def explanation_text(explanations: Iterable[Explanation]) -> str:
    """Return for every line its bytes, formula and purpose, the value of each name in the formula, and the source."""
    out: list[str] = []
    for explanation in explanations:
        out += [f"{explanation.engine}, {explanation.label} (bytes of one rank)", ""]
        for derivation in explanation.derivations:
            item = derivation.item
            where = f"{item.buffer.value} in {item.place.value}"
            out.append(f"  {where:<28} {format_bytes(item.bytes):>11} = {item.formula}   # {item.doc}")
            for name, value, meaning in derivation.values:
                out.append(f"      {name} = {value:,}" + (f"   {meaning}" if meaning else ""))
            if item.source:
                out.append(f"      source: {item.source}")
        out.append("")
    return "\n".join(out).rstrip()


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
        }
        for explanation in explanations
    ]
