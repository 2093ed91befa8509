"""The host allocator's rounding and caching, on cases worked out by hand."""

from __future__ import annotations

import pytest

from zeroplan.core.errors import BadInput
from zeroplan.core.sizes import GIB, MIB
from zeroplan.simulate.allocator.pinned_host import PinnedAllocator, PinnedConfig, pinned_bytes


@pytest.mark.parametrize(
    ("nbytes", "block"),
    [(0, 0), (1, 1), (3, 4), (4, 4), (MIB, MIB), (MIB + 1, 2 * MIB), (33 * GIB, 64 * GIB), (17 * GIB, 32 * GIB)],
)
def test_requests_are_rounded_to_a_power_of_two(nbytes, block):
    assert PinnedConfig().block_size(nbytes) == block
    assert pinned_bytes([nbytes, nbytes]) == 2 * block


def test_freed_blocks_stay_pinned_and_are_reused_within_their_power_of_two():
    pinned = PinnedAllocator()
    pinned.free(pinned.alloc(5 * MIB))  # 8 MiB
    assert (pinned.held, pinned.active) == (8 * MIB, 0)
    pinned.alloc(7 * MIB)  # takes the same block
    assert (pinned.held, pinned.active) == (8 * MIB, 8 * MIB)
    pinned.alloc(3 * MIB)  # a block of 8 MiB would do, but only the free list of 4 MiB is looked at
    assert pinned.held == 12 * MIB
    pinned.empty_cache()
    assert pinned.held == pinned.peak_held == 12 * MIB


def test_emptying_the_cache_unpins_what_is_free():
    pinned = PinnedAllocator()
    kept, freed = pinned.alloc(100), pinned.alloc(5 * MIB)
    pinned.free(freed)
    pinned.empty_cache()
    assert (pinned.held, pinned.resident) == (128, 4096)
    assert (pinned.peak_held, pinned.peak_resident) == (8 * MIB + 128, 8 * MIB + 4096)
    with pytest.raises(KeyError):
        pinned.free(freed)
    pinned.free(kept)


def test_beyond_the_rounding_threshold_blocks_are_exact():
    config = PinnedConfig.parse("expandable_segments:True,pinned_max_round_threshold_mb:16")
    pinned = PinnedAllocator(config)
    pinned.alloc(9 * MIB)
    pinned.free(pinned.alloc(33 * MIB))
    assert pinned.held == 16 * MIB + 33 * MIB
    pinned.alloc(40 * MIB)  # same power of two as 33, which is too small
    assert pinned.held == 16 * MIB + 33 * MIB + 40 * MIB


def test_beyond_the_cached_size_blocks_are_exact_and_unpinned_when_freed():
    pinned = PinnedAllocator(PinnedConfig.parse("pinned_max_cached_size_mb:8"))
    big, small = pinned.alloc(9 * MIB), pinned.alloc(5 * MIB)
    assert pinned.held == 9 * MIB + 8 * MIB
    pinned.free(big)
    pinned.free(small)
    assert pinned.held == 8 * MIB


def test_the_reserve_segment_is_pinned_once_and_serves_in_pages_until_used_up():
    pinned = PinnedAllocator(PinnedConfig.parse("pinned_reserve_segment_size_mb:1"))
    pinned.alloc(1)
    assert (pinned.held, pinned.resident) == (1, MIB)
    pinned.free(pinned.alloc(MIB // 2))
    assert pinned.resident == MIB
    pinned.alloc(MIB // 2)  # the cached block
    assert pinned.resident == MIB
    pinned.alloc(MIB // 2)  # a page is gone, so this no longer fits
    assert pinned.resident == MIB + MIB // 2


@pytest.mark.parametrize("text", ["pinned_max_cached_size_mb:x", "pinned_max_cached_size:1"])
def test_bad_settings(text):
    with pytest.raises(BadInput):
        PinnedConfig.parse(text)
