"""The streamer: what comes back equals the same work in memory, through no more buffers than were told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from zeroplan.core.errors import BadInput
from zeroplan.core.zero_config import Aio
from zeroplan_runtime.offload import pinned
from zeroplan_runtime.offload.io import DiskFault, IoEngine
from zeroplan_runtime.offload.swap_file import SwapFile
from zeroplan_runtime.offload.swap_pipeline import PipelineBuffers, SwapPipeline, SwapTensor, plan_buffers

SIZES = [5000, 1, 4096, 10_000, 777, 10_000, 2048, 3]
LANES = ("master", "exp_avg", "exp_avg_sq")


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
    return tuple(torch.randn(numel, generator=generator) for _ in LANES)


def ring(plan: PipelineBuffers) -> SwapPipeline:
    return SwapPipeline(plan, pinned.allocate(plan.bytes, torch.uint8, register=False))


def swap_groups(path: Path, engine: IoEngine, *, first: bool = False) -> tuple[SwapFile, list[list[SwapTensor]]]:
    file = SwapFile.create(path, {f"{k}/{name}": 4 * numel for k, numel in enumerate(SIZES) for name in LANES}, engine)
    return file, parts_of(file, read=not first)


def parts_of(file: SwapFile, *, read: bool = True, write: bool = True) -> list[list[SwapTensor]]:
    return [[SwapTensor(file, f"{k}/{name}", n, read=read, write=write) for name in LANES] for k, n in enumerate(SIZES)]


def fill(index: int, tensors: tuple[torch.Tensor, ...]) -> None:
    for tensor, value in zip(tensors, states(SIZES[index], index), strict=True):
        tensor.copy_(value)


@pytest.mark.parametrize("slots", [1, 2, 3, 8, 20])
@pytest.mark.parametrize("late", [False, True])
def test_equals_memory(engine: IoEngine, tmp_path: Path, slots: int, late: bool) -> None:
    file, fresh = swap_groups(tmp_path / "states.swap", engine, first=True)
    streamer = ring(plan_buffers(slots * 3, 12_288, lanes=3, largest=max(SIZES), slots=slots))
    streamer.run(fresh, fill)
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
            streamer.prefetch(groups)
        times = streamer.run(groups, work(step))
        assert times.read_bytes == times.written_bytes == file.bytes
    expected = [states(numel, k) for k, numel in enumerate(SIZES)]
    for tensors in expected:
        for step in (1, 2, 3):
            adam(tensors, step)
    streamer.run(parts_of(file, write=False), lambda k, got: torch.testing.assert_close(got, expected[k], rtol=0, atol=0))
    assert [line for line in order if line.startswith("work")] == [f"work {k}" for k in range(len(SIZES))] * 3
    if late:
        assert all(order.index(f"wait {k}") > order.index(f"work {k}") for k in range(len(SIZES)))
        if slots > 1:
            assert order[:4] == ["work 0", "work 1", "wait 0", "work 2"]


def test_reads_run_ahead(engine: IoEngine, tmp_path: Path) -> None:
    """While the first group is worked on, the second and third arrive in their slots."""
    file, fresh = swap_groups(tmp_path / "states.swap", engine, first=True)
    plan = plan_buffers(9, 10_240, lanes=3, largest=max(SIZES))
    memory = pinned.allocate(plan.bytes, torch.uint8, register=False)
    streamer = SwapPipeline(plan, memory)
    streamer.run(fresh, fill)
    memory.zero_()
    seen: list[float] = []

    def look(index: int, tensors: tuple[torch.Tensor, ...]) -> None:
        if index == 0:
            third = memory[2 * 3 * plan.lane_bytes :].view(torch.float32)
            arrived = threading.Event()
            for _ in range(500):
                if torch.equal(third[: SIZES[2]], states(SIZES[2], 2)[0]):
                    break
                arrived.wait(0.01)
            seen.append(float(third[0]))

    streamer.run(parts_of(file), look)
    assert seen == [float(states(SIZES[2], 2)[0][0])]


def test_the_plan_is_exact() -> None:
    assert plan_buffers(4, 100_000_000, lanes=3).bytes <= 1_600_000_000
    assert plan_buffers(4, 100_000_000, lanes=3).numel(4) == 1_600_000_000 // 9 // 4096 * 1024
    assert plan_buffers(12, 10_240, lanes=3, largest=10_240) == PipelineBuffers(3, 3, 40_960)
    assert plan_buffers(8, 10_240, lanes=3, largest=10_240) == PipelineBuffers(2, 3, 40_960)
    assert plan_buffers(5, 1000, lanes=1, element_size=2, largest=1, slots=3) == PipelineBuffers(2, 1, 4096)
    with pytest.raises(
        BadInput, match=r"2 buffers of 10,240 elements do not hold a group of 3 tensors.*at least 30,720 elements"
    ):
        plan_buffers(2, 10_240, lanes=3, largest=10_240)


def test_too_large_a_group(engine: IoEngine, tmp_path: Path) -> None:
    file = SwapFile.create(tmp_path / "a.swap", {"a": 1 << 20}, engine)
    with pytest.raises(ValueError, match="does not fit"):
        ring(PipelineBuffers(2, 1, 4096)).run([[SwapTensor(file, "a", 2000)]], lambda *_: None)


@pytest.mark.parametrize("slots", [1, 3])
def test_a_fault_ends_the_pass(engine: IoEngine, tmp_path: Path, slots: int) -> None:
    """A corrupted block in the middle: its fault is raised, what was before it is written, and the streamer still works."""
    file, fresh = swap_groups(tmp_path / "states.swap", engine, first=True)
    streamer = ring(plan_buffers(slots * 3, 10_240, lanes=3, largest=max(SIZES)))
    streamer.run(fresh, fill)
    with open(file.path, "r+b") as stream:
        stream.seek(file._blocks["5/exp_avg"].offset)
        stream.write(b"\0\0\0\0")
    done: list[int] = []

    def work(index: int, tensors: tuple[torch.Tensor, ...]) -> None:
        done.append(index)
        for tensor in tensors:
            tensor.fill_(1.0)

    with pytest.raises(DiskFault, match=r"block '5/exp_avg' of .* is corrupted"):
        streamer.run(parts_of(file), work)
    assert done == [0, 1, 2, 3, 4]
    streamer.run(fresh, fill)

    def fails(index: int, tensors: tuple[torch.Tensor, ...]) -> None:
        if index == 3:
            raise KeyError("of the work's own")

    with pytest.raises(KeyError, match="own"):
        streamer.run(parts_of(file), fails)
    streamer.run(fresh, fill)
    streamer.run(parts_of(file), lambda k, got: torch.testing.assert_close(got, states(SIZES[k], k), rtol=0, atol=0))
