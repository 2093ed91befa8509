"""Predicted against measured step times, on every measured row: ``python -m benchmarks.recommend.speeds [--fit]``.

Writes ``benchmarks/results/speeds.json``. ``counts.json`` holds what the rows' tapes count (kernels, bytes, modules), so that
nothing is traced here unless a row is new. ``--fit`` prints the host's rates that fit all rows together best: coordinate
descent on the mean of |log(predicted / measured)|, cut at 0.5, so that no row that met a busy host decides. The rates in
core/rates.py are its result; several runs shared a host when the rows were taken, so speeds are rough.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.rows import EXTRA, MEASURED, load_rows, request_of
from zeroplan.core.rates import rates_of
from zeroplan.engines.base import Case
from zeroplan.ledger.work import Counts, count_stream
from zeroplan.planner.request import resolve
from zeroplan.planner.tapes import NoTapeError, stream_of
from zeroplan.search.cost import CostModel

HERE = Path(__file__).resolve().parent
COUNTS = HERE / "counts.json"
RESULT = HERE.parent / "results" / "speeds.json"
FITTED = ("launch_us", "gradient_hook_us", "gather_hook_us", "release_hook_us", "unit_hook_us")
_STEPS = (0.8, 0.9, 0.95, 1.05, 1.1, 1.25)
_CUT = 0.5

Prepared = tuple[dict[str, Any], Case, str, Counts]


def prepared(rows: Sequence[dict[str, Any]]) -> list[Prepared]:
    """Rows with their case, engine and counts; those that are not full models or recorded a history are left out."""
    known: dict[str, Any] = json.loads(COUNTS.read_text()) if COUNTS.exists() else {}
    found, new = [], False
    for row in rows:
        if row.get("model_overrides") or row.get("history_events"):
            continue
        resolved = resolve(request_of(row))
        case = resolved.cases[0]
        work = case.workload
        key = f"{row['model']} {work.micro_batch}x{work.seq_len} {resolved.engine.trace_options(case).key} r{work.lora_rank}"
        if key not in known:
            try:
                known[key] = asdict(count_stream(stream_of(resolved.engine, case)))
            except NoTapeError as error:
                print(f"{row['id']}: {error}")
                continue
            new = True
        found.append((row, case, resolved.engine.name, Counts(**known[key])))
    if new:
        COUNTS.write_text(json.dumps(dict(sorted(known.items())), indent=0) + "\n")
    return found


def predictions(rows: Sequence[Prepared], **rates: float) -> list[tuple[float, float]]:
    """(predicted, measured) seconds of each row's step."""
    pairs = []
    for row, case, engine, counts in rows:
        cost = CostModel(engine, case.spec, case.cluster, replace(rates_of(case.cluster.gpu), **rates))
        pairs.append((cost.step_time(case.workload, case.zero, counts).total, row["step_seconds"]))
    return pairs


def kendall(pairs: Sequence[tuple[float, float]]) -> float:
    """τ: pairs ordered alike less pairs ordered otherwise, over both."""
    alike = other = 0
    for (a, b), (c, d) in itertools.combinations(pairs, 2):
        product = (a - c) * (b - d)
        alike += product > 0
        other += product < 0
    return (alike - other) / (alike + other)


def within(pairs: Sequence[tuple[float, float]], share: float) -> float:
    """The part of the rows whose prediction is off by less than `share`."""
    return sum(abs(predicted / measured - 1) < share for predicted, measured in pairs) / len(pairs)


def fit(rows: Sequence[Prepared]) -> dict[str, float]:
    """The host's rates by coordinate descent."""

    def loss(rates: dict[str, float]) -> float:
        pairs = predictions(rows, **rates)
        return sum(min(abs(math.log(p / m)), _CUT) for p, m in pairs) / len(pairs)

    start = rates_of(rows[0][1].cluster.gpu)
    rates = {name: float(getattr(start, name)) for name in FITTED}
    best = loss(rates)
    for _ in range(4):
        for name, factor in itertools.product(FITTED, _STEPS):
            tried = rates | {name: rates[name] * factor}
            value = loss(tried)
            if value < best - 1e-4:
                best, rates = value, tried
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true")
    rows = prepared(load_rows(MEASURED, EXTRA))
    if parser.parse_args().fit:
        print(json.dumps(fit(rows), indent=2))
        return
    pairs = predictions(rows)
    table = [
        {
            "id": row["id"],
            "engine": engine,
            "model": row["model"],
            "world": row["world"],
            "stage": row["stage"],
            "measured": round(measured, 4),
            "predicted": round(predicted, 4),
            "off": round(predicted / measured - 1, 3),
        }
        for (row, _, engine, _), (predicted, measured) in zip(rows, pairs, strict=True)
    ]
    summary = {
        "rows": len(pairs),
        "kendall_tau": round(kendall(pairs), 3),
        "within_15_percent": round(within(pairs, 0.15), 3),
        "within_25_percent": round(within(pairs, 0.25), 3),
    }
    RESULT.write_text(json.dumps({**summary, "table": sorted(table, key=lambda r: r["off"])}, indent=1) + "\n")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
