"""Runs a program as its launcher would, and writes what torch's allocator and NVML counted on this rank.

``worker.py RESULT PROGRAM ARGS…``: PROGRAM is a script's path or ``-m`` and a module. The program is not changed. RESULT gets
one JSON line a rank: the peaks of the whole process and the marks before and after each optimizer step, whose peaks are those
since the mark before. An error's last line stands in ``error``.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind what the program itself imports

from benchmarks.measure.probe import Device, Probe, host_status
from benchmarks.measure.worker import versions


def main(result: Path, arguments: list[str]) -> int:
    """Run the program and append this rank's line to `result`; returns 1 where the program failed."""
    import torch

    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    gpu = Device(local_rank)
    probe = Probe(gpu)
    before = gpu.used()
    if gpu.cuda:
        torch.cuda.set_device(local_rank)
        torch.zeros(1, device="cuda")
    context = gpu.used() - before
    _mark_steps(probe)
    if any("grpo" in word or "rloo" in word for word in arguments):
        _mark_generation(probe)
    started = time.monotonic()
    error = ""
    try:
        _run(arguments)
    except SystemExit as stop:
        error = "" if stop.code in (None, 0) else f"exit {stop.code}"
    except BaseException as failure:
        traceback.print_exc()
        error = f"{type(failure).__name__}: {failure}".splitlines()[0][:500]
    probe.mark("end")
    marks = probe.marks
    row: dict[str, Any] = {
        "rank": int(os.environ.get("RANK", "0")),
        "world": int(os.environ.get("WORLD_SIZE", "1")),
        "error": error,
        "steps": sum(mark["at"] == "stepped" for mark in marks),
        "peak_allocated": max(mark.get("peak", 0) for mark in marks),
        "peak_allocated_training": max((mark.get("peak", 0) for mark in marks if mark["at"] != "end"), default=0),
        "peak_reserved": max(mark.get("reserved_peak", 0) for mark in marks),
        "nvml_process": gpu.used_by_process(),
        "nvml_used": gpu.used() - before,
        "context": context,
        "host_rss_peak": host_status()["VmHWM"],
        "seconds": round(time.monotonic() - started, 1),
        "gpu": torch.cuda.get_device_name() if gpu.cuda else "cpu",
        "versions": versions(),
        "marks": [{k: v for k, v in mark.items() if k not in ("time_us", "pinned")} for mark in marks],
    }
    with result.open("a") as out:
        out.write(json.dumps(row) + "\n")
    sys.stdout.flush()
    sys.stderr.flush()
    return int(bool(error))


def _run(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")


def _mark_generation(probe: Probe) -> None:
    """Mark the memory before and after each generation of a model of transformers."""
    from transformers import GenerationMixin

    generate = GenerationMixin.generate

    @functools.wraps(generate)
    def marked(*args: Any, **kwargs: Any) -> Any:
        probe.mark("before generation")
        found = generate(*args, **kwargs)
        probe.mark("generated")
        return found

    GenerationMixin.generate = marked


def _mark_steps(probe: Probe) -> None:
    """Mark the memory before and after each step of any torch optimizer of the process."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    def before(*_: object) -> None:
        probe.mark("before step")

    def after(*_: object) -> None:
        probe.mark("stepped")

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


if __name__ == "__main__":
    os._exit(main(Path(sys.argv[1]), sys.argv[2:]))  # engines' tear-down can hang and changes nothing measured
