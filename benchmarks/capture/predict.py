"""Captures the programs of programs.json on this machine's CPU, and writes what each would take on an H100.

``python benchmarks/capture/predict.py WORK OUT.jsonl [--only NAME …]``, in the workplace that prepare.py has made (without
--weights). Each line has the command, the peaks in bytes, the verdict, and where the program stopped, if it did.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
#: Programs that go through several epochs of a few steps each, all of them captured.
STEPS = {"accelerate-nlp": 9, "accelerate-accumulation": 9}


def row(name: str, command: str, steps: int, report: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of one answer, its verdict and what stopped the script, as a row of predicted.jsonl."""
    plan = report["plans"][0]
    gpu, capture = plan["gpu"], plan["capture"]
    names = ("peak_allocated", "peak_reserved", "total", "peak_phase", "phases")
    left_out = [f"{one['key']}: {one['says']}" for one in plan["unmodelled"]]
    figures = {key: gpu[key] for key in names}
    limit = gpu["interval"][1] - gpu["outside_torch"]  # what the smallest card on which it fits leaves to torch's allocator
    return {"name": name, "command": command, "asked_steps": steps, "steps": capture["steps"], **figures, "limit": limit,
            "fits": plan["fits"], "stopped": capture["stopped"], "left_out": left_out}  # fmt: skip


def steps_of(program: dict[str, Any]) -> int:
    """Optimizer steps, after which a program's loops end."""
    return int(program.get("steps") or STEPS.get(program["name"], 3))


def predict(program: dict[str, Any], work: Path) -> dict[str, Any]:
    """Capture one program."""
    steps = steps_of(program)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "capture.json"
        words = [sys.executable, "-m", "zeroplan", "capture", "--gpu", "H100", "--steps", str(steps), "-o", str(out), "--"]
        environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
        done = subprocess.run(
            [*words, *shlex.split(program["command"])], cwd=work / program["cwd"], env=environment, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        if not out.is_file():
            return {"name": program["name"], "command": program["command"], "refused": done.stderr.splitlines()[-1]}
        return row(program["name"], program["command"], steps, json.loads(out.read_text()))


def main() -> None:
    """Capture all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--programs", default="programs.json")
    asked = parser.parse_args()
    programs = json.loads((HERE / asked.programs).read_text())["programs"]
    with asked.out.open("a") as file:
        for program in programs:
            if not asked.only or program["name"] in asked.only:
                file.write(json.dumps(predict(program, asked.work.resolve())) + "\n")
                file.flush()


if __name__ == "__main__":
    main()
