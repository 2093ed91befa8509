"""The error of the predictions against the measured runs: every row, by phase, and the summary against the targets.

    python -m benchmarks.accuracy [--ids a1,D04] [--only FILE] [--json FILE]

Each row becomes the request that a user would have made (benchmarks/rows.py) and is predicted at simulated depth. Nothing
is taken from the row but what was asked for, except, for the marks, how many steps it ran and how many of them fp16's loss
scale discarded, which the data decide. Errors are predicted / measured − 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.rows import PLANNED, load_rows, request_of
from zeroplan.core.plan import MemoryPlan
from zeroplan.engines.deepspeed.job import rank_of
from zeroplan.engines.deepspeed.schedule import record_deepspeed
from zeroplan.planner.estimate import estimate_runs
from zeroplan.planner.resolve import resolve
from zeroplan.planner.simulated import Simulated
from zeroplan.run.ask import Ask
from zeroplan.simulate.allocator.config import AllocatorConfig
from zeroplan.simulate.recorder import simulate
from zeroplan.simulate.timeline import TimelineMark

#: Rows that were measured when their predictions already stood. What those were is kept in results/blind.json.
BLIND = ("F", "I", "K", "Y", "W", "U")
RESULT = Path(__file__).resolve().parent / "results" / "accuracy.json"
#: Figure: (what it is, largest median, largest at 95 % of rows, largest of all); None where no target is set.
TARGETS: dict[str, tuple[str, float | None, float | None, float | None]] = {
    "peak_allocated": ("peak allocated", 0.002, 0.01, 0.025),
    "peak_reserved": ("peak reserved", 0.02, None, 0.08),
    "nvml": ("NVML", 0.02, None, 0.08),
    "host_rss": ("host RSS", 0.05, None, None),
    "save": ("peak of a save", 0.002, 0.01, 0.025),
}
#: The worst peak allocated of rows that offload parameters, whose use varies from step to step.
PARAM_OFFLOAD_WORST = 0.05
MARK_TOLERANCE, MARK_SHARE = 0.01, 0.9


@dataclass(slots=True)
class RowResult:
    """One row: errors by figure, and of the marks' allocated bytes."""

    id: str
    what: str
    peak_allocated: float
    peak_reserved: float
    nvml: float | None
    host_rss: float | None
    save: float | None  # of the peak between two steps while the run was saved
    marks: list[float]
    offloads_param: bool
    seconds: float


def marks_of(request: Ask, run: Simulated, row: dict[str, Any]) -> Sequence[TimelineMark]:
    """Return the predicted marks of rank 0, which measured rows show, over as many steps as the row ran."""
    if row["engine"] != "deepspeed":
        return run.simulation.timeline.marks
    case = resolve(request).cases[0]
    steps = sum(mark["at"].startswith("step") for mark in row["marks"])
    rank = rank_of(case, run.tape.parameters)
    recorder = record_deepspeed(rank, run.tape, steps=steps, skipped_steps=skipped_steps(row))
    return simulate(recorder, AllocatorConfig.parse(request.alloc_conf), device_memory=rank.device_memory).marks


def skipped_steps(row: dict[str, Any]) -> int:
    """Count the leading steps that the loss scale discarded: those that end before the optimizer's states exist."""
    if row["dtype"] != "fp16":
        return 0
    after = [mark["alloc"] for mark in row["marks"] if mark["at"].startswith("step")]
    return next((i for i, allocated in enumerate(after) if allocated > 0.9 * max(after)), len(after))


def mark_errors(predicted: Sequence[TimelineMark], row: dict[str, Any]) -> list[float]:
    """Errors of allocated at each ``fwd``, ``bwd`` and ``step`` mark; a step beyond those predicted is held to the last."""
    by_step = split_steps((mark.name, mark.allocated) for mark in predicted)
    errors = []
    for step, measured in enumerate(split_steps((mark["at"], mark["alloc"]) for mark in row["marks"])):
        expected = by_step[min(step, len(by_step) - 1)]
        errors += [expected[name] / allocated - 1 for name, allocated in measured.items() if name in expected and allocated]
    return errors


def split_steps(marks: Iterable[tuple[str, int]]) -> list[dict[str, int]]:
    """Return the allocated bytes by mark (``fwd``, ``bwd``, ``step``), one dict a step; marks within an accumulation window
    left out.
    """
    steps: list[dict[str, int]] = []
    current: dict[str, int] = {}
    windows = 0
    for name, allocated in marks:
        if name in ("model", "init"):
            continue
        if name.startswith("step"):
            steps.append({"step": allocated} if windows > 1 else {**current, "step": allocated})
            current, windows = {}, 0
            continue
        windows += name == "fwd"
        current[name] = allocated
    return steps


def measure_row(row: dict[str, Any]) -> RowResult:
    """Predict one row and compare."""
    started = time.perf_counter()
    request = request_of(row, depth="simulated")
    (run,) = estimate_runs(request).runs
    assert run is not None
    seconds = time.perf_counter() - started
    plan = run.plan
    nvml, rss = row.get("nvml_used"), row.get("host_rss_peak_all_ranks")
    shared = row.get("shared_gpu", False)
    sharding = f"stage {row['stage']}" if row["engine"] == "deepspeed" else row["engine"]
    return RowResult(
        id=row["id"],
        what=f"{row['model'].split('/')[-1]} {sharding} ×{row['world']}",
        peak_allocated=_error(plan.gpu.peak_allocated, row["peak_allocated"]),
        peak_reserved=_error(plan.gpu.peak_reserved, row["peak_reserved"]),
        nvml=None if not nvml or shared else _error(plan.gpu.total, nvml),
        host_rss=None if not rss else _error(plan.cpu.per_node, rss),
        save=save_error(plan, row),
        marks=mark_errors(marks_of(request, run, row), row),
        offloads_param="offload_param" in (row.get("zero_overrides") or {}),
        seconds=seconds,
    )


