"""Plans every published figure again: ``python -m benchmarks.published [--only RE] [--write]``.

Prints published and planned figures; exits with 1 where a plan is no longer the kept one, or does not hold and gives no reason.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict, replace

from benchmarks.published.rows import FIGURES, ROWS, load_rows, plan, shown


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="RE", help="rows whose id matches")
    parser.add_argument("--write", action="store_true", help="keep what is planned now in rows.jsonl")
    arguments = parser.parse_args()
    rows, moved = [], False
    for row in load_rows():
        if re.search(arguments.only, row.id):
            planned = plan(row)
            verdict = "" if row.agrees(planned) else f"  {row.miss or 'DIFFERS, AND NO REASON IS GIVEN'}"
            moved |= planned != row.planned or row.agrees(planned) == bool(row.miss)
            print(f"{row.id:32} {row.holds:8} {row.published:>8}  {shown(planned):>8}  {FIGURES[row.figure][0]}{verdict}")
            row = replace(row, planned=planned)
        rows.append(row)
    if arguments.write:
        ROWS.write_text("".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows))
    return int(moved and not arguments.write)


if __name__ == "__main__":
    raise SystemExit(main())
