"""Measures each program of a list under ``zeroplan verify``'s recorder on real GPUs, and at its least memory.

``python -m benchmarks.capture.verify WORK OUT.jsonl PREDICTED.jsonl [--programs LIST.json …] [--cards 0,1] [--at-once 4]
[--alone NAME …] [--done NAME …] [--only NAME …]``, in the workplace that prepare.py --weights has made. First those of
`--alone` (all, if it is not given) run with a card to themselves: allocated, reserved, what NVML counts, and the peak of each
part of the script; then the others, several to a card, without NVML. Then each whose prediction says that it fits runs again
where torch's allocator may reserve no more than the prediction leaves it on the smallest card (``limit``): none may run out of
memory. Then those of a list of two cards, one after the other. Last, some that are predicted go through
``zeroplan verify -- COMMAND`` itself, capture included.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import shlex
import shutil
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
BY_VERB = ("nanogpt-char", "run-glue", "lightning-kfold", "run-mlm")
#: The longest that one program may take.
SECONDS = 180


def environment(program: dict[str, Any], caches: Path, card: str) -> dict[str, str]:
    """The variables of a program's process."""
    return {
        **os.environ, **OFFLINE, "HF_HOME": str(caches / f"hf-{program['name']}"), "CUDA_VISIBLE_DEVICES": card,
        "PATH": os.pathsep.join((str(caches / "bin"), os.environ["PATH"])),
    }  # fmt: skip


def measured(program: dict[str, Any], work: Path, caches: Path, card: str, *, limit: int, alone: bool) -> dict[str, Any]:
    """Run one program; returns its figures as a row."""
    began = time.time()
    typed = shlex.split(program["command"])
    for word, value in itertools.pairwise(typed):  # what an earlier run has left would be taken up
        if word in ("--output_dir", "--out_dir"):
            shutil.rmtree(work / program["cwd"] / value, ignore_errors=True)
    used: Callable[[], int | None] = Nvml(int(card.split(",")[0])).used if alone else lambda: None
    words = ["sh", "-c", f"cd {shlex.quote(str(work / program['cwd']))} && exec env {program['command']}"]
    steps = steps_of(program)
    found = measure_command(
        words, used, steps=steps, seconds=SECONDS, limit=limit, environment=environment(program, caches, card)
    )
    return {"name": program["name"], "limit": limit, "alone": alone, "wall": round(time.time() - began, 1), **asdict(found)}


def history(program: dict[str, Any], work: Path, caches: Path, path: Path, card: str) -> None:
    """Run one program once more, and keep what was alive at its peak, by lines of code."""
    more = {
        "CAPTURE_HISTORY": str(path.resolve()),
        "PYTHONPATH": os.pathsep.join((str(HERE / "startup"), os.environ.get("PYTHONPATH", ""))),
    }
    words = ["sh", "-c", f"cd {shlex.quote(str(work / program['cwd']))} && exec env {program['command']}"]
    found = environment(program, caches, card) | more
    measure_command(words, lambda: None, steps=steps_of(program), seconds=120, environment=found)


def by_verb(program: dict[str, Any], work: Path, caches: Path, card: str) -> dict[str, Any]:
    """Run one program by the verb; returns what it prints as JSON."""
    words = [sys.executable, "-m", "zeroplan", "verify", "--json", "--steps", str(steps_of(program)), "--"]
    found = {
        **environment(program, caches, card),
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
    parser.add_argument("--programs", nargs="*", default=["programs.json"])
    parser.add_argument("--cards", default="0")
    parser.add_argument("--at-once", type=int, default=4, help="programs on a card")
    parser.add_argument("--alone", nargs="*", default=None)
    parser.add_argument("--done", nargs="*", default=[], help="programs that are run at their least memory alone")
    parser.add_argument("--until", type=float, default=520, help="seconds after which no program is started")
    parser.add_argument("--history", nargs="*", default=[], help="programs of which all allocations are kept, too")
    parser.add_argument("--only", nargs="*", default=[])
    asked = parser.parse_args()
    began, work, cards = time.time(), asked.work.resolve(), asked.cards.split(",")
    caches = work / "measured"
    (caches / "bin").mkdir(parents=True, exist_ok=True)
    for word, module in (("python", ""), ("deepspeed", " -m deepspeed.launcher.runner")):  # whatever this machine calls them
        link = caches / "bin" / word
        if not link.exists():
            link.write_text(f'#!/bin/sh\nexec "{sys.executable}"{module} "$@"\n')
            link.chmod(0o755)
    predicted = last_rows(str(asked.predicted))
    listed = [json.loads((HERE / name).read_text()) for name in asked.programs]
    programs = [{"cards": held.get("cards", 1), **one} for held in listed for one in held["programs"]]
    chosen = [one for one in programs if one["gpu"] and (not asked.only or one["name"] in asked.only)]
    chosen.sort(key=lambda one: one["name"] not in predicted)
    shared = [one for one in chosen if one["cards"] > 1]
    single = [one for one in chosen if one not in shared]
    with asked.out.open("a") as file:

        def keep(row: dict[str, Any]) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(
                *(row.get(key) for key in ("name", "limit", "code", "allocated", "reserved", "total", "wall", "verb", "error")),
                flush=True,
            )

        def all_of(todo: Sequence[tuple[dict[str, Any], int]], at_once: int, places: Sequence[str]) -> None:
            free: queue.Queue[str] = queue.Queue()
            for n in range(len(places) * at_once):
                free.put(places[n % len(places)])

            def run(one: tuple[dict[str, Any], int]) -> None:
                if time.time() - began > asked.until:
                    return
                card = free.get()
                try:
                    keep(measured(one[0], work, caches, card, limit=one[1], alone=at_once == 1))
                except Exception as error:  # the others still count
                    keep({"name": one[0]["name"], "limit": one[1], "error": f"{type(error).__name__}: {error}"})
                finally:
                    free.put(card)

            with ThreadPoolExecutor(len(places) * at_once) as pool:
                list(pool.map(run, todo))

        def fitting(todo: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], int]]:
            found = ((one, predicted.get(one["name"], {})) for one in todo)
            return [(one, plan["limit"]) for one, plan in found if plan.get("fits") and plan.get("limit")]

        alone = [one for one in single if asked.alone is None or one["name"] in asked.alone]
        all_of([(one, 0) for one in alone], 1, cards)
        rest = [one for one in single if one not in alone and one["name"] not in asked.done]
        all_of([*((one, 0) for one in rest), *fitting(single)], asked.at_once, cards)
        if len(cards) > 1:
            all_of([(one, 0) for one in shared], 1, [asked.cards])
        for one in chosen:
            if one["name"] in asked.history and time.time() - began < asked.until:
                place = cards[0] if one in single else asked.cards
                history(one, work, caches, asked.out.with_suffix(".history.jsonl"), place)
        if len(cards) > 1:
            all_of(fitting(shared), 1, [asked.cards])
        for one in single:
            if one["name"] in BY_VERB and one["name"] in predicted and time.time() - began < asked.until:
                keep(by_verb(one, work, caches, cards[0]))


if __name__ == "__main__":
    main()
