"""The speed of the caching allocator's simulation: the compiled twin beside the Python one, which it must equal first.

The stream is that of a training step, repeated: activations that pile up over the forward and fall over the backward,
gathers and reductions on a second stream, small temporaries throughout. Target: a million events a second.

    python benchmarks/allocator.py [--events N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from pathlib import Path
from typing import Any

from zeroplan.core.buffers import Buffer
from zeroplan.core.sizes import MIB
from zeroplan.simulate.allocator import native
from zeroplan.simulate.allocator.config import AllocatorConfig
from zeroplan.simulate.allocator.run import run_allocator
from zeroplan.simulate.recorder import Recorder, simulate

SETTINGS = ("", "expandable_segments:True", "max_split_size_mb:128", "roundup_power2_divisions:8")
TARGET = 1_000_000


def training_stream(events: int, seed: int = 0) -> Recorder:
    """Return a repeated training step of 32 blocks, with about the given number of events."""
    rng = random.Random(seed)
    recorder = Recorder()
    for _ in range(200):
        recorder.alloc(rng.randrange(1, 80 * MIB), Buffer.PARAM_SHARD)
    while len(recorder) < events:
        saved = []
        for block in range(32):
            gathered = recorder.alloc(120 * MIB, Buffer.COMM_ALL_GATHER, stream=1, note=block)
            for _ in range(12):
                temporary = recorder.alloc(rng.choice((512, 4096, 3 * MIB, 17 * MIB)), Buffer.ACTIVATION_TEMP, note=block)
                saved.append(recorder.alloc(rng.choice((2048, 900_000, 8 * MIB, 33 * MIB)), Buffer.ACTIVATION, note=block))
                recorder.free(temporary)
            recorder.record_stream(gathered, 0)
            recorder.free(gathered)
            recorder.synchronize(0)
        recorder.mark("forward")
        for block in reversed(range(32)):
            gradient = recorder.alloc(120 * MIB, Buffer.GRAD_FULL, note=block)
            for _ in range(12):
                recorder.free(recorder.alloc(rng.choice((2048, 8 * MIB, 33 * MIB)), Buffer.ACTIVATION_TEMP, note=block))
                recorder.free(saved.pop())
            recorder.free(gradient)
        recorder.mark("backward")
    return recorder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=500_000)
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()

    start = time.perf_counter()
    recorder = training_stream(arguments.events)
    recording = len(recorder) / (time.perf_counter() - start)
    print(f"{len(recorder):,} events, recorded at {recording / 1e6:.2f} M events/s")
    if not native.available():
        print("the compiled allocator is not at hand")
        return 1

    rows: list[dict[str, Any]] = []
    print(f"{'settings':32} {'compiled':>14} {'python':>14}  M events/s (equal results)")
    for settings in SETTINGS:
        config = AllocatorConfig.parse(settings)
        start = time.perf_counter()
        python = run_allocator(recorder.code, recorder.value, config, compiled=False)
        python_rate = len(recorder) / (time.perf_counter() - start)
        best = 0.0
        for _ in range(3):
            start = time.perf_counter()
            compiled = run_allocator(recorder.code, recorder.value, config, compiled=True)
            best = max(best, len(recorder) / (time.perf_counter() - start))
        if compiled != python:
            print(f"{settings or 'defaults':32} the twins differ")
            return 1
        rows.append({"settings": settings, "compiled_events_per_s": round(best), "python_events_per_s": round(python_rate)})
        print(f"{settings or 'defaults':32} {best / 1e6:14.2f} {python_rate / 1e6:14.2f}")

    start = time.perf_counter()
    timeline = simulate(recorder)
    timeline.alive_by_buffer()
    timeline.curve()
    rest = time.perf_counter() - start
    print(f"with the contents of the peak and a curve to draw: {len(recorder) / rest / 1e6:.2f} M events/s")
    if arguments.json:
        report = {"events": len(recorder), "cpu": platform.processor() or platform.machine(), "rows": rows}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if min(row["compiled_events_per_s"] for row in rows) >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
