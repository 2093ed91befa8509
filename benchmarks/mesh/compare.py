"""Holds measured cases against their predictions: ``python -m benchmarks.mesh.compare [ROWS.jsonl] [--now]``.

``--now`` compares what zeroplan says today in place of what it said before the rows were measured.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.mesh.cases import CASES, TWO_GPUS
from benchmarks.mesh.predict import FIGURES, PREDICTED, figures, plan_of

MEASURED = PREDICTED.with_name("mesh.jsonl")


def main() -> None:
    """Print a line a case, and the largest errors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("rows", type=Path, nargs="?", default=MEASURED)
    parser.add_argument("--now", action="store_true")
    asked = parser.parse_args()
    measured = {row["id"]: row for row in map(json.loads, asked.rows.read_text().splitlines())}
    kept = json.loads(PREDICTED.read_text())["predictions"]
    for title, cases in (("fake ranks on one GPU", CASES), ("two GPUs", TWO_GPUS)):
        print(title)
        worst: dict[str, float] = {}
        for case in cases:
            row = measured.get(case.id, {})
            if not row.get("ok"):
                print(case.id, row.get("fault", "not measured"))
                continue
            told = figures(plan_of(case), case) if asked.now else kept[case.id]
            print(case.id, *_errors(told, row, worst))
        print("largest:", *(f"{name} {error:.2%}" for name, error in worst.items()))


def _errors(told: dict[str, Any], row: dict[str, Any], worst: dict[str, float]) -> list[str]:
    """Return a text for each figure that is both told and measured, and raise the worst errors."""
    parts = []
    for name in FIGURES:
        if told.get(name) is None or name not in row:
            continue
        error = told[name] / row[name] - 1
        worst[name] = max(worst.get(name, 0.0), abs(error))
        parts.append(f"{name} {told[name] / 2**20:8.1f} / {row[name] / 2**20:8.1f} MiB {error:+.2%}")
    return parts


if __name__ == "__main__":
    main()
