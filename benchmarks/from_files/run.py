"""Runs cases on the GPUs of this machine, each in fresh processes, and writes one JSON line a rank and case.

``python -m benchmarks.from_files.run FOLDER OUT [--tiny] [--seconds N] [--limit N] [--jobs N] [--cases CASE …]``: FOLDER
holds what ``prepare`` made. Cases for one GPU share it, as many at a time as their predicted figures leave room for; cases for
two GPUs share both. A case that is not started before `--seconds` are over is left out and named.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.from_files.cases import Case, all_cases

HERE = Path(__file__).resolve().parent
PREDICTED = HERE.parent / "results" / "from_files" / "now.json"
_GIB = 1 << 30
#: What a case without a figure may take, and the room beside every figure, GiB.
_UNKNOWN, _ROOM = 50.0, 6.0
_FIRST_PORT = 29_600
#: The launchers by their modules: their programs may not be on the path.
_LAUNCHERS = f"""python() {{ {sys.executable} "$@"; }}
torchrun() {{ python -m torch.distributed.run "$@"; }}
accelerate() {{ shift; python -m accelerate.commands.launch "$@"; }}
"""


@dataclass(slots=True)
class Running:
    """A case under way."""

    case: Case
    process: subprocess.Popen[bytes]
    result: Path
    started: float
    gib: float


def main() -> int:
    """Run the cases; returns 1 where one failed, ran over its limit, or was not started."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true", help="on the CPU")
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--limit", type=float, default=150, help="seconds a case may take")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--gib", type=float, default=130, help="of one GPU")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--cases", nargs="*", default=[])
    asked = parser.parse_args()
    chosen = [case for case in all_cases() if (case.id in asked.cases if asked.cases else case.gpus == asked.gpus)]
    chosen.sort(key=lambda case: -needs(case))
    deadline = time.monotonic() + asked.seconds
    running: list[Running] = []
    bad: list[str] = []
    index = 0
    while chosen or running:
        free = asked.gib - sum(one.gib for one in running)
        room = len(running) < asked.jobs
        following = next((case for case in chosen if needs(case) <= free), None) if room else None
        if following is None and not running and chosen:
            following = chosen[0]
        if time.monotonic() > deadline:
            bad += [f"{case.id}: not started" for case in chosen]
            chosen, following = [], None
        if following is not None:
            chosen.remove(following)
            running.append(start(following, asked.folder, asked.out, _FIRST_PORT + 20 * index, asked.tiny))
            index += 1
            continue
        time.sleep(0.2)
        for one in list(running):
            late = time.monotonic() - one.started > asked.limit
            if one.process.poll() is None and not late:
                continue
            if one.process.poll() is None:
                end(one.process)
            running.remove(one)
            rows = collect(one, asked.out, late)
            failed = [row["error"] for row in rows if row["error"]] or ([] if rows else ["no result"])
            print(f"{one.case.id}: {time.monotonic() - one.started:.0f} s {failed[0] if failed else 'ok'}", flush=True)
            bad += [f"{one.case.id}: {failed[0]}"] if failed else []
    print("\n".join(bad if bad else ["all ran"]))
    return int(bool(bad))


def needs(case: Case) -> float:
    """Return the GiB of each GPU that the case is given: its predicted figure with room beside it."""
    rows = json.loads(PREDICTED.read_text())["cases"] if PREDICTED.exists() else {}
    total = rows.get(case.id, {}).get("total")
    return total / _GIB * 1.1 + _ROOM if total else _UNKNOWN


def start(case: Case, folder: Path, out: Path, port: int, tiny: bool) -> Running:
    """Start the case in a folder of its own that holds its files and links to models and data."""
    place = folder / "runs" / case.id
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(case.folder, place)
    for program in ("train.py", "orpo.py", "cpo.py", "rewards.py"):
        shutil.copy(HERE / program, place)
    for name in ("meta-llama", "Qwen", "data"):
        (place / name).symlink_to((folder / name).resolve())
    if tiny:
        _on_cpu(place)
    result = place / "result.jsonl"
    script = place / "measured.sh"
    command = case.measured(HERE / "worker.py", result)
    script.write_text(_LAUNCHERS + (command.replace("--bf16 True", "--bf16 True --use_cpu True") if tiny else command))
    ports = {"MASTER_PORT": str(port), "PET_MASTER_PORT": str(port)}
    environment = os.environ | ports | ({"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"} if tiny else {})
    if not tiny and case.gpus == 1:
        environment["CUDA_VISIBLE_DEVICES"] = "0"
    out.mkdir(parents=True, exist_ok=True)
    with (out / f"{case.id}.log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-e", script.name], cwd=place, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    return Running(case, process, result, time.monotonic(), needs(case))


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a case's processes: launchers start their ranks in sessions of their own."""
    started = psutil.Process(process.pid)
    for one in (started, *started.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


def _on_cpu(place: Path) -> None:
    """Change the copies of a case's files so that the same programs run without a GPU."""
    arguments, recipe, launcher = (place / name for name in ("args.json", "recipe.yaml", "accelerate.yaml"))
    if arguments.exists():
        values = json.loads(arguments.read_text()) | {"use_cpu": True}
        values |= {"bf16": True, "fp16": False} if values.get("fp16") else {}
        arguments.write_text(json.dumps(values))
    if recipe.exists():
        recipe.write_text(recipe.read_text() + "use_cpu: true\n")
    if launcher.exists():
        launcher.write_text(launcher.read_text().replace("use_cpu: false", "use_cpu: true"))


def collect(one: Running, out: Path, late: bool) -> list[dict[str, Any]]:
    """Append the case's lines to ``results.jsonl`` and return them; a run that left none gets one that says so."""
    lines = one.result.read_text().splitlines() if one.result.exists() else []
    rows = [json.loads(line) for line in lines] or [{"error": "ran over its limit" if late else "no result"}]
    with (out / "results.jsonl").open("a") as results:
        for row in rows:
            results.write(json.dumps({"case": one.case.id} | row) + "\n")
    shutil.rmtree(one.result.parent / "out", ignore_errors=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
