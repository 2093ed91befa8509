"""Predictions of ``zeroplan estimate --from`` for every case, and how far from them the measured runs are.

``python -m benchmarks.from_files.predict`` writes ``results/from_files/now.json``; with the rows that ``run`` wrote it prints
the table. ``predicted.json`` beside it is what was said before any case had run, and stays.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.from_files.cases import Case, all_cases

FOLDER = Path(__file__).resolve().parents[1] / "results" / "from_files"
#: What was said before any case had run, and what is said now.
BLIND, NOW = FOLDER / "predicted.json", FOLDER / "now.json"
_GIB = 1 << 30


def main(arguments: list[str]) -> int:
    """Write the predictions, or compare them with results."""
    if arguments:
        print(table(read(Path(arguments[0]))))
        return 0
    NOW.write_text(json.dumps({"cases": {case.id: predict(case) for case in all_cases()}}, indent=1) + "\n")
    return 0


def predict(case: Case) -> dict[str, Any]:
    """Return the figures of the one plan that the case's command and its files ask for, bytes of the fullest GPU."""
    said = estimate(f"--from={case.folder / 'run.sh'}", "--gpu=H200", f"--gpus={case.gpus}")
    if len(said["plans"]) != 1:
        raise RuntimeError(f"{case.id}: {len(said['plans'])} plans")
    (plan,) = said["plans"]
    figures = {key: plan["gpu"][key] for key in ("peak_allocated", "peak_reserved", "total", "peak_phase")}
    return figures | {
        "fits": plan["fits"],
        "engine": plan["engine"],
        "stage": plan["stage"],
        "unmodelled": [f"{one['key']}: {one['effect']}" for one in plan["unmodelled"]],
        "says": said["setup"]["says"].replace(f"{case.folder}/", ""),
    }


def estimate(*flags: str) -> dict[str, Any]:
    """Return the JSON that the command prints.

    Raises:
        RuntimeError: with the command's own line, when it refuses the files.
    """
    done = subprocess.run(
        [sys.executable, "-m", "zeroplan", "estimate", *flags, "--json"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    return dict(json.loads(done.stdout))


def read(results: Path) -> dict[str, dict[str, Any]]:
    """Read each case's ranks' largest figures; a case with an error keeps that alone."""
    cases: dict[str, dict[str, Any]] = {}
    for line in results.read_text().splitlines():
        row = json.loads(line)
        one = cases.setdefault(row["case"], {})
        if row["error"]:
            one["error"] = row["error"]
            continue
        for key in ("peak_allocated", "peak_reserved", "nvml_process", "host_rss_peak"):
            one[key] = max(one.get(key) or 0, row[key] or 0)
    return cases


def table(measured: dict[str, dict[str, Any]]) -> str:
    """Write one line a case: what was measured, and by how many percent predictions are above it, before the runs and now."""
    blind, now = (json.loads(path.read_text())["cases"] for path in (BLIND, NOW))
    lines = [
        "| case | allocated GiB | predicted | now | reserved GiB | predicted | now | total GiB | predicted | now | fits now |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in sorted(measured.items()):
        if "error" in row:
            lines.append(f"| {name} | {row['error'][:60]} |")
            continue
        cells = [name]
        for key, shown in (("peak_allocated", "peak_allocated"), ("peak_reserved", "peak_reserved"), ("total", "nvml_process")):
            cells.append(f"{row[shown] / _GIB:.3f}")
            cells += [f"{100 * (said[name][key] / row[shown] - 1):+.2f} %" for said in (blind, now)]
        fits = {True: "yes", False: "no", None: "unknown"}[now[name]["fits"]]
        lines.append(f"| {' | '.join(cells)} | {fits} |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