def save_error(plan: MemoryPlan, row: dict[str, Any]) -> float | None:
    """Return the error of the peak from a step's end to the end of a save; None where nothing was saved."""
    saved = plan.gpu.phases.get("save")
    for mark in row["marks"]:
        if mark["at"] == "save" and saved is not None:
            return _error(max(saved, plan.gpu.live_after_step), int(mark["peak"]))
    return None


def _error(predicted: int | None, measured: int) -> float:
    assert predicted is not None
    return predicted / measured - 1


def summary(results: Sequence[RowResult]) -> dict[str, Any]:
    """Return the median, 95th percentile and worst of each figure's absolute errors, and the share of marks within the
    tolerance.
    """
    out: dict[str, Any] = {"rows": len(results)}
    for name in TARGETS:
        errors = sorted(abs(error) for r in results if (error := getattr(r, name)) is not None)
        if errors:
            at95 = errors[max(0, -(-95 * len(errors) // 100) - 1)]
            out[name] = {"rows": len(errors), "median": statistics.median(errors), "p95": at95, "worst": errors[-1]}
    marks = [abs(error) for r in results for error in r.marks]
    within = sum(error <= MARK_TOLERANCE for error in marks) / max(1, len(marks))
    out["marks"] = {"marks": len(marks), "within": within, "tolerance": MARK_TOLERANCE}
    return out


def misses(results: Sequence[RowResult], found: dict[str, Any]) -> list[str]:
    """The targets that are not met, in words."""
    out = []
    for name, (what, median, at95, worst) in TARGETS.items():
        got = found.get(name)
        if got is None:
            continue
        for key, most in (("median", median), ("p95", at95), ("worst", worst)):
            if most is not None and got[key] > most and not (name == "peak_allocated" and key == "worst"):
                out.append(f"{what}: {key} {got[key]:.2%} > {most:.2%}")
    for r in results:
        most = PARAM_OFFLOAD_WORST if r.offloads_param else TARGETS["peak_allocated"][3]
        if most is not None and abs(r.peak_allocated) > most:
            out.append(f"peak allocated: {r.id} {r.peak_allocated:+.2%}")
    if found["marks"]["within"] < MARK_SHARE:
        out.append(f"marks: {found['marks']['within']:.1%} within {MARK_TOLERANCE:.0%} < {MARK_SHARE:.0%}")
    return out


def main() -> int:
    """Run the benchmark; 0 when every target is met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ids", default="", help="rows to run, by comma")
    parser.add_argument("--only", choices=[path.stem for path in PLANNED], help="one file of rows")
    parser.add_argument("--json", type=Path, default=None, help=f"where to write (all rows: {RESULT.name})")
    args = parser.parse_args()
    ids = set(filter(None, args.ids.split(",")))
    paths = [path for path in PLANNED if args.only is None or path.stem == args.only]
    results, refused = [], []
    print(f"{'row':6} {'what':34} {'allocated':>10} {'reserved':>10} {'NVML':>8} {'RSS':>8} {'marks':>9} {'s':>6}")
    for row in load_rows(*paths):
        if ids and row["id"] not in ids:
            continue
        try:
            result = measure_row(row)
        except Exception as error:  # a row that cannot be predicted is a result, and must not hide the others
            refused.append({"id": row["id"], "why": f"{type(error).__name__}: {error}"})
            print(f"{row['id']:6} not predicted: {type(error).__name__}: {error}")
            continue
        results.append(result)
        good = sum(abs(error) <= MARK_TOLERANCE for error in result.marks)
        print(
            f"{result.id:6} {result.what:34} {result.peak_allocated:+10.3%} {result.peak_reserved:+10.2%} "
            f"{_percent(result.nvml):>8} {_percent(result.host_rss):>8} {good:>4}/{len(result.marks):<4} {result.seconds:6.2f}",
            flush=True,
        )
    if not results:
        return 1
    found = summary(results)
    print_summary(found)
    blind = [result for result in results if result.id.startswith(BLIND)]
    if 0 < len(blind) < len(results):
        print("Of these, the rows that were predicted before they were measured, as predicted now:")
        print_summary(summary(blind))
    missed = misses(results, found)
    for line in missed:
        print("MISSED", line)
    path = args.json or (None if ids or args.only else RESULT)
    if path is not None:
        rows = [asdict(result) for result in results]
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"summary": found, "missed": missed, "refused": refused, "rows": rows}, indent=1) + "\n")
    return 1 if missed or refused else 0


def _percent(error: float | None) -> str:
    return "-" if error is None else f"{error:+.2%}"


def print_summary(found: dict[str, Any]) -> None:
    """Print the summary as a table."""
    for name, (what, *_) in TARGETS.items():
        got = found.get(name)
        if got:
            print(
                f"{what:15} median {got['median']:.3%}  95 % {got['p95']:.3%}  worst {got['worst']:.3%}  ({got['rows']} rows)"
            )
    marks = found["marks"]
    print(f"{'marks':15} {marks['within']:.1%} of {marks['marks']} within {marks['tolerance']:.0%}")


if __name__ == "__main__":
    sys.exit(main())
