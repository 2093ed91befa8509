"""LAMB's tables fit the room that the layout gives them, however a flat buffer is cut."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeroplan.core.arena.segments import TILE, SegmentTable
from zeroplan_runtime.kernels import SegmentWorkspace, TensorSegments, make_segments

runs = st.lists(st.lists(st.integers(0, 3 * TILE), min_size=1, max_size=5), min_size=1, max_size=4)


@given(runs)
def test_any_cut_fits_and_nothing_overlaps(lengths: list[list[int]]) -> None:
    numel, count = sum(map(sum, lengths)), sum(map(len, lengths))
    table = SegmentTable.of(numel, count, len(lengths))
    room = SegmentWorkspace(torch.zeros(table.words), table)
    made = [make_segments([0, *itertools.accumulate(run)], "cpu", room) for run in lengths]
    spans = sorted(span(t) for one in made for t in (one.norms, one.partial, one.tiles, one.first_tile) if t.numel())
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    for one, run in zip(made, lengths, strict=True):
        assert all(t.data_ptr() % 16 == one.norms.data_ptr() % 16 for t in (one.norms, one.partial) if t.numel())
        check(one, run)


def span(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


def check(one: TensorSegments, run: list[int]) -> None:
    """Each element is in one tile, which is no longer than it may be and lies in its segment."""
    begins = [0, *itertools.accumulate(run)]
    assert one.first_tile.tolist()[-1] == len(one.tiles)
    ends = 0
    for begin, end, segment in one.tiles.tolist():
        assert begin == ends
        assert 0 < end - begin <= TILE
        assert begins[segment] <= begin < end <= begins[segment + 1]
        ends = end
    assert ends == begins[-1]


def test_by_hand() -> None:
    """Two tensors of 20 000 and 100 elements: three tiles of at most 16 384, cut at 16 384 and 20 000."""
    made = make_segments([0, 20000, 20100], "cpu")
    assert made.tiles.tolist() == [[0, 16384, 0], [16384, 20000, 0], [20000, 20100, 1]]
    assert made.first_tile.tolist() == [0, 2, 3]
    # Norms and partial sums of 16 bytes, tiles of 24, and where three segments and the end begin.
    assert 4 * SegmentTable.of(20100, 2).words == 2 * 16 + 3 * 16 + 3 * 24 + 3 * 8


def test_bounds_must_rise() -> None:
    with pytest.raises(ValueError, match="expected bounds that rise from 0"):
        make_segments([0, 5, 3], "cpu")
