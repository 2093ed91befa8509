"""What ``zeroplan estimate --from`` says of every case, and how far from it the measured runs are.

``python -m benchmarks.from_files.predict [RESULTS.jsonl]`` writes ``results/from_files/predicted.json``; with the rows that
``run`` wrote it leaves that file alone and prints a table.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.from_files.cases import Case, all_cases

FILE = Path(__file__).resolve().parents[1] / "results" / "from_files" / "predicted.json"
_GIB = 1 << 30


def main(arguments: list[str]) -> int:
    """Write the predictions, or compare them with results."""
    if arguments:
        print(table(read(Path(arguments[0]))))
        return 0
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(json.dumps({"cases": {case.id: predict(case) for case in all_cases()}}, indent=1) + "\n")
    return 0


def predict(case: Case) -> dict[str, Any]:
    """Return the figures of the one plan that the case's files and nothing else ask for, bytes of the fullest GPU."""
    said = estimate(*(f"--from={path}" for path in case.files), "--gpu=H200", f"--gpus={case.gpus}")
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
    """Write one line a case: each figure as measured, and by how many percent the prediction is above it."""
    predicted = json.loads(FILE.read_text())["cases"]
    lines = [
        f"| {'case':24} | allocated GiB | predicted | reserved GiB | predicted | device GiB | predicted | fits |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in sorted(measured.items()):
        plan = predicted[name]
        if "error" in row:
            lines.append(f"| {name:24} | {row['error'][:60]} |")
            continue
        pairs = (("peak_allocated", "peak_allocated"), ("peak_reserved", "peak_reserved"), ("nvml_process", "total"))
        cells = [
            f"{row[ours] / _GIB:.3f} | {100 * (plan[theirs] / row[ours] - 1):+.2f} %" for ours, theirs in pairs if row[ours]
        ]
        lines.append(f"| {name:24} | {' | '.join(cells)} | {plan['fits']} |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
