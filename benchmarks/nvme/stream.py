"""The swap pipeline's rate with checksums beside plain direct I/O: read, write, and both, on one disk in turns.

    python -m benchmarks.nvme.stream /path/on/the/disk [--gib 4] [--queue-depth 16] [--workers 1] [--backend auto]

Both sides move the same bytes in blocks of the same size with as many in flight. Exit code 1 when the least ratio of the
medians is below the target.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.measure import machine, save
from benchmarks.nvme import direct
from zeroplan.core.arena.layout import PAGE
from zeroplan.core.zero_config import Aio
from zeroplan_runtime.offload import pinned
from zeroplan_runtime.offload.io import IoEngine
from zeroplan_runtime.offload.swap_folder import SwapFolder
from zeroplan_runtime.offload.swap_pipeline import PipelineBuffers, SwapPipeline, SwapTensor, Work

TARGET = 0.90
TENSORS = 3  # master, exp_avg, exp_avg_sq


class Ours:
    """A swap file of random numbers in groups of three tensors, and the swap pipeline over it."""

    def __init__(self, folder: SwapFolder, size: int, buffer_bytes: int) -> None:
        count = max(1, size // (buffer_bytes * TENSORS))
        blocks = {f"{group}/{part}": buffer_bytes for group in range(count) for part in range(TENSORS)}
        self.file = folder.file("states", blocks)
        self.numel = buffer_bytes // 4
        self.count = count
        buffers = PipelineBuffers(slots=3, per_slot=TENSORS, buffer_bytes=-(-buffer_bytes // PAGE) * PAGE)
        self.pipeline = SwapPipeline(buffers, pinned.allocate(buffers.bytes, torch.uint8, register=torch.cuda.is_available()))
        self.run("write", self._fill)

    def run(self, mode: str, work: Work = lambda *_: None) -> float:
        """Time one pass; returns seconds."""
        reads, writes = mode != "write", mode != "read"
        groups = [
            [SwapTensor(self.file, f"{group}/{part}", self.numel, read=reads, write=writes) for part in range(TENSORS)]
            for group in range(self.count)
        ]
        begin = time.perf_counter()
        self.pipeline.run(groups, work)
        return time.perf_counter() - begin

    @staticmethod
    def _fill(index: int, tensors: tuple[torch.Tensor, ...]) -> None:
        generator = torch.Generator().manual_seed(index)
        for tensor in tensors:
            tensor.uniform_(generator=generator)

    def check(self) -> None:
        """Fail unless the bytes read are those that were written."""

        def compare(index: int, tensors: tuple[torch.Tensor, ...]) -> None:
            generator = torch.Generator().manual_seed(index)
            for tensor in tensors:
                assert torch.equal(tensor, torch.empty_like(tensor).uniform_(generator=generator)), f"group {index} differs"

        self.run("read", compare)


def in_turns(contenders: Mapping[str, tuple[int, Callable[[], float | None]]], rounds: int) -> dict[str, list[float]]:
    """Measure the bytes a second of each contender, in rounds whose order alternates.

    Args:
        contenders: by name, the bytes that each moves and its run, which returns seconds, or None where it cannot be had.
        rounds: of all.
    """
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds):
        for name in list(contenders)[:: -1 if turn % 2 else 1]:
            moved, run = contenders[name]
            seconds = run()
            if seconds is not None:
                rates[name].append(moved / seconds)
    return rates


def measure(ours: Ours, peer_file: Path, aio: Aio, rounds: int) -> dict[str, Any]:
    """Measure the bytes a second by mode and contender: all rounds and their median."""
    size, depth = ours.file.bytes, aio.queue_depth * aio.intra_op_parallelism
    made: dict[str, Any] = {}
    for mode in direct.MODES:
        moved = size * (2 if mode == "read and write" else 1)
        span = ours.pipeline.buffers.bytes
        calls: dict[str, Callable[[], float | None]] = {
            "zeroplan": partial(ours.run, mode),
            "direct loop": partial(direct.loop, peer_file, size, mode, block=aio.block_size, depth=depth, span=span),
            "fio": partial(direct.fio, peer_file, size, mode, block=aio.block_size, depth=depth),
        }
        rates = in_turns({name: (moved, call) for name, call in calls.items()}, rounds)
        median = {name: statistics.median(values) for name, values in rates.items() if values}
        best = max(rate for name, rate in median.items() if name != "zeroplan")
        made[mode] = {"rounds": rates, "median": median, "ratio": median["zeroplan"] / best}
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--buffer-mib", type=int, default=32)
    parser.add_argument("--block-kib", type=int, default=1024)
    parser.add_argument("--queue-depth", type=int, default=16)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--backend", choices=("auto", "io_uring", "threads"), default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    aio = Aio(block_size=given.block_kib << 10, queue_depth=given.queue_depth, intra_op_parallelism=given.workers)
    with IoEngine(aio, given.backend) as engine, SwapFolder(given.path, f"benchmark-{os.getpid()}", 0, engine) as folder:
        ours = Ours(folder, int(given.gib * 2**30), given.buffer_mib << 20)
        ours.check()
        peer_file = folder.path / "direct.bin"
        with open(peer_file, "wb") as stream:
            os.posix_fallocate(stream.fileno(), 0, ours.file.bytes)
        direct.loop(peer_file, ours.file.bytes, "write", block=1 << 20, depth=4, span=4 << 20)  # no extent is new any more
        modes = measure(ours, peer_file, aio, given.rounds)
        file_system = folder.probe.file_system
        is_direct = folder.probe.direct
    print(f"{given.path} ({file_system}, direct: {is_direct}), {engine.backend}{f' ({engine.why})' if engine.why else ''}")
    print(
        f"{ours.file.bytes / 2**30:.2f} GiB, blocks of {given.block_kib} KiB, {given.queue_depth} × {given.workers} in flight"
    )
    for mode, row in modes.items():
        rates = ", ".join(f"{name} {rate / 1e9:.2f} GB/s" for name, rate in row["median"].items())
        print(f"{mode:>15}: {rates}; ratio {row['ratio']:.3f}")
    worst = min(row["ratio"] for row in modes.values())
    print(f"least ratio {worst:.3f}, target {TARGET:.2f}")
    setup = {"backend": engine.backend, "why": engine.why, "file_system": file_system, "direct": is_direct, "aio": vars_of(aio)}
    command = (
        f"python -m benchmarks.nvme.stream FOLDER --gib {given.gib} --queue-depth {given.queue_depth} --workers {given.workers}"
    )
    result = {
        "machine": {**machine(torch.device("cpu")), "command": command},
        **setup,
        "bytes": ours.file.bytes,
        "modes": modes,
        "least_ratio": worst,
    }
    save("nvme_stream", result, given.out)
    return 0 if worst >= TARGET else 1


def vars_of(aio: Aio) -> dict[str, object]:
    """Return the knobs as plain values."""
    return {name: getattr(aio, name) for name in aio.__slots__}


if __name__ == "__main__":
    raise SystemExit(main())
