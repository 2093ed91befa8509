"""Times and profiles steps of two_gpus.py's cases without a mark in them:

    torchrun --nproc-per-node 2 -m benchmarks.layouts.steps FILE [--traces FOLDER] CASE …

The loops are those of ``zeroplan verify``. Its marks wait for the GPU after each forward and backward, which a training loop
does not, so `seconds` is of steps without them and `marked` of steps with them; before and behind each of both the host waits
for the GPU. `running` is of as many steps in a row, without waiting between them. `hosts` has what each rank's host did in the
awaited ones: the seconds until it had issued a step, and until that had run, Python's collections, and how long its threads
waited for a processor. Where `--traces` names a folder, one more step is profiled: `profile` sums up the kernels of rank 0 in
ms, and the folder gets the other ranks' sums, the traces, and what Python spent its time on.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import io
import json
import os
import pstats
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.layouts.two_gpus import CASES, request_of
from zeroplan.engines.verification import Trainer
from zeroplan.planner.resolve import resolve
from zeroplan.validate.api import at_installed
from zeroplan.validate.job import VerifyJob, job_of
from zeroplan.validate.rank.probe import RankDevice
from zeroplan.validate.rank.run import _trainer, make_batch
from zeroplan.validate.rank.worker import join

_WARM, _TIMED, _MARKED = 3, 8, 4
_KINDS = (
    ("nccl", "collectives"),
    *((word, "attention") for word in ("sdpa", "flash", "fmha")),
    *((word, "products") for word in ("nvjet", "gemm", "cutlass", "cublas")),
)


def job(case: dict[str, Any], folder: Path) -> tuple[VerifyJob, Any]:
    """Return the job of a case as verify makes it, and its engine."""
    resolved = resolve(at_installed(request_of(case, folder)).replace(from_scratch=True))
    engine, raw = resolved.engine.for_verify(None, device=_device(), own_module=False)
    return job_of(resolved.cases[0], engine, raw=raw, timeout=120.0), engine


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run(name: str, folder: Path, traces: Path | None, joined: list[RankDevice]) -> dict[str, Any]:
    """Run one case on this rank and return its row."""
    one, engine = job(CASES[name], folder)
    if not joined:
        joined.append(join(one, _device(), int(os.environ["LOCAL_RANK"])))
    host = _Host()
    trained = _trainer(one, engine, joined[0].device, host.mark)
    batch = make_batch(one, joined[0].device, seed=one.layout.sample_of(dist.get_rank()), casts=engine.casts_modules)
    _seconds(trained, batch, _WARM)
    host.begin()
    row: dict[str, Any] = {"case": name, "seconds": _seconds(trained, batch, _TIMED, host)}
    row["hosts"] = host.end()
    _wait()
    begin = time.perf_counter()
    for _ in range(_TIMED):
        trained.step(batch)
    _wait()
    row["running"] = (time.perf_counter() - begin) / _TIMED
    host.waits = True
    row["marked"] = _seconds(trained, batch, _MARKED)
    host.waits = False
    if traces is not None:
        row |= _profiled(name, partial(_seconds, trained, batch, 1), traces)
    trained.close()
    del trained, batch
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        row["gpu"] = f"{dist.get_world_size()} × {torch.cuda.get_device_name()}"
    return row | {"load": os.getloadavg()[0], "torch": torch.__version__}


class _Host:
    """What the host of a rank does in steps; `waits` says whether it waits for the GPU at each mark."""

    def __init__(self) -> None:
        self.waits, self.steps = False, list[dict[str, float]]()
        self._collecting = self._began = 0.0

    def mark(self, phase: str, _: str) -> None:
        """Note when a phase has been issued."""
        if self.waits:
            _wait()
        elif self.steps:
            self.steps[-1][phase] = time.perf_counter()

    def begin(self) -> None:
        """Count from here on."""
        self._counted = _waited(), _throttled()
        gc.callbacks.append(self._collects)

    def _collects(self, phase: str, _: object) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self._collecting += time.perf_counter() - self._began

    def end(self) -> list[dict[str, Any]]:
        """Return for each rank the seconds from a step's begin to each phase's end, and of all steps the seconds in collections
        and of waiting for a processor.
        """
        gc.callbacks.remove(self._collects)
        steps = [{name: round(at - one["begin"], 4) for name, at in one.items() if name != "begin"} for one in self.steps]
        waited, throttled = (now - then for now, then in zip((_waited(), _throttled()), self._counted, strict=True))
        found: dict[str, Any] = {"waited": waited, "throttled": throttled, "collecting": self._collecting}
        hosts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(hosts, {"steps": steps} | {name: round(value, 4) for name, value in found.items()})
        self.steps.clear()
        return hosts


def _waited() -> float:
    """Return the seconds that this process's threads were ready and had no processor."""
    found = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):
            found += int(file.read_text().split()[1])
    return found / 1e9


