"""A node's host memory, phase by phase: the most, what of it is pinned, and what is alive there. No formulas here."""

from __future__ import annotations

from zeroplan.core.plan import HostPeak, MemoryPlan
from zeroplan.core.units import format_bytes, format_gib
from zeroplan.report.table import render

#: Buffers that a row names; the rest of them is summed up.
MOST_NAMED = 4


def host_table(plan: MemoryPlan, style: str = "plain") -> str:
    """One row a phase, in the order of a run; sizes in GiB. Empty at formula depth, which has no phases."""
    if not plan.cpu.peaks:
        return ""
    rows = [
        [peak.phase, format_gib(peak.bytes), format_gib(peak.pinned) if peak.pinned else "-", alive_text(peak)]
        for peak in plan.cpu.peaks
    ]
    return render(["host in", "most", "pinned", "alive there"], rows, style)


def alive_text(peak: HostPeak, most: int = MOST_NAMED) -> str:
    """``"param.master 4.60 GiB, host.process 3.50 GiB, grad.shard 2.30 GiB pinned"``, largest first."""
    named = [f"{one.buffer} {format_bytes(one.bytes)}{' pinned' if one.place == 'pinned' else ''}" for one in peak.alive[:most]]
    rest = sum(one.bytes for one in peak.alive[most:])
    return ", ".join([*named, *([f"{format_bytes(rest)} in {len(peak.alive) - most} more"] if rest else [])])
