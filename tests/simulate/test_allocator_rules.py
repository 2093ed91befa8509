"""The allocator's rules, one at a time, on streams whose outcome can be worked out by hand; both twins must agree."""

from __future__ import annotations

import pytest

from zeroplan.core.buffers import Buffer
from zeroplan.core.sizes import GIB, MIB
from zeroplan.simulate.allocator import native
from zeroplan.simulate.allocator.config import AllocatorConfig
from zeroplan.simulate.allocator.events import AllocatorResult, BadStream
from zeroplan.simulate.allocator.rules import round_size, segment_size
from zeroplan.simulate.allocator.run import run_allocator
from zeroplan.simulate.recorder import Recorder

TEMP = Buffer.ACTIVATION_TEMP
TWINS = [
    pytest.param(False, id="python"),
    pytest.param(True, id="compiled", marks=pytest.mark.skipif(not native.available(), reason="library not built")),
]


@pytest.fixture(params=TWINS)
def run(request):
    def go(recorder: Recorder, settings: str = "", **limits) -> AllocatorResult:
        config = AllocatorConfig.parse(settings)
        return run_allocator(recorder.code, recorder.value, config, compiled=request.param, **limits)

    return go


@pytest.fixture
def rec():
    return Recorder()


def segments(result: AllocatorResult) -> list[float]:
    """Changes of reserved memory in MiB."""
    return [change.size / MIB for change in result.segments]


@pytest.mark.parametrize(
    ("requested", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 1, 10 * MIB, 10 * MIB),
        (9 * MIB, 9 * MIB, 20 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (14 * MIB, 14 * MIB, 14 * MIB),
    ],
)
def test_sizes(run, rec, requested, block, segment):
    assert (round_size(requested), segment_size(block, 20 * MIB)) == (block, segment)
    rec.alloc(requested, TEMP)
    rec.mark("end")
    result = run(rec)
    assert result.marks[0].allocated == result.block_sizes[0] == block
    assert result.marks[0].reserved == segment
    assert result.marks[0].requested == requested


def test_small_requests_share_a_segment_until_it_is_full(run, rec):
    for _ in range(3):
        rec.alloc(MIB, TEMP)
    assert segments(run(rec)) == [2, 2]


def test_large_requests_share_a_segment_while_more_than_a_mebibyte_is_left(run, rec):
    for _ in range(2):
        rec.alloc(9 * MIB, TEMP)
    rec.alloc(MIB + 512, TEMP)
    result = run(rec)
    assert segments(result) == [20]
    assert result.final.allocated == 9 * MIB + 9 * MIB + 2 * MIB  # what would be left is too little to split off


def test_a_block_that_exceeds_its_request_by_at_most_a_mebibyte_is_not_split(run, rec):
    rec.free(rec.alloc(30 * MIB, TEMP))
    rec.free(rec.alloc(29 * MIB, TEMP))
    rec.alloc(29 * MIB - 512, TEMP)
    result = run(rec)
    assert segments(result) == [30]
    assert list(result.block_sizes) == [30 * MIB, 30 * MIB, 29 * MIB - 512]


def test_the_smallest_block_that_fits_is_taken(run, rec):
    big, middle = rec.alloc(64 * MIB, TEMP), rec.alloc(32 * MIB, TEMP)
    rec.free(big)
    rec.free(middle)
    rec.alloc(30 * MIB, TEMP)
    rec.alloc(60 * MIB, TEMP)
    assert segments(run(rec)) == [64, 32]


def test_freed_neighbours_merge(run, rec):
    handles = [rec.alloc(30 * MIB, TEMP)]
    rec.free(handles[0])
    parts = [rec.alloc(10 * MIB, TEMP) for _ in range(3)]
    for handle in (parts[0], parts[2], parts[1]):
        rec.free(handle)
    rec.mark("free")
    rec.alloc(30 * MIB, TEMP)
    result = run(rec)
    assert segments(result) == [30]
    assert result.marks[0].largest_free == 30 * MIB
    assert result.marks[0].allocated == 0


