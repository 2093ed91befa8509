"""Prints the captured figures beside the measured ones, and how far off each is.

``python benchmarks/capture/compare.py predicted.jsonl measured.jsonl``: MiB, and per cent of the measured figure.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

#: Errors up to which a figure counts as right, in per cent.
ALLOCATED, RESERVED = 1.0, 3.0


def rows(path: str) -> dict[str, dict[str, Any]]:
    """The last row of each program."""
    lines = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    return {line["name"]: line for line in lines}


def main() -> None:
    """Print the table and the counts."""
    predicted, measured = rows(sys.argv[1]), rows(sys.argv[2])
    right = [0, 0, 0]
    print(f"{'program':<28}{'allocated':>10}{'measured':>10}{'%':>8}{'reserved':>10}{'measured':>10}{'%':>8}")
    for name, fact in measured.items():
        plan = predicted.get(name)
        if plan is None or "allocated" not in fact or not plan.get("peak_allocated"):
            print(f"{name:<28}{'no figures: ' + str((plan or {}).get('stopped') or fact.get('code')):.90}")
            continue
        cells, errors = "", []
        for ours, theirs in (("peak_allocated", "allocated"), ("peak_reserved", "reserved")):
            error = 100 * (plan[ours] / fact[theirs] - 1)
            errors.append(abs(error))
            cells += f"{plan[ours] >> 20:>10}{fact[theirs] >> 20:>10}{error:>8.2f}"
        right = [right[0] + 1, right[1] + (errors[0] <= ALLOCATED), right[2] + (errors[1] <= RESERVED)]
        print(f"{name:<28}{cells}")
    print(f"{right[0]} programs: allocated within {ALLOCATED} % on {right[1]}, reserved within {RESERVED} % on {right[2]}")


if __name__ == "__main__":
    main()