def _throttled() -> float:
    """Return the seconds in which a quota of processors has stopped this process's group."""
    with suppress(OSError):
        lines = Path("/sys/fs/cgroup/cpu.stat").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("throttled_usec")) / 1e6
    return 0.0


def _seconds(trained: Trainer, batch: dict[str, torch.Tensor], count: int, host: _Host | None = None) -> float:
    """Return the median seconds of so many steps."""
    found = []
    for _ in range(count):
        _wait()
        begin = time.perf_counter()
        if host is not None:
            host.steps.append({"begin": begin})
        trained.step(batch)
        issued = time.perf_counter()
        _wait()
        found.append(time.perf_counter() - begin)
        if host is not None:
            host.steps[-1] |= {"issued": issued, "awaited": begin + found[-1]}
    return statistics.median(found)


def _profiled(name: str, step: Callable[[], float], traces: Path) -> dict[str, Any]:
    """Profile a step's kernels, and two steps' Python with the backward in the same thread."""
    kinds = [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds) as profile:
        wall = step()
    found: dict[str, Any] = {"profiled": wall}
    clean = name.replace(" ", "_").replace(",", "")
    events = [e for e in profile.profiler.kineto_results.events() if "CUDA" in str(e.device_type())]
    if events:
        found["profile"] = summary((e.name(), e.start_ns(), e.duration_ns()) for e in events)
    if dist.get_rank():
        (traces / f"{clean}.{dist.get_rank()}.txt").write_text(json.dumps(found.get("profile")))
    profile.export_chrome_trace(str(traces / f"{clean}.{dist.get_rank()}.json.gz"))
    python = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):
        python.enable()
        found["in_one_thread"] = step()
        python.disable()
    if not dist.get_rank():
        text = io.StringIO()
        pstats.Stats(python, stream=text).sort_stats("tottime").print_stats(45)
        pstats.Stats(python, stream=text).sort_stats("cumulative").print_stats(60)
        (traces / f"{clean}.txt").write_text(text.getvalue())
    return found


def summary(kernels: Iterable[tuple[str, int, int]]) -> dict[str, Any]:
    """Return what kernels, by name, begin and duration in ns, keep a GPU busy with, in ms."""
    by_name: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    by_kind: dict[str, float] = defaultdict(float)
    spans: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for name, begin, lasts in kernels:
        kind = next((kind for word, kind in _KINDS if word in name.lower()), "other")
        by_kind[kind] += lasts / 1e6
        short = name.replace("at::native::", "").replace("(anonymous namespace)::", "")[:160]
        by_name[short][0] += lasts / 1e6
        by_name[short][1] += 1
        spans[kind == "collectives"].append((begin, begin + lasts))
    every = _union(spans[True] + spans[False])
    whole = (max(end for _, end in every) - every[0][0]) / 1e6
    busy, beside = sum(end - begin for begin, end in every) / 1e6, sum(e - b for b, e in _union(spans[False])) / 1e6
    top = sorted(by_name.items(), key=lambda item: -item[1][0])[:30]
    return {
        "span": round(whole, 2),
        "idle": round(whole - busy, 2),
        "collectives_alone": round(busy - beside, 2),
        "computing": round(beside, 2),
        "kernels": len(spans[True]) + len(spans[False]),
        "kinds": {kind: round(value, 2) for kind, value in by_kind.items()},
        "names": [[name, round(value, 2), count] for name, (value, count) in top],
    }


def _union(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the intervals that spans cover together, in their order."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def main() -> None:
    """Run the cases that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--traces", type=Path)
    parser.add_argument("cases", nargs="+", choices=CASES, metavar="CASE")
    asked = parser.parse_args()
    if asked.traces is not None:
        asked.traces.mkdir(parents=True, exist_ok=True)
    joined: list[RankDevice] = []
    with TemporaryDirectory() as folder:
        for name in asked.cases:
            row = run(name, Path(folder), asked.traces, joined)
            if not dist.get_rank():
                with asked.file.open("a") as out:
                    out.write(json.dumps(row, ensure_ascii=False) + "\n")
                print(name, row["seconds"], row["running"], row["marked"], flush=True)
    os._exit(0)  # engines' tear-down can hang and changes nothing measured


if __name__ == "__main__":
    main()
