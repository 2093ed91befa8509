"""Derivation of a step's predicted time: every line of work with its formula, the values of its names, and its rate."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.rates import Rates
from zeroplan.ledger.line import glossary_of
from zeroplan.ledger.traffic import WorkItem
from zeroplan.planner.estimate import allocator_config
from zeroplan.planner.resolve import resolve
from zeroplan.run.ask import Ask
from zeroplan.search.cost import CostModel, StepTime
from zeroplan.search.machine_rates import machine_rates
from zeroplan.search.memory import Memory
from zeroplan.search.reasons import name_of
from zeroplan.search.space import Candidate

_NAME = re.compile(r"[a-z][a-z_0-9]*")


@dataclass(frozen=True, slots=True)
class WorkDerivation:
    """One line of work, the values of the names in its formula with what they mean, and the rate it is divided by."""

    item: WorkItem
    values: tuple[tuple[str, int, str], ...]
    rate: tuple[str, float]


@dataclass(frozen=True, slots=True)
class TimeExplanation:
    """One configuration's step. `beyond` says that its memory is more than the card's, so that no full card's work is in it."""

    engine: str
    label: str
    time: StepTime
    derivations: tuple[WorkDerivation, ...]
    beyond: bool = False


def explain_time(request: Ask) -> list[TimeExplanation]:
    """Derive the step time of every configuration of the request. Raises BadInput: a value that cannot be used."""
    resolved = resolve(request)
    allocator_config(request.alloc_conf)
    if any(case.parallel is not None for case in resolved.cases):
        raise BadInput(
            "step times are modelled for data parallelism alone", where="--time", remedy="leave --tp and --pp out, or --time"
        )
    memory = Memory(resolved.engine, resolved.spec, resolved.cluster, depth=request.depth)
    rates = machine_rates(resolved.cluster, None, [])
    cost = CostModel(resolved.engine, resolved.spec, resolved.cluster, rates)
    found = []
    for case in resolved.cases:
        candidate = Candidate(case.zero, case.workload, request.alloc_conf, unmodelled=case.unmodelled)
        counts, plan = memory.counts(candidate), memory.plan(candidate)
        items = cost.items(case.workload, case.zero, counts, plan=plan, derive=True)
        facts = cost.facts(case.workload, case.zero, counts)
        time = cost.composed(items, case.workload, case.zero)
        lines = tuple(_derivation(item, facts, rates) for item in items)
        found.append(
            TimeExplanation(
                f"{resolved.engine.name} {resolved.engine.version}",
                name_of(resolved.engine.name, case.zero),
                time,
                lines,
                beyond="gpu" in plan.misfits,
            )
        )
    return found


def _derivation(item: WorkItem, facts: tuple[Any, ...], rates: Rates) -> WorkDerivation:
    values = []
    for name in dict.fromkeys(_NAME.findall(item.formula)):
        holder = next((f for f in facts if hasattr(f, name)), None)
        if holder is not None:
            values.append((name, int(getattr(holder, name)), glossary_of(type(holder)).get(name, "")))
    rate = item.resource.rate_name
    return WorkDerivation(item, tuple(values), (rate, float(getattr(rates, rate))))
