"""Runs each program of programs.json unchanged on this machine's GPU, and writes what torch's allocator says of it.

``python benchmarks/capture/measure.py WORK OUT.jsonl [--at-once 4] [--only NAME …]``, in the workplace that prepare.py
--weights has made. Several programs share the card; each process counts its own. Nothing goes over the network.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OFFLINE = {
    "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "WANDB_MODE": "disabled",
    "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1",
}  # fmt: skip


def run(program: dict[str, Any], work: Path, seconds: float, caches: Path) -> dict[str, Any]:
    """Run one program; returns its largest process's figures, or how it failed."""
    name = program["name"]
    measured = caches / f"{name}.jsonl"
    measured.unlink(missing_ok=True)
    paths = [str(HERE / "startup"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ, **OFFLINE, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "CAPTURE_MEASURED": str(measured),
        "HF_HOME": str(caches / f"hf-{name}"), "PATH": os.pathsep.join((str(caches / "bin"), os.environ["PATH"])),
    }  # fmt: skip
    began = time.time()
    log = caches / f"{name}.log"
    with log.open("w") as file:
        try:
            done = subprocess.run(
                program["command"], shell=True, cwd=work / program["cwd"], env=environment, stdout=file, stderr=file,
                timeout=seconds, check=False,
            )  # fmt: skip
            code: int | str = done.returncode
        except subprocess.TimeoutExpired:
            code = "too long"
    rows = [json.loads(line) for line in measured.read_text().splitlines()] if measured.is_file() else []
    most: dict[str, Any] = max(rows, key=lambda row: row["allocated"], default={})
    tail = [] if code == 0 else log.read_text(errors="replace").splitlines()[-6:]
    return {"name": name, "code": code, "wall": round(time.time() - began, 1), **most, "tail": tail}


def main() -> None:
    """Run all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--programs", default="programs.json")
    asked = parser.parse_args()
    caches = asked.work / "measured"
    (caches / "bin").mkdir(parents=True, exist_ok=True)
    link = caches / "bin" / "python"
    if not link.exists():  # the commands say python, whatever this machine calls it
        link.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        link.chmod(0o755)
    programs = json.loads((HERE / asked.programs).read_text())["programs"]
    chosen = [one for one in programs if one["gpu"] and (not asked.only or one["name"] in asked.only)]
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(asked.at_once) as pool, asked.out.open("a") as file:
        for row in pool.map(lambda one: run(one, asked.work.resolve(), asked.seconds, caches.resolve()), chosen):
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(
                row["name"],
                row["code"],
                row.get("allocated"),
                row.get("reserved"),
                row["wall"],
                *row["tail"],
                sep="  ",
                flush=True,
            )


if __name__ == "__main__":
    main()
