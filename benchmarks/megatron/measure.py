"""Measures the cases: ``python -m benchmarks.megatron.measure ROWS.jsonl [--two-gpus] [--only RE] [--tiny]``.

Needs ``megatron-core`` 0.16.1 and a GPU; neither Apex nor TransformerEngine. Model, buffers, optimizer and schedules are
Megatron-Core's own. Stand-ins, each with the tensors of what it stands for: torch's norms for Apex's, which alone take
sequence parallelism, and torch's fused AdamW for TransformerEngine's. On one GPU the other ranks are those of torch's fake
process group, whose collectives return at once.

``--tiny`` shrinks the models, so that the program can be tried on a CPU, without figures.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.forked import failure, run_ranks
from benchmarks.megatron.cases import CASES, TWO_GPUS, Case

SECONDS = 180.0


def main() -> None:
    """Measure, and write a row a case. Rows of cases that failed are replaced."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--two-gpus", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    kept = [line for line in asked.rows.read_text().splitlines() if json.loads(line)["ok"]] if asked.rows.exists() else []
    asked.rows.write_text("".join(f"{line}\n" for line in kept))
    done = {json.loads(line)["id"] for line in kept}
    for case in TWO_GPUS if asked.two_gpus else CASES:
        if case.id in done or not re.search(asked.only, case.id):
            continue
        began = time.monotonic()
        tried = _tiny(case) if asked.tiny else case
        ranks = case.ranks if asked.two_gpus else 1
        found = run_ranks(partial(measure, tried, fake=not asked.two_gpus), ranks, timeout=SECONDS)
        fault = failure(found)
        row: dict[str, Any] = {"id": case.id, "ok": fault is None, "seconds": round(time.monotonic() - began, 1)}
        row |= {"fault": fault} if fault else _row([answer["value"] for answer in found])
        with asked.rows.open("a") as out:
            out.write(json.dumps(row) + "\n")
        print(case.id, f"{row['seconds']} s", fault or _shown(row), flush=True)


def _row(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The measured rank's figures; on real ranks those of the one that needs the most, and of each."""
    most = max(found, key=lambda rank: rank["allocated"])
    each = [{name: rank[name] for name in ("allocated", "reserved", "total")} for rank in found]
    return most | ({"per_rank": each} if len(found) > 1 else {})


def _shown(row: dict[str, Any]) -> str:
    return " ".join(f"{name} {row[name] / 2**20:.1f}" for name in ("allocated", "reserved", "total"))


def _tiny(case: Case) -> Case:
    small = {"hidden_size": 128, "ffn_hidden_size": 256, "vocab_size": 512}
    return replace(case, model=case.model | small, seq_len=64)


def measure(case: Case, rank: int, *, fake: bool) -> dict[str, Any]:
    """Run a case on one of its ranks. Megatron-Core is imported here: its import asks for GPUs, after which no fork has one."""
    from benchmarks.megatron.run import run_case

    return run_case(case, rank, fake=fake)


if __name__ == "__main__":
    main()
