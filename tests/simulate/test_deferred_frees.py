"""Deferred frees at another pace: the same events with the completions elsewhere."""

from __future__ import annotations

from zeroplan.core.buffers import Buffer
from zeroplan.core.sizes import MIB
from zeroplan.planner.estimate import estimate_runs
from zeroplan.run.ask import Ask
from zeroplan.simulate.allocator.events import OP_BITS, AllocatorOp
from zeroplan.simulate.deferred_frees import DeferredFrees
from zeroplan.simulate.recorder import Recorder, simulate


def _recorded(behind: int) -> Recorder:
    """Six ticks of a micro batch, each with a block of 30 MiB that another stream uses, freed before the next tick."""
    recorder = Recorder()
    recorder.deferred_frees = deferred_frees = DeferredFrees(recorder, behind)
    deferred_frees.begin()
    for _ in range(6):
        deferred_frees.tick()
        deferred_frees.poll()
        handle = recorder.alloc(30 * MIB, Buffer.PARAM_FULL, stream=1)
        recorder.record_stream(handle, 0)
        deferred_frees.free(handle)
        recorder.free(handle)
    deferred_frees.complete_all()
    recorder.mark("step0")
    return recorder


def test_as_many_blocks_as_the_device_is_behind() -> None:
    """A tick behind, one block is used again and again; three behind, three are."""
    assert simulate(_recorded(1)).peak_reserved == 30 * MIB
    assert simulate(_recorded(3)).peak_reserved == 90 * MIB


def test_another_pace_is_what_would_have_been_recorded() -> None:
    near = _recorded(1)
    moved = near.with_lag([at + 3 for at in range(6)])  # freed after tick 1, 2, …: back at tick 4, 5, …
    expected = _recorded(3)
    assert (moved.code, moved.value) == (expected.code, expected.value)
    assert moved.labels_of(moved.handles) == expected.labels_of(expected.handles)
    unmoved = near.with_lag(())
    assert (unmoved.code, unmoved.value) == (near.code, near.value)


def test_nothing_is_back_before_an_earlier_block() -> None:
    """Only the second block is late; those behind it wait for it, as a stream goes in order, and four lie about at once."""
    near = _recorded(1)
    assert simulate(near.with_lag([1, 5, 3, 4, 5, 6])).peak_reserved == 4 * 30 * MIB


def test_a_whole_run_at_another_pace_allocates_the_same() -> None:
    """Llama-3.2-1B on four ranks: the same events but for the order of completions, of which none is lost."""
    request = Ask(model="meta-llama/Llama-3.2-1B", seq_len=1024, stage=3, gpus=4, gpu="H100", micro_batch=8)
    run = estimate_runs(request).runs[0]
    assert run is not None
    other = run.simulation.other_lags[0]

    def events(timeline: object) -> tuple[list[tuple[int, int]], list[int]]:
        code, value, _ = timeline.recorded  # type: ignore[attr-defined]
        mask, complete = (1 << OP_BITS) - 1, int(AllocatorOp.COMPLETE)
        pairs = list(zip(code, value, strict=True))
        kept = [pair for pair in pairs if pair[0] & mask != complete]
        return kept, sorted(operand for word, operand in pairs if word & mask == complete)

    assert events(other) == events(run.simulation.timeline)
    assert other.recorded[1] != run.simulation.timeline.recorded[1]
    assert other.peak_allocated == run.simulation.peak_allocated
