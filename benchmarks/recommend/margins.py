"""The honesty of "fits": measured device memory against the interval's upper end. ``python -m benchmarks.recommend.margins``.

A run is *false-safe* when it used more than the upper end said: a card of that size would have been called large enough.
Only rows whose device memory NVML attributes to the run alone count. Writes ``benchmarks/results/margins.json``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.rows import EXTRA, MEASURED, load_rows, request_of
from zeroplan.planner.estimate import estimate_report

RESULT = Path(__file__).resolve().parent.parent / "results" / "margins.json"


def margin(row: dict[str, Any]) -> float | None:
    """Return the room between the measured use and the interval's upper end, as a share of the use; None without a tape."""
    gpu = estimate_report(request_of(row)).plans[0].gpu
    return None if gpu.interval is None else gpu.interval[1] / row["nvml_used"] - 1


def main() -> None:
    rows = [row for row in load_rows(MEASURED, EXTRA) if row.get("nvml_used")]
    margins = {row["id"]: value for row in rows if (value := margin(row)) is not None}
    unsafe = {name: round(value, 4) for name, value in margins.items() if value < 0}
    ordered = sorted(margins.values())
    summary = {
        "rows": len(margins),
        "false_safe": len(unsafe),
        "false_safe_rows": unsafe,
        "median_margin": round(ordered[len(ordered) // 2], 4),
        "largest_margin": round(ordered[-1], 4),
    }
    RESULT.write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