def test_streams_do_not_share_blocks(run, rec):
    rec.free(rec.alloc(30 * MIB, TEMP, stream=1))
    rec.alloc(30 * MIB, TEMP, stream=2)
    rec.alloc(30 * MIB, TEMP, stream=1)
    assert segments(run(rec)) == [30, 30]


def test_a_recorded_stream_delays_reuse_but_not_the_count(run, rec):
    handle = rec.alloc(30 * MIB, TEMP)
    rec.record_stream(handle, 5)
    rec.free(handle)
    rec.mark("freed")
    other = rec.alloc(30 * MIB, TEMP)  # the first block still awaits stream 5
    rec.synchronize(5)
    rec.free(rec.alloc(30 * MIB, TEMP))  # now it is back
    rec.free(other)
    result = run(rec)
    assert segments(result) == [30, 30]
    assert (result.marks[0].allocated, result.marks[0].active) == (0, 30 * MIB)


def test_recording_the_block_s_own_stream_changes_nothing(run, rec):
    handle = rec.alloc(30 * MIB, TEMP, stream=3)
    rec.record_stream(handle, 3)
    rec.free(handle)
    rec.alloc(30 * MIB, TEMP, stream=3)
    assert segments(run(rec)) == [30]


def test_a_block_waits_for_all_its_streams(run, rec):
    handle = rec.alloc(30 * MIB, TEMP)
    rec.record_stream(handle, 1)
    rec.record_stream(handle, 2)
    rec.free(handle)
    rec.synchronize(1)
    rec.alloc(30 * MIB, TEMP)
    rec.synchronize(2)
    rec.alloc(30 * MIB, TEMP)
    assert segments(run(rec)) == [30, 30]


def test_a_completed_free_takes_effect_at_once(run, rec):
    handle = rec.alloc(30 * MIB, TEMP)
    rec.record_stream(handle, 1)
    rec.free(handle)
    rec.complete(handle)
    rec.mark("done")
    rec.synchronize(1)  # must not free it again
    rec.alloc(30 * MIB, TEMP)
    result = run(rec)
    assert segments(result) == [30]
    assert result.marks[0].active == 0


def test_emptying_the_cache_returns_unsplit_segments_and_waits_for_streams(run, rec):
    pending, split = rec.alloc(30 * MIB, TEMP), rec.alloc(4 * MIB, TEMP)
    rec.record_stream(pending, 1)
    rec.free(pending)
    rec.free(rec.alloc(64 * MIB, TEMP))
    rec.free(rec.alloc(1000, TEMP))
    rec.empty_cache()
    rec.mark("empty")
    rec.free(split)
    result = run(rec)
    assert segments(result) == [30, 20, 64, 2, -30, -64, -2]  # the large pool first, by size; the split segment stays
    assert result.marks[0].reserved == 20 * MIB
    assert result.marks[0].largest_free == 16 * MIB


def test_peaks_are_those_since_the_mark_before(run, rec):
    big = rec.alloc(100 * MIB, TEMP)
    rec.free(big)
    rec.alloc(40 * MIB, TEMP)
    rec.mark("first")
    rec.alloc(20 * MIB, TEMP)
    rec.mark("second")
    rec.mark("third")
    result = run(rec)
    assert [(at.allocated / MIB, at.peak_allocated / MIB) for at in result.marks] == [(40, 100), (60, 60), (60, 60)]
    assert (result.peak_allocated, result.peak_event) == (100 * MIB, 0)
    assert result.peak_reserved == 100 * MIB


def test_at_the_limit_the_cache_is_emptied_and_the_request_retried(run, rec):
    rec.free(rec.alloc(60 * MIB, TEMP))
    rec.alloc(80 * MIB, TEMP)
    result = run(rec, limit=100 * MIB)
    assert segments(result) == [60, -60, 80]
    assert (result.retries, result.oom) == (1, None)


def test_out_of_memory_names_the_request(run, rec):
    rec.alloc(60 * MIB, TEMP)
    rec.free(rec.alloc(4 * MIB, TEMP))
    rec.mark("before")
    rec.alloc(41 * MIB, TEMP)
    rec.mark("never reached")
    result = run(rec, limit=100 * MIB)
    assert result.oom is not None
    assert (result.oom.event, result.oom.handle) == (4, 2)
    assert (result.oom.requested, result.oom.segment) == (41 * MIB, 42 * MIB)
    assert (result.oom.allocated, result.oom.reserved, result.oom.largest_free) == (60 * MIB, 60 * MIB, 0)
    assert len(result.marks) == 1
    assert result.events == 4


