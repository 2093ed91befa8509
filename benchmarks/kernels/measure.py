"""Timing, the machine's description and the report, for all kernel benchmarks."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.step.timing import command
from zeroplan_runtime.kernels import backends, functional
from zeroplan_runtime.kernels.cuda_backend import KERNEL_CONFIGS, KernelConfig

RESULTS = Path(__file__).resolve().parent.parent / "results"

#: One thing to time: a function and the bytes that it must read and write.
Contender = tuple[Callable[[], object], float]


def start(doc: str, *, tuned: bool = True) -> argparse.Namespace:
    """Parse the command line of a benchmark of the CUDA kernels; end the process with code 2 where they do not run."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--numel", type=int, default=400_000_000)
    parser.add_argument("--out", type=Path)
    if tuned:
        parser.add_argument("--tuned", type=Path, help="launch shapes from tune.py's file instead of the built-in ones")
    given = parser.parse_args()
    fault = backends.cuda_fault(0)
    if fault:
        print(f"the kernels do not run here: {fault}")
        raise SystemExit(2)
    return given


def use_path(path: Any) -> None:
    """Lets the kernels' functions call this backend, whatever the device; None: the device's own again."""
    # A name that the module imported and does not export.
    vars(functional)["backend"] = backends.backend if path is None else lambda _device: path


def seconds(call: Callable[[], object], device: torch.device, times: int) -> list[float]:
    """Return the duration of each of `times` calls: by events on a GPU (one queue, no waits between), by the clock on a CPU."""
    if device.type != "cuda":
        spent = []
        for _ in range(times):
            begin = time.perf_counter()
            call()
            spent.append(time.perf_counter() - begin)
        return spent
    marks: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize(device)
    return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(marks)]


def race(
    contenders: dict[str, Contender], device: torch.device, *, rounds: int = 5, times: int = 8
) -> dict[str, dict[str, float]]:
    """Times all contenders in turn, round by round, so that drift of the clocks falls on all alike.

    Returns:
        For each the median and least milliseconds, and the median's gigabytes a second.
    """
    spent: dict[str, list[float]] = {name: [] for name in contenders}
    for call, _ in contenders.values():
        seconds(call, device, 2)
    for _ in range(rounds):
        for name, (call, _) in contenders.items():
            spent[name] += seconds(call, device, times)
    made = {}
    for name, (_, size) in contenders.items():
        median = statistics.median(spent[name])
        made[name] = {"ms": median * 1e3, "ms_least": min(spent[name]) * 1e3, "gb_per_s": size / median / 1e9}
    return made


def call_cost(call: Callable[[], object], times: int = 200) -> float:
    """Microseconds of host time a call takes to return."""
    call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(times):
        call()
    spent = time.perf_counter() - begin
    torch.cuda.synchronize()
    return spent / times * 1e6


def machine(device: torch.device) -> dict[str, Any]:
    """Versions and hardware."""
    named = {}
    for package in ("torch", "deepspeed", "cuda-core", "cuda-bindings"):
        try:
            named[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    spec = sys.modules["__main__"].__spec__
    started = command(spec.name if spec else Path(sys.argv[0]).stem)
    made: dict[str, Any] = {"python": platform.python_version(), **named, "command": started}
    if device.type == "cuda":
        made |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    else:
        made |= {"cpu": cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    return made


def cpu_name() -> str:
    """Return the processor's model."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def use_tuned(path: Path | None) -> None:
    """Takes the launch shapes that ``tune.py`` found best, from the file that it wrote."""
    if path is not None:
        for name, rows in json.loads(path.read_text())["rows"].items():
            KERNEL_CONFIGS[name] = KernelConfig(**{key: value for key, value in rows[0].items() if key != "gb_per_s"})


def show(title: str, rows: dict[str, dict[str, float]], against: str) -> None:
    """Prints a table with each row's bandwidth as a share of row `against`."""
    print(f"\n{title}")
    base = rows[against]["gb_per_s"]
    for name, row in rows.items():
        print(f"  {name:38s} {row['ms']:9.3f} ms  {row['gb_per_s']:8.1f} GB/s  {row['gb_per_s'] / base:6.1%} of {against}")


def save(name: str, content: dict[str, Any], folder: Path | None) -> None:
    """Writes ``name.json`` into the folder (by default benchmarks/results)."""
    path = (folder or RESULTS) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"wrote {path.name}")
