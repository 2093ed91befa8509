"""Measures the cases of a grid, and writes a row each."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.forked import failure, run_ranks

FIGURES = ("allocated", "reserved", "total", "owned")


def measure_cases(
    says: str,
    cases: Sequence[Any],
    on_two_gpus: Sequence[Any],
    measure: Callable[..., dict[str, Any]],
    *,
    tiny: Callable[[Any], Any],
    seconds: float,
    by_place: bool = False,
) -> None:
    """Measure the cases that the command line asks for, and write a row a case. Rows of cases that failed are replaced.

    Args:
        says: what the program does, for its help.
        cases: those of one GPU among fake ranks.
        on_two_gpus: those whose ranks are all real.
        measure: ``measure(case, rank, fake=…)`` runs a case on one of its ranks, in a process of its own; with
            ``histories=FOLDER`` where the command line asks for them.
        tiny: returns a case that a CPU can try.
        seconds: a case's limit.
        by_place: whether a row holds its case, and the figures of the rank at the case's place; else those of the rank that
            allocates the most.
    """
    parser = argparse.ArgumentParser(description=says.splitlines()[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--two-gpus", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--histories", type=Path, help="where the recorded events of each rank's allocator go")
    asked = parser.parse_args()
    told = {} if asked.histories is None else {"histories": asked.histories}
    kept = [line for line in asked.rows.read_text().splitlines() if json.loads(line)["ok"]] if asked.rows.exists() else []
    asked.rows.write_text("".join(f"{line}\n" for line in kept))
    done = {json.loads(line)["id"] for line in kept}
    for case in on_two_gpus if asked.two_gpus else cases:
        if case.id in done or not re.search(asked.only, case.id):
            continue
        began = time.monotonic()
        tried = tiny(case) if asked.tiny else case
        found = run_ranks(
            partial(measure, tried, fake=not asked.two_gpus, **told), case.ranks if asked.two_gpus else 1, timeout=seconds
        )
        fault = failure(found)
        row: dict[str, Any] = {"id": case.id} | ({"case": case.to_dict()} if by_place else {})
        row |= {"ok": fault is None, "seconds": round(time.monotonic() - began, 1)}
        row |= {"fault": fault} if fault else _row([answer["value"] for answer in found], case.place if by_place else None)
        with asked.rows.open("a") as out:
            out.write(json.dumps(row) + "\n")
        shown = " ".join(f"{name} {row[name] / 2**20:.1f}" for name in FIGURES if name in row)
        print(case.id, f"{row['seconds']} s", fault or shown, flush=True)


def _row(found: list[dict[str, Any]], place: int | None) -> dict[str, Any]:
    """Return the measured rank's figures, and on real ranks those of each."""
    if len(found) == 1:
        return found[0]
    each = [{name: rank[name] for name in FIGURES if name in rank} for rank in found]
    most = max(found, key=lambda rank: rank["allocated"]) if place is None else found[place]
    return most | {"per_rank": each}