def test_a_memory_fraction_limits_reserved(run, rec):
    rec.alloc(60 * MIB, TEMP)
    assert run(rec, "per_process_memory_fraction:0.5", device_memory=100 * MIB).oom is not None
    assert run(rec, "per_process_memory_fraction:0.6", device_memory=100 * MIB).oom is None


def test_blocks_of_max_split_size_are_neither_split_nor_given_to_small_requests(run, rec):
    rec.free(rec.alloc(64 * MIB, TEMP))
    rec.alloc(30 * MIB, TEMP)  # would split the 64 MiB block
    rec.alloc(50 * MIB, TEMP)  # exceeds it by less than 20 MiB: takes the block whole
    result = run(rec, "max_split_size_mb:40")
    assert segments(result) == [64, 30]
    assert result.block_sizes[2] == 64 * MIB


def test_an_oversize_block_too_large_for_the_request_is_returned_when_memory_runs_out(run, rec):
    rec.free(rec.alloc(60 * MIB, TEMP))
    rec.free(rec.alloc(30 * MIB, TEMP))
    rec.alloc(40 * MIB, TEMP)  # 60 - 40 is not below the 20 MiB of rounding
    result = run(rec, "max_split_size_mb:40", limit=100 * MIB)
    assert segments(result) == [60, 30, -60, 40]  # the 30 MiB segment survives: no full flush
    assert result.retries == 0


def test_garbage_collection_returns_old_blocks_above_the_threshold(run, rec):
    for _ in range(3):
        held = [rec.alloc(size * MIB, TEMP) for size in (20, 30)]
        for handle in held:
            rec.free(handle)
    rec.alloc(28 * MIB, TEMP)  # takes the 30 MiB block's place in its pool: splits it
    rec.alloc(40 * MIB, TEMP)  # nothing fits, and 50 of 80 MiB are reserved
    settings = "garbage_collection_threshold:0.5,per_process_memory_fraction:0.8"
    result = run(rec, settings, device_memory=100 * MIB)
    assert segments(result) == [20, 30, -20, 40]
    assert result.retries == 0
    # Without a memory fraction torch ignores the threshold.
    assert segments(run(rec, "garbage_collection_threshold:0.5", device_memory=100 * MIB)) == [20, 30, 40]


