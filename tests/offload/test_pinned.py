"""Pinned blocks: exact, page-aligned, gone when their tensors are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from zeroplan.core.buffers import Buffer, Place
from zeroplan.core.errors import BadInput
from zeroplan_runtime.arena import Arena
from zeroplan_runtime.offload import pinned

MIB = 1 << 20


def block_bytes() -> int:
    return sum(block.size for block in pinned._blocks.values())


def resident() -> int:
    """Anonymous memory by the page tables. The counters of ``statm`` are off by pages that each core has not added yet."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Anonymous:", "Swap:")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("numel", [1, 1000, 4096, 1_000_003])
def test_exact_and_aligned(numel: int, dtype: torch.dtype) -> None:
    before = block_bytes()
    tensor = pinned.allocate(numel, dtype, register=False)
    assert (tensor.numel(), tensor.dtype) == (numel, dtype)
    assert tensor.data_ptr() % 4096 == 0
    assert not tensor.any()
    size = numel * dtype.itemsize
    assert size <= block_bytes() - before < size + 4096
    assert tensor.untyped_storage().nbytes() == size
    tensor.fill_(1)
    assert float(tensor[-1]) == 1
    del tensor
    assert block_bytes() == before


@pytest.mark.parametrize("threads", [1, 3])
def test_every_page_is_there_and_goes(threads: int) -> None:
    """48 MiB plus a byte: no power of two, no second copy while it is made, nothing left behind."""
    before = resident()
    tensor = pinned.allocate(48 * MIB + 1, torch.uint8, register=False, threads=threads)
    assert 48 * MIB <= resident() - before < 50 * MIB
    view = tensor[5:10]
    del tensor
    assert resident() - before >= 48 * MIB  # a view keeps the block
    pinned.Release(view)()
    assert resident() - before < 2 * MIB
    assert view.tolist() == [0] * 5  # the addresses are still there
    del view
    assert resident() - before < 2 * MIB


def test_through_the_arena() -> None:
    arena = Arena(torch.device("cpu"))
    before = block_bytes()
    tensor = arena.empty(Buffer.SWAP_BUFFER, 3 * 4096 + 5, torch.float32, place=Place.PINNED)
    assert tensor.data_ptr() % 4096 == 0
    assert arena.live(Place.PINNED) == (3 * 4096 + 5) * 4
    assert block_bytes() - before == 13 * 4096
    arena.free(tensor)
    del tensor
    assert block_bytes() == before
    assert arena.live(Place.PINNED) == 0


def test_none_at_all() -> None:
    assert pinned.allocate(0, torch.float32, register=False).numel() == 0


def test_more_than_there_is() -> None:
    with pytest.raises(BadInput, match=r"9,007,199,254,740,992 bytes of host memory could not be allocated"):
        pinned.allocate(1 << 53, torch.uint8, register=False)


def test_children_do_not_inherit() -> None:
    """A block is absent in a forked child, whose end leaves the parent's alone."""
    tensor = pinned.allocate(1 << 20, torch.uint8, register=False)
    tensor.fill_(7)
    address = f"{tensor.data_ptr():x}-"
    assert address in Path("/proc/self/maps").read_text()
    child = os.fork()
    if child == 0:
        try:
            os._exit(int(address in Path("/proc/self/maps").read_text()))
        finally:
            os._exit(2)  # never back into the tests
    assert os.waitpid(child, 0)[1] == 0
    assert int(tensor.sum()) == 7 << 20


@pytest.mark.gpu
def test_registered_for_the_gpu() -> None:
    before = block_bytes()
    tensor = pinned.allocate(5 * MIB + 3, torch.uint8, register=True)
    assert tensor.is_pinned()
    assert block_bytes() - before == 5 * MIB + 4096
    tensor.fill_(3)
    there = tensor.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert int(there.long().sum()) == 3 * tensor.numel()
    pinned.Release(tensor)()
    assert not tensor.is_pinned()


def test_release_for_later_keeps_nothing_alive_and_empties_what_is_left() -> None:
    gone, left = (pinned.allocate(1000, torch.float32, register=False).fill_(1.0) for _ in range(2))
    releases = [pinned.Release(tensor) for tensor in (gone, left)]
    before = block_bytes()
    del gone
    assert block_bytes() == before - pinned.PAGE
    assert [release.alive() for release in releases] == [False, True]
    part = left[10:20]
    for release in releases:
        release()
    assert not part.any()
