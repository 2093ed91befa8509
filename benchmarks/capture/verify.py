"""Measures each program of programs.json under ``zeroplan verify``'s recorder on real GPUs, alone and at its least memory.

``python -m benchmarks.capture.verify WORK OUT.jsonl PREDICTED.jsonl [--cards 2] [--at-once 4] [--only NAME …]``, in the
workplace that prepare.py --weights has made. First every program runs with a card to itself: allocated, reserved, what NVML
counts, and the peak of each part of the script. Then each whose prediction says that it fits runs again where torch's allocator
may reserve no more than the prediction leaves it on the smallest card (``limit``): none may run out of memory. Last, two go
through ``zeroplan verify -- COMMAND`` itself, capture included.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.capture.compare import rows as last_rows
from benchmarks.capture.measure import OFFLINE
from benchmarks.capture.predict import steps_of
from zeroplan.capturing.measuring import measure_command
from zeroplan.validate.rank.probe import Nvml

HERE = Path(__file__).resolve().parent
#: Run by the verb itself, too: one that trains by hand, one by a Trainer.
BY_VERB = ("nanogpt-char", "run-glue")


def environment(program: dict[str, Any], caches: Path, card: str) -> dict[str, str]:
    """The variables of a program's process."""
    return {
        **os.environ, **OFFLINE, "HF_HOME": str(caches / f"hf-{program['name']}"), "CUDA_VISIBLE_DEVICES": card,
        "PATH": os.pathsep.join((str(caches / "bin"), os.environ["PATH"])),
    }  # fmt: skip


def measured(program: dict[str, Any], work: Path, caches: Path, card: str, *, limit: int, alone: bool) -> dict[str, Any]:
    """Run one program; returns its figures as a row."""
    began = time.time()
    used: Callable[[], int | None] = Nvml(int(card)).used if alone else lambda: None
    words = ["sh", "-c", f"cd {shlex.quote(str(work / program['cwd']))} && exec env {program['command']}"]
    steps = steps_of(program)
    found = measure_command(words, used, steps=steps, seconds=200, limit=limit, environment=environment(program, caches, card))
    return {"name": program["name"], "limit": limit, "alone": alone, "wall": round(time.time() - began, 1), **asdict(found)}


def history(program: dict[str, Any], work: Path, caches: Path, path: Path) -> None:
    """Run one program once more, and keep what was alive at its peak, by lines of code."""
    more = {
        "CAPTURE_HISTORY": str(path.resolve()),
        "PYTHONPATH": os.pathsep.join((str(HERE / "startup"), os.environ.get("PYTHONPATH", ""))),
    }
    words = ["sh", "-c", f"cd {shlex.quote(str(work / program['cwd']))} && exec env {program['command']}"]
    found = environment(program, caches, "0") | more
    measure_command(words, lambda: None, steps=steps_of(program), seconds=120, environment=found)


def by_verb(program: dict[str, Any], work: Path, caches: Path) -> dict[str, Any]:
    """Run one program by the verb; returns what it prints as JSON."""
    words = [sys.executable, "-m", "zeroplan", "verify", "--json", "--steps", str(steps_of(program)), "--"]
    found = {
        **environment(program, caches, "0"),
        "PYTHONPATH": os.pathsep.join((str(HERE.parents[1]), os.environ.get("PYTHONPATH", ""))),
    }
    done = subprocess.run(
        [*words, *shlex.split(program["command"])], cwd=work / program["cwd"], env=found, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        return {"name": program["name"], "verb": done.returncode, "tail": done.stderr.splitlines()[-8:]}
    gpu = answer["plan"]["gpu"]
    planned = {name: gpu[name] for name in ("peak_allocated", "peak_reserved", "total", "phases")}
    return {"name": program["name"], "verb": done.returncode, "planned": planned, "measured": answer["measured"]}


def main() -> None:
    """Run all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("predicted", type=Path)
    parser.add_argument("--cards", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=4, help="programs on a card at their least memory")
    parser.add_argument("--until", type=float, default=520, help="seconds after which no program is started")
    parser.add_argument("--history", nargs="*", default=[], help="programs of which what is alive at the peak is kept, too")
    parser.add_argument("--only", nargs="*", default=[])
    asked = parser.parse_args()
    began, work = time.time(), asked.work.resolve()
    caches = work / "measured"
    (caches / "bin").mkdir(parents=True, exist_ok=True)
    link = caches / "bin" / "python"
    if not link.exists():  # the commands say python, whatever this machine calls it
        link.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        link.chmod(0o755)
    predicted = last_rows(str(asked.predicted))
    programs = json.loads((HERE / "programs.json").read_text())["programs"]
    chosen = [one for one in programs if one["gpu"] and (not asked.only or one["name"] in asked.only)]
    chosen.sort(key=lambda one: one["name"] not in predicted)
    with asked.out.open("a") as file:

        def keep(row: dict[str, Any]) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(
                *(row.get(key) for key in ("name", "limit", "code", "allocated", "reserved", "total", "wall", "verb")),
                flush=True,
            )

        def all_of(todo: Sequence[tuple[dict[str, Any], int]], at_once: int) -> None:
            cards: queue.Queue[str] = queue.Queue()
            for n in range(asked.cards * at_once):
                cards.put(str(n % asked.cards))

            def run(one: tuple[dict[str, Any], int]) -> None:
                if time.time() - began > asked.until:
                    return
                card = cards.get()
                try:
                    keep(measured(one[0], work, caches, card, limit=one[1], alone=at_once == 1))
                except Exception as error:  # the others still count
                    keep({"name": one[0]["name"], "limit": one[1], "error": f"{type(error).__name__}: {error}"})
                finally:
                    cards.put(card)

            with ThreadPoolExecutor(asked.cards * at_once) as pool:
                list(pool.map(run, todo))

        all_of([(one, 0) for one in chosen], 1)
        fitting = [one for one in chosen if predicted.get(one["name"], {}).get("fits")]
        all_of([(one, predicted[one["name"]]["limit"]) for one in fitting], asked.at_once)
        for one in chosen:
            if one["name"] in BY_VERB and time.time() - began < asked.until:
                keep(by_verb(one, work, caches))
        for one in chosen:
            if one["name"] in asked.history and time.time() - began < asked.until:
                history(one, work, caches, asked.out.with_suffix(".history.jsonl"))


if __name__ == "__main__":
    main()