@pytest.mark.parametrize(
    ("settings", "requested", "block"),
    [
        ("roundup_power2_divisions:4", 3000 * 1024, 3 * MIB),  # between 2 and 4 MiB: steps of 512 KiB
        ("roundup_power2_divisions:4", 2000, 2048),  # up to 512 times the divisions: as ever
        ("roundup_power2_divisions:2", 5 * MIB, 6 * MIB),
        ("roundup_power2_divisions:[4:2,8:4,>:1]", 5 * MIB, 6 * MIB),
        ("roundup_power2_divisions:[4:2,8:4,>:1]", 9 * MIB, 10 * MIB),
        ("roundup_power2_divisions:[4:2,8:4,>:1]", 17 * MIB + 512, 17 * MIB + 512),
        ("roundup_power2_divisions:[4:2,8:4,>:1]", 3 * MIB, 3 * MIB),
        ("roundup_power2_divisions:8", 1 * GIB + 1, GIB + GIB // 8),
    ],
)
def test_rounding_to_divisions_of_a_power_of_two(run, rec, settings, requested, block):
    assert round_size(requested, AllocatorConfig.parse(settings).roundup_power2_divisions) == block
    rec.alloc(requested, TEMP)
    assert run(rec, settings).final.reserved == segment_size(block, 20 * MIB)


def test_an_expandable_segment_grows_by_pages(run, rec):
    rec.alloc(30 * MIB, TEMP)
    rec.alloc(30 * MIB, TEMP)
    rec.alloc(1000, TEMP)
    result = run(rec, "expandable_segments:True")
    assert segments(result) == [40, 20, 2]
    assert list(result.block_sizes) == [30 * MIB, 30 * MIB, 1024]


def test_an_expandable_segment_extends_a_free_block_at_its_end(run, rec):
    first, second = rec.alloc(20 * MIB, TEMP), rec.alloc(20 * MIB, TEMP)
    rec.free(first)
    rec.free(second)
    rec.alloc(70 * MIB, TEMP)
    assert segments(run(rec, "expandable_segments:True")) == [20, 20, 40]
    assert segments(run(rec)) == [20, 20, 70]


def test_emptying_the_cache_unmaps_whole_pages_inside_free_blocks(run, rec):
    keep_left, middle, keep_right = rec.alloc(30 * MIB, TEMP), rec.alloc(50 * MIB, TEMP), rec.alloc(30 * MIB, TEMP)
    rec.free(middle)  # bytes 30 to 80 MiB: one whole page lies at 40, one at 60
    rec.empty_cache()
    rec.mark("unmapped")
    rec.alloc(50 * MIB, TEMP)  # fills the gap again
    rec.free(keep_left)
    rec.free(keep_right)
    result = run(rec, "expandable_segments:True")
    assert segments(result) == [40, 40, 40, -40, 40]
    assert result.marks[0].reserved == 80 * MIB
    assert result.marks[0].largest_free == 10 * MIB


def test_an_expandable_segment_retries_at_the_limit(run, rec):
    rec.free(rec.alloc(1000, TEMP))
    rec.alloc(60 * MIB, TEMP)
    rec.alloc(40 * MIB, TEMP)
    result = run(rec, "expandable_segments:True", limit=100 * MIB)
    assert segments(result) == [2, 60, -2, 40]
    rec.alloc(MIB // 2, TEMP)
    assert run(rec, "expandable_segments:True", limit=100 * MIB).oom is not None


def test_an_emptied_cache_is_ahead_of_a_completion(run, rec):
    """Emptying the cache waits for every stream, so frees on their way are done; their own ends change nothing."""
    handle = rec.alloc(60 * MIB, TEMP)
    rec.record_stream(handle, 1)
    rec.free(handle)
    rec.alloc(80 * MIB, TEMP)
    rec.complete(handle)
    rec.alloc(20 * MIB, TEMP)
    assert segments(run(rec, limit=100 * MIB)) == [60, -60, 80, 20]


def test_requests_of_nothing_make_handles_without_blocks(run, rec):
    handle = rec.alloc(0, TEMP)
    rec.record_stream(handle, 1)
    rec.free(handle)
    rec.mark("end")
    result = run(rec)
    assert list(result.block_sizes) == [0]
    assert result.marks[0].reserved == 0


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda rec: rec.free(7), "event 2: handle 7 is not live"),
        (lambda rec: rec.free(0), "event 2: handle 0 is not live"),
        (lambda rec: rec.record_stream(0, 1), "event 2: handle 0 is not live"),
        (lambda rec: rec.complete(0), "event 2: handle 0 is not awaiting a stream"),
        (lambda rec: rec.alloc(-1, TEMP), "event 2: a request of -1 bytes"),
        (lambda rec: (rec.code.append(15), rec.value.append(0)), "event 2: operation 15 is unknown"),
    ],
)
def test_impossible_streams_are_refused(run, rec, spoil, message):
    rec.free(rec.alloc(100, TEMP))
    spoil(rec)
    with pytest.raises(BadStream, match=message):
        run(rec)


def test_a_request_larger_than_the_device_has_a_range_of_its_own(run) -> None:
    """Without a limit, as where a search asks what a micro batch of thousands would take."""
    recorder = Recorder()
    for size in (30 * MIB, 3000 * MIB, 30 * MIB):
        recorder.alloc(size, Buffer.ACTIVATION)
    result = run(recorder, "expandable_segments:True", device_memory=1000 * MIB)
    assert list(result.block_sizes) == [30 * MIB, 3000 * MIB, 30 * MIB]
    assert result.peak_reserved == 3060 * MIB  # pages of 20 MiB: two, 150, and one more for what is left of the first range
