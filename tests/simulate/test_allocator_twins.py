"""The compiled allocator equals the Python one, event by event, and both keep the books balanced."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroplan.core.buffers import Buffer
from zeroplan.core.sizes import MIB
from zeroplan.simulate.allocator import native
from zeroplan.simulate.allocator.config import AllocatorConfig
from zeroplan.simulate.allocator.events import OP_BITS, AllocatorOp
from zeroplan.simulate.allocator.run import run_allocator
from zeroplan.simulate.recorder import Recorder

CONFIGS = [
    "",
    "expandable_segments:True",
    "max_split_size_mb:20",
    "max_split_size_mb:40,max_non_split_rounding_mb:30",
    "expandable_segments:True,max_split_size_mb:24",
    "roundup_power2_divisions:[2:2,4:1,16:8,>:4]",
    "large_segment_size_mb:32,expandable_segments:True",
    "large_segment_size_mb:12",
    "garbage_collection_threshold:0.3,per_process_memory_fraction:0.9",
    "garbage_collection_threshold:0.2,per_process_memory_fraction:0.8,max_split_size_mb:20",
    "per_process_memory_fraction:0.7,expandable_segments:True",
]
SIZES = st.one_of(
    st.integers(0, 5000),
    st.integers(MIB - 2048, MIB + 2048),
    st.integers(1, 64).map(lambda mib: mib * MIB),
    st.integers(1, 64 * MIB),
)
STEP = st.one_of(
    st.tuples(st.just("alloc"), SIZES, st.integers(0, 2)),
    st.tuples(st.just("alloc"), SIZES, st.just(0)),
    st.tuples(st.just("free"), st.integers(0, 1 << 20), st.just(0)),
    st.tuples(st.just("record"), st.integers(0, 1 << 20), st.integers(0, 3)),
    st.tuples(st.just("sync"), st.just(0), st.integers(0, 3)),
    st.tuples(st.sampled_from(["empty", "mark", "mark"]), st.just(0), st.just(0)),
)


@st.composite
def streams(draw) -> Recorder:
    recorder, live = Recorder(), []
    for kind, number, stream in draw(st.lists(STEP, max_size=120)):
        if kind == "alloc":
            live.append(recorder.alloc(number, Buffer.ACTIVATION, stream=stream))
        elif kind == "free" and live:
            recorder.free(live.pop(number % len(live)))
        elif kind == "record" and live:
            recorder.record_stream(live[number % len(live)], stream)
        elif kind == "sync":
            recorder.synchronize(stream)
        elif kind == "empty":
            recorder.empty_cache()
        elif kind == "mark":
            recorder.mark("mark")
    recorder.mark("end")
    return recorder


@pytest.mark.skipif(not native.available(), reason="library not built")
@settings(max_examples=400)
@given(streams(), st.sampled_from(CONFIGS), st.sampled_from([None, 60 * MIB, 200 * MIB, 1024 * MIB]))
def test_the_twins_agree(recorder, text, limit):
    config = AllocatorConfig.parse(text)
    known = {"limit": limit, "device_memory": limit or 1024 * MIB}
    python = run_allocator(recorder.code, recorder.value, config, compiled=False, **known)
    compiled = run_allocator(recorder.code, recorder.value, config, compiled=True, **known)
    assert compiled == python


@settings(max_examples=200)
@given(streams(), st.sampled_from(CONFIGS), st.sampled_from([None, 200 * MIB]))
def test_the_books_balance(recorder, text, limit):
    """Totals recomputed from the blocks and segments alone, which the allocator reports one by one."""
    config = AllocatorConfig.parse(text)
    result = run_allocator(recorder.code, recorder.value, config, limit=limit, device_memory=limit or 1024 * MIB)
    live: dict[int, int] = {}
    marks = iter(result.marks)
    made = peak = reserved = at = 0
    for event in range(result.events):
        op, operand = recorder.code[event] & ((1 << OP_BITS) - 1), recorder.value[event]
        while at < len(result.segments) and result.segments[at].event == event:
            reserved += result.segments[at].size
            at += 1
        if op == AllocatorOp.ALLOC:
            live[made] = result.block_sizes[made]
            assert live[made] >= operand
            made += 1
        elif op == AllocatorOp.FREE:
            del live[operand]
        peak = max(peak, sum(live.values()))
        if op == AllocatorOp.MARK:
            totals = next(marks)
            assert totals.allocated == sum(live.values())
            assert totals.reserved == reserved
            assert totals.allocated <= totals.active <= totals.reserved
            assert totals.largest_free <= totals.reserved - totals.active
            assert totals.reserved <= (limit or totals.reserved)
    assert result.peak_allocated == peak
