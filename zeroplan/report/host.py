"""A table of one node's host memory by phase: the peak, how much of it is pinned, and which buffers are alive."""

from __future__ import annotations

from zeroplan.core.plan import HostPeak, MemoryPlan
from zeroplan.core.sizes import format_bytes, format_gib
from zeroplan.report.table import Table

#: A row names this many buffers and gives the sum of the others.
MOST_NAMED = 4
#: Characters of the columns of figures, and of a buffer's name with its size.
_OTHER_COLUMNS, _NAME = 28, 26


def host_table(plan: MemoryPlan, style: str = "plain", *, width: int | None = None) -> str:
    """Return one row for each phase, in the order of a run, sizes in GiB. Empty at formula depth, which has no host phases."""
    named = MOST_NAMED if width is None else max(1, (width - _OTHER_COLUMNS) // _NAME)
    return host_rows(plan, named).text(style, width=width)


def host_rows(plan: MemoryPlan, named: int) -> Table:
    """Return the table before it is text; a row names `named` buffers."""
    rows = [
        [peak.phase, format_gib(peak.bytes), format_gib(peak.pinned) if peak.pinned else "-", alive_text(peak, named)]
        for peak in plan.cpu.peaks
    ]
    return Table(["host in", "most", "pinned", "alive there"], rows)


def alive_text(peak: HostPeak, most: int = MOST_NAMED) -> str:
    """Return what is alive, largest first: ``"param.master 4.60 GiB, grad.shard 2.30 GiB pinned, 1.04 GiB in 4 more"``."""
    named = [f"{one.buffer} {format_bytes(one.bytes)}{' pinned' if one.place == 'pinned' else ''}" for one in peak.alive[:most]]
    rest = sum(one.bytes for one in peak.alive[most:])
    return ", ".join([*named, *([f"{format_bytes(rest)} in {len(peak.alive) - most} more"] if rest else [])])
