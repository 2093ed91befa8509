"""Why rows are planned otherwise than they were measured: each beyond the bounds below has its cause here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zeroplan.report.table import render

#: Errors beyond which a row needs a cause: of reserved and of allocated memory.
RESERVED, ALLOCATED = 0.03, 0.0025

#: The causes, each with the rows that it explains.
CAUSES: dict[str, tuple[str, ...]] = {
    "The addresses at which the driver puts segments decide between free blocks of one size: the recorded events, played "
    "through the simulated allocator, reserve what is planned, and the GPU 1.07 GB more.": ("K10",),
    "A freed block that another stream used is back a moment later than planned and splits a larger one; the recorded events, "
    "played so, reserve what the GPU did.": ("W32",),
    "Where the GPU takes longer than the host, as in fp32, or gradients go to the host, freed gradients come back late all "
    "through the backward; the recorded events, played so, reserve what the GPU did.": ("W40", "W02"),
    "Timing between streams: a run of the same spec reserves other amounts.": ("K21",),
    "fp16's scale discarded no step; the plan has one that is.": ("D16",),
    "The host was slowed by recording every allocation's stack; at full speed, as planned, a run took 1 GiB more.": ("E203",),
    "FSDP 1's gathered and 16-bit flat parameters are back in the pool an event earlier or later: run again, FO01 reserved "
    "5 % less, two runs of UN02's kind lay 1 % apart, and the two ranks of X01 reserve 16.9 and 16.3 GB.": (
        *("Y08", "X01", "FO01", "UN02"),
    ),
    "LayerDrop left layers out, others at each step: without it (MT17z, MT18z) M2M100 reserves 1.7, wav2vec 2 3.0 % less than "
    "planned, whose convolutions' workspaces come and go in another order; allocated memory is met within 0.07 %.": (
        *("MT17", "MT18", "MT18z"),
    ),
    "Timing: NCCL keeps copies of offloaded parts until somebody waits for their gather. Run again with its events, the four "
    "ranks reserved 9.58 to 10.31 GB (planned 9.65, the earlier run 11.46) and allocated 1 to 4 % less than planned; the "
    "events, played through the simulated allocator, reserve what the GPU did.": ("MH34",),
    "cuDNN's heuristics: where a weight's gradient is split it takes more than the copies that are planned.": ("K34",),
}


def beyond(row: Mapping[str, Any]) -> bool:
    """Return whether a row of the accuracy table needs a cause."""
    return bool(abs(row["peak_reserved"]) > RESERVED or abs(row["peak_allocated"]) > ALLOCATED)


def table_of_causes(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the causes, each with its rows and their errors, as a table."""
    needed = {row["id"]: row for row in rows if beyond(row)}
    out = []
    for cause, ids in CAUSES.items():
        found = [needed[one] for one in ids if one in needed]
        errors = [", ".join(f"{row[key]:+.1%}" for row in found) for key in ("peak_allocated", "peak_reserved")]
        out.append([", ".join(f"`{row['id']}`" for row in found), *errors, cause])
    return render(["runs", "allocated", "reserved", "cause"], out, "github")
