"""The speed of ``save_checkpoint`` and ``load_checkpoint``, beside a plain copy of as many bytes to the same folder.

``python -m benchmarks.checkpoint FOLDER [--gib 1.5] [--runs 5] [--json FILE]``, or under ``torchrun``. Correctness first: what
is loaded equals what was saved, to the bit. The copy is what a checkpoint costs at least: ``torch.save`` of one tensor after
another to one file a rank, and an fsync.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zeroplan_runtime

_WIDTH = 2048


def make(gib: float) -> zeroplan_runtime.Engine:
    """Make an engine whose masters and two moments take about `gib` GiB over all ranks."""
    layers = max(2, round(gib * 2**30 / (12 * _WIDTH * _WIDTH)))
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(layers)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2},
    }
    return zeroplan_runtime.initialize(model=model, config=config, device="cpu")[0]


def step(engine: zeroplan_runtime.Engine) -> None:
    """One step, so that the moments are no zeros."""
    engine.backward(engine(torch.randn(1, _WIDTH)).square().mean())
    engine.step()


def states(engine: zeroplan_runtime.Engine) -> list[torch.Tensor]:
    """Return this rank's masters and moments."""
    units = engine.model_states.units
    return [one for unit in units for one in (unit.master, *unit.optim_states.values()) if one is not None]


def check(engine: zeroplan_runtime.Engine, folder: Path) -> None:
    """Fail unless the loaded masters and moments are those that were saved."""
    engine.save_checkpoint(folder, tag="check")
    saved = [one.clone() for one in states(engine)]
    step(engine)
    engine.load_checkpoint(folder, tag="check")
    assert all(torch.equal(a, b) for a, b in zip(saved, states(engine), strict=True))


def copy(engine: zeroplan_runtime.Engine, folder: Path) -> None:
    """Write the same tensors by ``torch.save``."""
    with open(folder / f"copy{engine.global_rank}", "wb") as stream:
        for one in states(engine):
            torch.save(one.clone(), stream)  # without the rest of its storage
        stream.flush()
        os.fsync(stream.fileno())


def timed(act: Callable[[], Any]) -> tuple[float, float]:
    """Seconds that a call took, and seconds of the processor, which other programs on the machine do not change."""
    begin, busy = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - begin, time.process_time() - busy


def main() -> None:
    """Time, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gib", type=float, default=1.5)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = args.folder / "zeroplan_benchmark"
    folder.mkdir(exist_ok=True)
    engine = make(args.gib)
    step(engine)
    check(engine, folder)
    size = sum(one.numel() * one.element_size() for one in states(engine))
    acts = {
        "copy": lambda: copy(engine, folder),
        "save": lambda: engine.save_checkpoint(folder, tag="timed"),
        "load": lambda: engine.load_checkpoint(folder, tag="timed"),
    }
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in acts}
    for _ in range(args.runs):  # in turn, so that a drift of the disk's speed touches all alike
        for name, act in acts.items():
            took[name].append(timed(act))
    rows = {
        name: {
            "median_gb_per_s": round(size / statistics.median(wall for wall, _ in one) / 1e9, 3),
            "best_gb_per_s": round(size / min(wall for wall, _ in one) / 1e9, 3),
            "cpu_s_per_gb": round(statistics.median(cpu for _, cpu in one) / size * 1e9, 3),
        }
        for name, one in took.items()
    }
    if engine.global_rank == 0:
        for name, row in rows.items():
            print(f"{name}: {', '.join(f'{key} {value:.2f}' for key, value in row.items())}, a rank, {args.runs} runs")
        if args.json:
            facts = {"torch": torch.__version__, "machine": platform.platform(), "ranks": engine.world_size, "bytes": size}
            args.json.write_text(json.dumps({**facts, "rows": rows, "seconds": took}, indent=1))
        shutil.rmtree(folder)
    engine.destroy()


if __name__ == "__main__":
    main()
