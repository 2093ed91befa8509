"""The rate at which parameters in files come to the device, checksums and copies included, beside plain direct reads.

    python -m benchmarks.nvme.params /path/on/the/disk [--gib 2] [--unit-mib 64] [--buffers 5] [--queue-depth 16]

Units are read in the order of forwards and backwards, as the schedule asks for them. Exit code 1 when the ratio of the
medians is below the target of :mod:`benchmarks.nvme.stream`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from functools import partial
from pathlib import Path

import torch

from benchmarks.nvme import direct
from benchmarks.nvme.stream import TARGET, in_turns
from zeroplan.core.arena.layout import ArenaLayout, ParamShape, UnitKind, UnitShape, plan_layout
from zeroplan.core.arena.layout_setup import RuntimeSetup
from zeroplan.core.buffers import Buffer
from zeroplan.core.zero_config import Aio, OffloadDevice
from zeroplan_runtime.offload import pinned
from zeroplan_runtime.offload.chunks import block_sizes, param_chunks
from zeroplan_runtime.offload.io import IoEngine
from zeroplan_runtime.offload.param_swapper import FetchRequest, ParamSwapper
from zeroplan_runtime.offload.swap_folder import SwapFolder
from zeroplan_runtime.streams import Stream

_WIDTH = 2  # bf16


class Ours:
    """Units of random parameters in a file, and slots on the device that they take turns in."""

    def __init__(self, layout: ArenaLayout, folder: SwapFolder, device: torch.device) -> None:
        pairs = [pair for runs in param_chunks(layout).values() for pair in runs]
        self.file = folder.file("params", block_sizes(pairs, _WIDTH))
        numel = layout.setup.param_buffers * layout.param_buffer
        memory = pinned.allocate(numel, torch.bfloat16, register=device.type == "cuda")
        self.params = ParamSwapper(layout, memory, self.file, device)
        self.stream = Stream(device)
        self.names = [unit.shape.name for unit in layout.units]
        shard = layout.units[0].trainable
        assert shard is not None
        self.slots = [torch.empty(shard.shard, dtype=torch.bfloat16, device=device) for _ in range(2)]
        for i, name in enumerate(self.names):
            self.params.write(name, Buffer.PARAM_SHARD, self._values(i))

    def _values(self, unit: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(unit)
        return torch.rand(self.slots[0].numel(), generator=generator).to(torch.bfloat16)

    def read(self) -> float:
        """Time a forward's reads and a backward's; returns seconds."""
        order = [*self.names, *reversed(self.names)]
        wants = [FetchRequest(name, frozen=False) for name in order]
        begin = time.perf_counter()
        for i in range(len(wants)):
            self.params.fetch(iter(wants[i:]), {Buffer.PARAM_SHARD: self.slots[i % 2]}, self.stream)
        if self.slots[0].is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    def check(self) -> None:
        """Fail unless the parameters read are those that were written."""
        for i, name in enumerate(self.names):
            self.params.fetch(iter([FetchRequest(name, frozen=False)]), {Buffer.PARAM_SHARD: self.slots[0]}, self.stream)
            if self.slots[0].is_cuda:
                torch.cuda.synchronize()
            assert torch.equal(self.slots[0].cpu(), self._values(i)), name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--unit-mib", type=int, default=64)
    parser.add_argument("--buffers", type=int, default=5)
    parser.add_argument("--queue-depth", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    numel = (given.unit_mib << 20) // _WIDTH
    count = max(2, int(given.gib * 2**30) // (numel * _WIDTH))
    shapes = [UnitShape(f"u{i}", UnitKind.BLOCK, (ParamShape(f"u{i}.w", numel),)) for i in range(count)]
    setup = RuntimeSetup(
        stage=3,
        offload_optimizer=OffloadDevice.CPU,
        offload_param=OffloadDevice.NVME,
        param_buffers=given.buffers,
        param_buffer_numel=numel,
    )
    layout = plan_layout(shapes, setup)
    aio = Aio(queue_depth=given.queue_depth)
    with IoEngine(aio) as engine, SwapFolder(given.path, f"benchmark-{os.getpid()}", 0, engine) as folder:
        ours = Ours(layout, folder, device)
        ours.check()
        size, span = ours.file.bytes, setup.param_buffers * layout.param_buffer * _WIDTH
        plain = partial(direct.loop, ours.file.path, size, "read", block=aio.block_size, depth=aio.queue_depth, span=span)
        rates = in_turns({"zeroplan": (2 * size, ours.read), "direct loop": (size, plain)}, given.rounds)
        ours.params.drop_prefetch()
    median = {name: statistics.median(values) for name, values in rates.items()}
    ratio = median["zeroplan"] / median["direct loop"]
    said = ", ".join(f"{name} {rate / 1e9:.2f} GB/s" for name, rate in median.items())
    print(f"{count} units of {given.unit_mib} MiB, {given.buffers} buffers, to {device.type}, {engine.backend}: {said}")
    print(f"ratio {ratio:.3f}, target {TARGET:.2f}")
    return 0 if ratio >= TARGET else 1


if __name__ == "__main__":
    raise SystemExit(main())
