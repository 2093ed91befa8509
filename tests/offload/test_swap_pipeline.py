"""The swap pipeline: what is on disk after a pass equals the same updates in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.patience import PATIENCE
from zeroplan.core.zero_config import Aio
from zeroplan_runtime.offload import pinned
from zeroplan_runtime.offload.io import DiskFault, IoEngine
from zeroplan_runtime.offload.swap_file import SwapFile
from zeroplan_runtime.offload.swap_pipeline import PipelineBuffers, SwapPipeline, SwapTensor

SIZES = [5000, 1, 4096, 10_000, 777, 10_000, 2048, 3]
TENSORS = ("master", "exp_avg", "exp_avg_sq")


@pytest.fixture(scope="module")
def engine() -> Iterator[IoEngine]:
    with IoEngine(Aio(block_size=8192, queue_depth=4)) as made:
        yield made


def adam(tensors: tuple[torch.Tensor, ...], step: int) -> None:
    """Some arithmetic in which every element counts."""
    master, first, second = tensors
    first.mul_(0.9).add_(master, alpha=0.1 * step)
    second.mul_(0.99).addcmul_(first, first, value=0.01)
    master.sub_(first)


def states(numel: int, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(numel, generator=generator) for _ in TENSORS)


def pipeline_of(slots: int, buffer_bytes: int = 40_960, per_slot: int = 3) -> SwapPipeline:
    buffers = PipelineBuffers(slots, per_slot, buffer_bytes)
    return SwapPipeline(buffers, pinned.allocate(buffers.bytes, torch.uint8, register=False))


def swap_groups(path: Path, engine: IoEngine, *, first: bool = False) -> tuple[SwapFile, list[list[SwapTensor]]]:
    file = SwapFile.create(path, {f"{k}/{name}": 4 * numel for k, numel in enumerate(SIZES) for name in TENSORS}, engine)
    return file, parts_of(file, read=not first)


def parts_of(file: SwapFile, *, read: bool = True, write: bool = True) -> list[list[SwapTensor]]:
    return [[SwapTensor(file, f"{k}/{name}", n, read=read, write=write) for name in TENSORS] for k, n in enumerate(SIZES)]


def fill(index: int, tensors: tuple[torch.Tensor, ...]) -> None:
    for tensor, value in zip(tensors, states(SIZES[index], index), strict=True):
        tensor.copy_(value)


@pytest.mark.parametrize("slots", [1, 2, 3, 8, 20])
@pytest.mark.parametrize("late", [False, True])
def test_equals_memory(engine: IoEngine, tmp_path: Path, slots: int, late: bool) -> None:
    file, fresh = swap_groups(tmp_path / "states.swap", engine, first=True)
    pipeline = pipeline_of(slots)
    pipeline.run(fresh, fill)
    order: list[str] = []

    def work(step: int) -> Callable[[int, tuple[torch.Tensor, ...]], Callable[[], None] | None]:
        def run(index: int, tensors: tuple[torch.Tensor, ...]) -> Callable[[], None] | None:
            adam(tensors, step)
            order.append(f"work {index}")
            return (lambda: order.append(f"wait {index}")) if late else None

        return run

    groups = parts_of(file)
    for step in (1, 2, 3):
        if step == 2:
            pipeline.prefetch(groups)
        pipeline.run(groups, work(step))
    expected = [states(numel, k) for k, numel in enumerate(SIZES)]
    for tensors in expected:
        for step in (1, 2, 3):
            adam(tensors, step)
    pipeline.run(parts_of(file, write=False), lambda k, got: torch.testing.assert_close(got, expected[k], rtol=0, atol=0))
    assert [line for line in order if line.startswith("work")] == [f"work {k}" for k in range(len(SIZES))] * 3
    if late:
        assert all(order.index(f"wait {k}") > order.index(f"work {k}") for k in range(len(SIZES)))
        if slots > 1:
            assert order[:4] == ["work 0", "work 1", "wait 0", "work 2"]


def test_reads_run_ahead(engine: IoEngine, tmp_path: Path) -> None:
    """While the first group is updated, the second and third arrive in their slots."""
    file, fresh = swap_groups(tmp_path / "states.swap", engine, first=True)
    buffers = PipelineBuffers(3, 3, 40_960)
    memory = pinned.allocate(buffers.bytes, torch.uint8, register=False)
    pipeline = SwapPipeline(buffers, memory)
    pipeline.run(fresh, fill)
    memory.zero_()
    seen: list[float] = []

    def look(index: int, tensors: tuple[torch.Tensor, ...]) -> None:
        if index == 0:
            third = memory[2 * 3 * buffers.buffer_bytes :].view(torch.float32)
            arrived = threading.Event()
            for _ in range(100 * PATIENCE):
                if torch.equal(third[: SIZES[2]], states(SIZES[2], 2)[0]):
                    break
                arrived.wait(0.01)
            seen.append(float(third[0]))

    pipeline.run(parts_of(file), look)
    assert seen == [float(states(SIZES[2], 2)[0][0])]


def test_too_large_a_group(engine: IoEngine, tmp_path: Path) -> None:
    file = SwapFile.create(tmp_path / "a.swap", {"a": 1 << 20}, engine)
    with pytest.raises(ValueError, match="does not fit"):
        pipeline_of(2, 4096, per_slot=1).run([[SwapTensor(file, "a", 2000)]], lambda *_: None)


@pytest.mark.parametrize("slots", [1, 3])
def test_a_fault_ends_the_pass(engine: IoEngine, tmp_path: Path, slots: int) -> None:
    """A corrupted block in the middle: its fault is raised, what was before it is written, and the pipeline still works."""
    file, fresh = swap_groups(tmp_path / "states.swap", engine, first=True)
    pipeline = pipeline_of(slots)
    pipeline.run(fresh, fill)
    with open(file.path, "r+b") as stream:
        stream.seek(file.path.read_bytes().index(states(SIZES[5], 5)[1].numpy().tobytes()))
        stream.write(b"\0\0\0\0")
    done: list[int] = []

    def work(index: int, tensors: tuple[torch.Tensor, ...]) -> None:
        done.append(index)
        for tensor in tensors:
            tensor.fill_(1.0)

    with pytest.raises(DiskFault, match=r"block '5/exp_avg' of .* is corrupted"):
        pipeline.run(parts_of(file), work)
    assert done == [0, 1, 2, 3, 4]
    pipeline.run(fresh, fill)

    def fails(index: int, tensors: tuple[torch.Tensor, ...]) -> None:
        if index == 3:
            raise KeyError("of the work's own")

    with pytest.raises(KeyError, match="own"):
        pipeline.run(parts_of(file), fails)
    pipeline.run(fresh, fill)
    pipeline.run(parts_of(file), lambda k, got: torch.testing.assert_close(got, states(SIZES[k], k), rtol=0, atol=0))
