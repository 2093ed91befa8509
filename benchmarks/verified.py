"""The page of what ``zeroplan verify`` found on GPUs, of its JSON in benchmarks/results/verify."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zeroplan.core.sizes import MIB
from zeroplan.report.table import render

RESULTS = Path(__file__).resolve().parent / "results" / "verify"
#: The figures shown: a total's name in the JSON, and the column's.
_COLUMNS = {
    "peak allocated": "allocated",
    "peak reserved": "reserved",
    "total": "total (NVML)",
    "resident memory": "host resident",
    "pinned memory": "pinned",
    "swap files": "files",
}


def verify_measured() -> str:
    """Plan beside measurement: one row a configuration, measured GB and how far the plan is off."""
    rows: list[list[str]] = []
    models: set[str] = set()
    for path in sorted(RESULTS.glob("*.json")):
        found: dict[str, Any] = json.loads(path.read_text())
        models.add(f"{found['model']['name']} on {found['machine']['count']} × {found['machine']['name']}")
        rows += [_row(one, found["workload"]) for one in found["comparisons"]]
    return "\n".join(
        [
            "# Verified on GPUs",
            "",
            f"What `zeroplan verify --json` found: {', '.join(sorted(models))}; bf16, AdamW. Measured GB, and",
            "how far the plan is off. *Owned*: whether every buffer of the runtime's Arena was planned to the byte.",
            "",
            render(["engine", "stage", "offload", "batch", "owned", *_COLUMNS.values()], rows, "github"),
            "",
        ]
    )


def _row(one: dict[str, Any], workload: dict[str, Any]) -> list[str]:
    plan = one["plan"]
    places = [f"{what} {plan[key]}" for what, key in (("optimizer", "offload_optimizer"), ("params", "offload_param"))]
    batch = f"{workload['micro_batch']} × {workload['seq_len']}"
    totals = {total["name"]: total for total in one["totals"]}
    exact = {"zeroplan": "differs" if one["mismatches"] else "exact"}.get(plan["engine"], "-")
    return [
        plan["engine"],
        str(plan["stage"]),
        ", ".join(place for place in places if not place.endswith("none")) or "none",
        batch + (", checkpoints on the host" if workload["gradient_checkpointing"] else ""),
        exact,
        *(_figure(totals.get(name)) for name in _COLUMNS),
    ]


def _figure(total: dict[str, Any] | None) -> str:
    if total is None or total["planned"] is None or (total["measured"] or 0) < MIB:
        return "-"
    return f"{total['measured'] / 1e9:.2f} ({total['planned'] / total['measured'] - 1:+.1%})"
