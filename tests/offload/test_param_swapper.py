"""The reader of parameters in files: whatever is expected, what is brought is what was last written."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from zeroplan.core.arena.layout import ArenaLayout, ParamShape, UnitKind, UnitShape, plan_layout
from zeroplan.core.arena.layout_setup import RuntimeSetup
from zeroplan.core.buffers import Buffer
from zeroplan.core.workload import DType
from zeroplan.core.zero_config import Aio, OffloadDevice
from zeroplan_runtime.offload import pinned
from zeroplan_runtime.offload.chunks import block_sizes, param_chunks
from zeroplan_runtime.offload.io import IoEngine
from zeroplan_runtime.offload.param_swapper import FetchRequest, ParamSwapper
from zeroplan_runtime.offload.swap_file import SwapFile
from zeroplan_runtime.streams import Stream

CPU = torch.device("cpu")
TRAINED, FROZEN = Buffer.PARAM_SHARD, Buffer.PARAM_FROZEN
#: Elements of each unit's trained and frozen parameters.
UNITS = [(100, 0), (5000, 3000), (0, 7000), (12_345, 10), (2048, 2048)]


def layout_of(buffers: int, size: int, dtype: DType = DType.BF16) -> ArenaLayout:
    shapes = [
        UnitShape(
            f"u{i}",
            UnitKind.BLOCK,
            tuple(ParamShape(f"u{i}.{kind}", n, kind == "t") for kind, n in zip("tf", pair, strict=True)),
        )
        for i, pair in enumerate(UNITS)
    ]
    setup = RuntimeSetup(
        stage=3,
        param_dtype=dtype,
        offload_optimizer=OffloadDevice.CPU,
        offload_param=OffloadDevice.NVME,
        param_buffers=buffers,
        param_buffer_numel=size,
    )
    return plan_layout(shapes, setup)


Maker = Callable[[ArenaLayout], tuple[ParamSwapper, dict[tuple[str, Buffer], torch.Tensor]]]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Maker]:
    """Makes the reader of a layout's parameters, filled, and what it was filled with."""
    with IoEngine(Aio(block_size=8192, queue_depth=4)) as engine:

        def make(layout: ArenaLayout) -> tuple[ParamSwapper, dict[tuple[str, Buffer], torch.Tensor]]:
            dtype = torch.bfloat16 if layout.setup.param_dtype is DType.BF16 else torch.float32
            pairs = [pair for chunks in param_chunks(layout).values() for pair in chunks]
            file = SwapFile.create(tmp_path / "params.swap", block_sizes(pairs, dtype.itemsize), engine)
            memory = pinned.allocate(layout.setup.param_buffers * layout.param_buffer, dtype, register=False)
            params = ParamSwapper(layout, memory, file, CPU)
            held = {}
            for unit in layout.units:
                for buffer, flat in ((TRAINED, unit.trainable), (FROZEN, unit.frozen)):
                    if flat is not None:
                        values = held[unit.shape.name, buffer] = torch.randn(flat.shard).to(dtype)
                        params.write(unit.shape.name, buffer, values)
            return params, held

        yield make


def brought(params: ParamSwapper, layout: ArenaLayout, coming: list[FetchRequest]) -> dict[Buffer, torch.Tensor]:
    unit = next(unit for unit in layout.units if unit.shape.name == coming[0].unit)
    flats = {TRAINED: unit.trainable, FROZEN: unit.frozen if coming[0].frozen else None}
    targets = {buffer: torch.zeros(flat.shard, dtype=params.dtype) for buffer, flat in flats.items() if flat is not None}
    params.fetch(iter(coming), targets, Stream(CPU))
    return targets


