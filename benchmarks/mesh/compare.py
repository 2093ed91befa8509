"""Holds measured cases against their predictions: ``python -m benchmarks.mesh.compare [ROWS.jsonl] [--now]``.

``--now`` compares what zeroplan says today in place of what it said before the rows were measured.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.mesh.cases import CASES
from benchmarks.mesh.predict import PREDICTED, figures, plan_of

MEASURED = PREDICTED.with_name("mesh.jsonl")


def main() -> None:
    """Print a line a case, and the largest errors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("rows", type=Path, nargs="?", default=MEASURED)
    parser.add_argument("--now", action="store_true")
    asked = parser.parse_args()
    measured = {row["id"]: row for row in map(json.loads, asked.rows.read_text().splitlines())}
    kept = json.loads(PREDICTED.read_text())["predictions"]
    worst = {"allocated": 0.0, "reserved": 0.0}
    for case in CASES:
        row: dict[str, Any] = measured.get(case.id, {})
        if not row.get("ok"):
            print(case.id, row.get("fault", "not measured"))
            continue
        told = figures(plan_of(case), case) if asked.now else kept[case.id]
        parts = []
        for name in worst:
            error = told[name] / row[name] - 1
            worst[name] = max(worst[name], abs(error))
            parts.append(f"{name} {told[name] / 2**20:8.1f} / {row[name] / 2**20:8.1f} MiB {error:+.2%}")
        print(case.id, *parts)
    print("largest:", *(f"{name} {error:.2%}" for name, error in worst.items()))


if __name__ == "__main__":
    main()
