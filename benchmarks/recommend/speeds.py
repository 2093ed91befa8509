"""Predicted against measured step times: ``python -m benchmarks.recommend.speeds [--fit]``.

Two kinds of runs. Those of the recommendation's grids ran alone on their host and wait for the device once, after the last
timed step. The others (benchmarks/ground_truth) left three marks a step, each of which waits for the device, and several of
them shared a host: :func:`zeroplan.search.cost.compose` knows the marks; the host's share is one factor a session of
measuring (`BUSY_HOST`) on all times of the host. Writes ``benchmarks/results/speeds.json``.

``--fit`` prints the rates that fit best: coordinate descent on the mean of |log(predicted / measured)|, cut at 0.5 so that no
row that met a busy host decides. Of each grid every second row is left out of the fit; their errors are printed beside those
of the rows that were fitted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.rows import EXTRA, GPUS, GRID, MEASURED, load_rows, request_of
from zeroplan.core.errors import BadInput
from zeroplan.core.rates import Rates, rates_of
from zeroplan.engines.case import Case
from zeroplan.engines.registry import find_engine
from zeroplan.ledger.work import Counts, count_tape
from zeroplan.planner.resolve import resolve
from zeroplan.planner.tapes import NoTapeError, expanded_tape_of
from zeroplan.search.cost import CostModel

HERE = Path(__file__).resolve().parent
COUNTS = HERE / "counts.json"
RESULT = HERE.parent / "results" / "speeds.json"
#: Host times, in µs each, which a busy host event blocks alike; and what the host's memory and cores attain.
HOST = (
    "launch_us",
    "autograd_us",
    "operation_us",
    "await_us",
    "checkpoint_us",
    "gradient_hook_us",
    "gather_hook_us",
    "release_hook_us",
    "upload_hook_us",
    "unit_hook_us",
)
MEMORY = ("cpu_adam_gbs", "dram_gbs", "fresh_gbs")
#: How much longer the host took in the rows that shared it: in the first sessions, and in the later ones.
BUSY_HOST = {"busy": 2.5, "busy_later": 1.59}
_LATER = ("F", "K")
_STEPS = (0.7, 0.85, 0.93, 0.97, 1.03, 1.07, 1.15, 1.4)
_CUT = 0.5


@dataclass(frozen=True, slots=True)
class Sample:
    """A measured row with what its prediction needs."""

    id: str
    case: Case
    engine: str
    counts: Counts
    seconds: float
    marked: bool

    @property
    def tokens(self) -> int:
        """Tokens that a step trains on."""
        work = self.case.workload
        return work.batch.micro_batch * (work.batch.seq_len or 0) * work.batch.grad_accum * self.world

    @property
    def world(self) -> int:
        """Data-parallel ranks."""
        return self.case.layout.dp


def samples(rows: Iterable[dict[str, Any]]) -> list[Sample]:
    """The rows that can be predicted; changed models and recorded histories are left out.

    ``counts.json`` holds what the rows' tapes count, so that nothing is traced here unless a row is new.
    """
    known: dict[str, Any] = json.loads(COUNTS.read_text()) if COUNTS.exists() else {}
    found, new = [], False
    for row in rows:
        if row.get("model_overrides") or row.get("history_events") or "config" in row or row["gpu"] not in GPUS:
            continue
        if row.get("retries", 0) > 1:  # a full card's allocator; its time needs the memory plan, as measure.py compares it
            continue
        try:
            resolved = resolve(request_of(row))
        except BadInput:  # an engine's option that is measured and not planned
            continue
        case = resolved.cases[0]
        work = case.workload
        options = resolved.engine.trace_options(case).key
        key = f"{row['model']} {work.batch.micro_batch}x{work.batch.seq_len} {options} r{work.lora_rank}"
        if key not in known:
            try:
                known[key] = asdict(count_tape(expanded_tape_of(resolved.engine, case)))
            except NoTapeError as error:
                print(f"{row['id']}: {error}")
                continue
            new = True
        marked = not row.get("timed_without_marks")
        found.append(Sample(row["id"], case, resolved.engine.name, Counts(**known[key]), row["step_seconds"], marked))
    if new:
        COUNTS.write_text(json.dumps(dict(sorted(known.items())), indent=0) + "\n")
    return found


def rates_for(sample: Sample, **rates: float) -> Rates:
    """Return the rates of the sample's GPU on its host; `rates` take the place of the usual ones and of :data:`BUSY_HOST`."""
    usual = rates_of(sample.case.cluster.gpu)
    base = usual.with_profile({name: rates[name] for name in rates if name not in BUSY_HOST}, usual.source)
    if not sample.marked:
        return base
    busy = (BUSY_HOST | rates)["busy_later" if sample.id.startswith(_LATER) else "busy"]
    return base.with_profile({name: getattr(base, name) * busy for name in HOST}, usual.source)


