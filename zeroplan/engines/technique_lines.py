"""What techniques add to an engine's ledger and to a rank's host, without a line of the engine's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zeroplan.core.buffers import Phase, Place
from zeroplan.ledger.line import Ledger, evaluate
from zeroplan.techniques.table import techniques_of

if TYPE_CHECKING:
    from zeroplan.core.workload import Workload
    from zeroplan.engines.base import Engine
    from zeroplan.engines.case import Case
    from zeroplan.engines.simulation import HostBytes


def _lines(workload: Workload) -> list[Any]:
    return [line for technique, _ in techniques_of(workload) for line in technique.lines]


def with_techniques(ledger: Ledger, workload: Workload) -> Ledger:
    """Return an engine's lines with those of a workload's techniques, which read the same facts."""
    return Ledger((*ledger, *_lines(workload)))


def technique_host(engine: Engine, case: Case) -> dict[Phase, HostBytes]:
    """Return the bytes that techniques have on one rank's host, by phase."""
    lines = _lines(case.workload)
    items = [one for one in evaluate(lines, engine.ledger(case)[1]) if one.place is not Place.HBM] if lines else []
    return {
        phase: {(one.buffer, one.place): one.bytes for one in items if phase in one.phases}
        for phase in {phase for one in items for phase in one.phases}
    }
