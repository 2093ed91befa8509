"""Captures the scripts of sweep.json on this machine's CPU, each in a copy of its repository; checks that nothing else changed.

``python benchmarks/capture/sweep.py REPOSITORIES OUT.jsonl [--only N …]``: REPOSITORIES holds the repositories' files as
``owner+name/path``. Each command runs without a network of its own (``unshare -n``), under a trace of its connections
(``strace``), with a home and a temporary folder of its own; files of the copy, the home and that folder are listed before and
after. A row has the figures or the line that says what stopped the script, which files changed, and to which addresses it tried
to connect.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
#: A connection to another machine, in a trace.
_CONNECTION = re.compile(r"connect\(\d+, \{sa_family=AF_INET6?, [^}]*\}")


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """The size and the time of change of every file and folder."""
    found = {}
    for path in folder.rglob("*"):
        stat = path.lstat()
        found[str(path.relative_to(folder))] = (stat.st_size if path.is_file() else 0, stat.st_mtime_ns)
    return found


def capture(number: int, script: dict[str, Any], repositories: Path, seconds: float) -> dict[str, Any]:
    """Capture one script."""
    with tempfile.TemporaryDirectory(prefix="sweep-") as name:
        folder = Path(name)
        copy, home, temporary = folder / "copy", folder / "home", folder / "tmp"
        home.mkdir()
        temporary.mkdir()
        top = script["cwd"].split("/")[0] if script["cwd"] != "." else "."
        source = repositories / script["repository"].replace("/", "+")
        shutil.copytree(source / script["cwd"], copy / script["cwd"], symlinks=True)
        if top == "." or script.get("whole"):
            shutil.copytree(source, copy, symlinks=True, dirs_exist_ok=True)
        out, trace = folder / "capture.json", folder / "trace"
        words = ["unshare", "-n", "strace", "-f", "--seccomp-bpf", "-qq", "-e", "trace=connect", "-o", str(trace)]
        words += [
            sys.executable,
            "-m",
            "zeroplan",
            "capture",
            "--gpu",
            "H100",
            "--samples",
            "64,256",
            "--seconds",
            str(seconds),
        ]
        words += ["-o", str(out), "--", *shlex.split(script["command"])]
        environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "HOME": str(home), "TMPDIR": str(temporary),
                       "HF_HOME": str(home / "hf"), "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip
        before, began = (files(copy), files(home)), time.time()
        done = subprocess.run(words, cwd=copy / script["cwd"], env=environment, capture_output=True, text=True, check=False)
        wall = round(time.time() - began, 1)
        after = (files(copy), files(home))
        changed = [
            str(key) for a, b in zip(before, after, strict=True) for key in sorted(set(a) | set(b)) if a.get(key) != b.get(key)
        ]
        changed += [f"tmp/{key}" for key in files(temporary)]
        connections = sorted(set(_CONNECTION.findall(trace.read_text(errors="replace")))) if trace.is_file() else []
        row = {"number": number, **script, "wall": wall, "changed": changed, "connections": connections}
        if not out.is_file():
            return {**row, "ends": "refused", "says": (done.stderr.strip().splitlines() or ["no answer"])[-1][:400]}
        report = json.loads(out.read_text())
        plan = report["plans"][0]
        info, gpu = plan["capture"], plan["gpu"]
        figures = {key: gpu[key] for key in ("peak_allocated", "peak_reserved", "peak_phase")}
        left_out = [f"{one['key']}: {one['says'][:160]}" for one in plan["unmodelled"]]
        ends = "answer" if info["stopped"] is None and gpu["peak_allocated"] else "stopped"
        return {**row, "ends": ends, "steps": info["steps"], **figures, "verdict": plan["verdict"], "way": info["way"],
                "stopped": info["stopped"], "left_out": left_out, "invented": report["warnings"][:8]}  # fmt: skip


def main() -> None:
    """Capture all, or those of `--only`, by number from 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repositories", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--only", nargs="*", type=int, default=[])
    asked = parser.parse_args()
    scripts = json.loads((HERE / "sweep.json").read_text())["scripts"]
    with asked.out.open("a") as file:
        for number, script in enumerate(scripts, 1):
            if not asked.only or number in asked.only:
                row = capture(number, script, asked.repositories.resolve(), asked.seconds)
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(number, script["command"][:50], row["ends"], row.get("says") or row.get("stopped") or row.get("verdict"),
                      f"{row['wall']} s", row["changed"][:4], row["connections"][:2], flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