def predictions(rows: Sequence[Sample], **rates: float) -> list[tuple[float, float]]:
    """Return (predicted, measured) seconds of each row's step; `rates` as of :func:`rates_for`."""
    pairs = []
    for one in rows:
        case = one.case
        cost = CostModel(find_engine(one.engine), case.spec, case.cluster, rates_for(one, **rates))
        time = cost.step_time(case.workload, case.zero, one.counts, marked=one.marked)
        pairs.append((time.total, one.seconds))
    return pairs


def kendall(pairs: Sequence[tuple[float, float]]) -> float:
    """Return Kendall's τ: pairs ordered alike less pairs ordered otherwise, over both."""
    alike = other = 0
    for (a, b), (c, d) in itertools.combinations(pairs, 2):
        product = (a - c) * (b - d)
        alike += product > 0
        other += product < 0
    return (alike - other) / (alike + other) if alike + other else 1.0


def within(pairs: Sequence[tuple[float, float]], share: float) -> float:
    """The part of the rows whose prediction is off by less than `share`."""
    return sum(abs(predicted / measured - 1) < share for predicted, measured in pairs) / len(pairs)


def halves(clean: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Rows of the grids: those that rates are fitted to, and those held out."""
    fitted = [one for one in clean if int(one.id.rsplit("-", 1)[1]) % 2 == 0]
    return fitted, [one for one in clean if one not in fitted]


def fit(rows: Sequence[Sample], busy_rows: Sequence[Sample]) -> dict[str, float]:
    """Rates by coordinate descent; both kinds of rows weigh alike."""

    def loss(rates: dict[str, float]) -> float:
        total = 0.0
        for chosen in (rows, busy_rows):
            pairs = predictions(chosen, **rates)
            total += sum(min(abs(math.log(p / m)), _CUT) for p, m in pairs) / max(1, len(pairs))
        return total

    start = rates_of(rows[0].case.cluster.gpu)
    rates = {name: float(getattr(start, name)) for name in (*HOST, *MEMORY)} | BUSY_HOST
    best = loss(rates)
    for _ in range(6):
        before = best
        for name, factor in itertools.product(rates, _STEPS):
            tried = rates | {name: rates[name] * factor}
            value = loss(tried)
            if value < best - 1e-5:
                best, rates = value, tried
        if best > before - 1e-4:
            break
    return {name: round(value, 2) for name, value in rates.items()}


def summary_of(rows: Sequence[Sample], **rates: float) -> dict[str, Any]:
    """Return the figures of some rows."""
    pairs = predictions(rows, **rates)
    return {
        "rows": len(pairs),
        "kendall_tau": round(kendall(pairs), 3),
        "within_15_percent": round(within(pairs, 0.15), 3),
        "within_25_percent": round(within(pairs, 0.25), 3),
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true")
    arguments = parser.parse_args()
    clean = samples(load_rows(GRID))
    marked = samples(load_rows(MEASURED, EXTRA))
    fitted, held_out = halves(clean)
    groups = {"fitted": fitted, "held_out": held_out, "shared_host": marked}
    if arguments.fit:
        rates = fit(fitted, marked)
        print(json.dumps(rates, indent=1))
        print(json.dumps({name: summary_of(rows, **rates) for name, rows in groups.items() if rows}, indent=1))
        return
    table = [
        {
            "id": one.id,
            "group": name,
            "engine": one.engine,
            "model": one.case.spec.name,
            "world": one.world,
            "stage": one.case.zero.stage,
            "measured": round(measured, 4),
            "predicted": round(predicted, 4),
            "off": round(predicted / measured - 1, 3),
        }
        for name, rows in groups.items()
        for one, (predicted, measured) in zip(rows, predictions(rows), strict=True)
    ]
    summary = {name: summary_of(rows) for name, rows in groups.items() if rows}
    RESULT.write_text(json.dumps({**summary, "table": sorted(table, key=lambda r: r["off"])}, indent=1) + "\n")
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
