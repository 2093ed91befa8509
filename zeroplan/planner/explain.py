"""explain(): the same formulas as estimate's, derived with the user's numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from zeroplan.core.errors import BadInput, did_you_mean
from zeroplan.engines.base import Case, Engine
from zeroplan.ledger.line import Item, derived
from zeroplan.planner.request import Request, resolve

_NAME = re.compile(r"[a-z][a-z_0-9]*")


@dataclass(frozen=True, slots=True)
class Derivation:
    """One line with the values of the names in its formula and what each name means."""

    item: Item
    values: tuple[tuple[str, int, str], ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """One configuration's lines, derived."""

    engine: str
    label: str
    derivations: tuple[Derivation, ...]


def explain(request: Request, line: str | None = None) -> list[Explanation]:
    """Derive every line of the request's plans, or those whose buffer or line is named `line`.

    Raises:
        BadInput: a value that cannot be used, or a line that no plan has.
    """
    resolved = resolve(request)
    out = [_explain(resolved.engine, case, line) for case in resolved.cases]
    if line is not None and not any(e.derivations for e in out):
        items = (item for case in resolved.cases for item in _items(resolved.engine, case)[0])
        known = sorted({name for item in items for name in (item.buffer.value, item.name)})
        raise BadInput(
            f"no line {line[:60]!r} in these plans",
            where="--line",
            remedy=did_you_mean(line, known) or f"known: {', '.join(known)}",
        )
    return out


def _items(engine: Engine, case: Case) -> tuple[list[Item], Any]:
    ledger, facts = engine.ledger(case)
    return list(derived(ledger, facts)), facts


def _explain(engine: Engine, case: Case, line: str | None) -> Explanation:
    items, facts = _items(engine, case)
    meanings = engine.glossary()
    derivations = []
    for item in items:
        if line is None or line in (item.buffer.value, item.name):
            names = dict.fromkeys(_NAME.findall(item.formula))
            values = tuple((name, getattr(facts, name), meanings.get(name, "")) for name in names if hasattr(facts, name))
            derivations.append(Derivation(item, values))
    zero = case.zero
    label = f"stage {zero.stage}, optimizer {zero.offload_optimizer.device}, parameters {zero.offload_param.device}"
    return Explanation(f"{engine.name} {engine.version}", label, tuple(derivations))