@pytest.mark.parametrize(("buffers", "size"), [(1, 2048), (2, 4096), (3, 10_000), (5, 100_000)])
@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP32])
def test_whatever_is_expected_what_comes_is_right(made: Maker, buffers: int, size: int, dtype: DType) -> None:
    layout = layout_of(buffers, size, dtype)
    assert layout.param_buffer == min(size // 2048 * 2048, 16_384)  # u3's 12,345 and 10, each on pages of its own
    params, held = made(layout)
    chance = random.Random(buffers)
    wants = [
        FetchRequest(f"u{i}", frozen) for i, pair in enumerate(UNITS) for frozen in ((False, True) if pair[1] else (False,))
    ]
    wants = [want for want in wants if want.frozen or UNITS[int(want.unit[1:])][0]]
    coming: list[FetchRequest] = []
    for _ in range(60):
        if len(coming) < 2 or chance.random() < 0.3:  # it comes otherwise than was expected
            coming = chance.choices(wants, k=chance.randrange(1, 9))
        found = brought(params, layout, coming)
        for buffer, values in found.items():
            assert torch.equal(values, held[coming[0].unit, buffer]), coming
        coming = coming[1:]
        if chance.random() < 0.2:
            unit, buffer = chance.choice(list(held))
            held[unit, buffer] = torch.randn(held[unit, buffer].shape).to(params.dtype)
            params.write(unit, buffer, held[unit, buffer])
            assert torch.equal(params.read(unit, buffer, 3, 60), held[unit, buffer][3:60])
    params.drop_prefetch()


def test_batches_fill_buffers_and_no_more(made: Maker) -> None:
    layout = layout_of(3, 10_000)
    params, _ = made(layout)
    for want, batches in params._batches.items():
        for batch in batches:
            assert all(part.at % 2048 == 0 for part in batch.parts)
            assert batch.parts[-1].at + batch.parts[-1].chunk.numel <= layout.param_buffer
        parts = [part for batch in batches for part in batch.parts]
        for buffer, flat in ((TRAINED, 0), (FROZEN, 1)):
            numel = UNITS[int(want.unit[1:])][flat] if buffer is TRAINED or want.frozen else 0
            chunks = [part.chunk for part in parts if part.buffer is buffer]
            assert [chunk.begin for chunk in chunks[1:]] == [chunk.end for chunk in chunks[:-1]]
            assert (chunks[-1].end if chunks else 0) == -(-numel // 64) * 64
    assert [len(params._batches[FetchRequest(f"u{i}", True)]) for i in range(5)] == [1, 2, 1, 2, 1]


def test_reads_come_behind_the_writes_of_an_update(made: Maker) -> None:
    layout = layout_of(4, 100_000)
    params, held = made(layout)
    coming = [FetchRequest(f"u{i}", True) for i in range(5)]
    brought(params, layout, coming)
    params.block_reads(f"u{i}" for i in (0, 1, 3, 4))
    assert not params._queue  # what had been read ahead is old
    params.prefetch(iter(coming))
    assert [one.transfers is not None for one in params._queue] == [False] * 5  # in order, so u2 waits behind u1, too
    fresh = {i: torch.randn(layout.units[i].trainable.shard).to(params.dtype) for i in (0, 1, 3, 4)}
    keep = []

    def update() -> None:
        for i, values in fresh.items():
            for buffer, chunk in param_chunks(layout)[f"u{i}"]:
                if buffer is TRAINED:
                    page = pinned.allocate(-(-chunk.numel // 2048) * 2048, params.dtype, register=False)
                    page[: chunk.numel].copy_(values[chunk.begin : chunk.end])
                    keep.append(page)
                    params.record_write(chunk.block(TRAINED), params.file.write(chunk.block(TRAINED), page.view(torch.uint8)))
            params.unblock_reads(f"u{i}")

    worker = threading.Thread(target=update)
    worker.start()
    worker.join()
    assert [one.transfers is not None for one in params._queue] == [True] * 4 + [False]  # as many as there are buffers
    for i in range(5):
        found = brought(params, layout, coming[i:])
        assert torch.equal(found[FROZEN], held[f"u{i}", FROZEN]) if UNITS[i][1] else FROZEN not in found
        if i in fresh:
            assert torch.equal(found[TRAINED], fresh[i])
