"""EventBlocks that are played are what their allocations and frees are one by one."""

from __future__ import annotations

import random

import pytest

from zeroplan.core.buffers import Buffer
from zeroplan.simulate.allocator import native
from zeroplan.simulate.event_blocks import EventBlocks
from zeroplan.simulate.recorder import Recorder
from zeroplan.simulate.steady_state import repeated

#: (storage, bytes), and (storage, -1) for a free.
Program = list[tuple[int, int]]


def tape(rng: random.Random) -> tuple[list[Program], EventBlocks]:
    """Storages that cross the event blocks' ends, each made once."""
    programs: list[Program] = []
    event_blocks, alive, made = EventBlocks(), set[int](), 0
    while len(programs) < 20:
        program: Program = []
        for _ in range(rng.randrange(12)):
            if alive and rng.random() < 0.5:
                storage = rng.choice(sorted(alive))
                alive.discard(storage)
                event_blocks.free(storage)
                program.append((storage, -1))
            else:
                program.append((made, rng.randrange(1 << 20)))
                event_blocks.alloc(made, program[-1][1], Buffer.ACTIVATION, made)
                alive.add(made)
                made += 1
        number = event_blocks.close()
        assert number == (len(programs) if program else None)
        programs += [program] if program else []
    return programs, event_blocks


def recorded(programs: list[Program], event_blocks: EventBlocks, sizes: list[int]) -> tuple[Recorder, Recorder, dict[int, int]]:
    """Three micro batches one by one, and played; other blocks come and go in between."""
    plain, whole = Recorder(), Recorder(event_blocks)
    live: dict[int, int] = {}
    for _ in range(3):
        for number, program in enumerate(programs):
            for storage, nbytes in program:
                if nbytes < 0:
                    plain.free(live[storage])
                else:
                    live[storage] = plain.alloc(sizes[storage], Buffer.ACTIVATION, note=storage)
            whole.play(number)
            for recorder in (plain, whole):
                recorder.free(recorder.alloc(512, Buffer.WORKSPACE, stream=1))
        for recorder in (plain, whole):
            recorder.mark("step")
    return plain, whole, live


@pytest.mark.parametrize("seed", range(3))
def test_event_blocks_equal_their_events(seed: int) -> None:
    rng = random.Random(seed)
    programs, event_blocks = tape(rng)
    plain, whole, live = recorded(programs, event_blocks, list(event_blocks.sizes))
    assert {storage: whole.handle_of(storage) for storage in live} == live
    assert (whole.code, whole.value) == (plain.code, plain.value)
    assert whole.labels_of(whole.handles) == plain.labels_of(plain.handles)
    assert len(whole) == len(plain) > 3 * whole.stored / 2 > 200

    sizes = [rng.randrange(1 << 20) for _ in event_blocks.sizes]
    assert whole.resized(sizes).value == recorded(programs, event_blocks, sizes)[0].value
    assert whole.value == plain.value


@pytest.mark.skipif(not native.available(), reason="library not built")
def test_the_twins_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = []
    for compiled in (True, False):
        monkeypatch.setattr(native, "available", lambda compiled=compiled: compiled)
        programs, event_blocks = tape(random.Random(3))
        whole = recorded(programs, event_blocks, list(event_blocks.sizes))[1]
        columns.append((whole.code, whole.value))
    assert columns[0] == columns[1]


def test_a_storage_is_made_once() -> None:
    event_blocks = EventBlocks()
    event_blocks.alloc(3, 8, Buffer.ACTIVATION, 0)
    with pytest.raises(ValueError, match="storage 3 is allocated twice"):
        event_blocks.alloc(3, 8, Buffer.ACTIVATION, 0)


@pytest.mark.skipif(not native.available(), reason="library not built")
def test_repeated_steps_of_the_twins_agree() -> None:
    """Handles and marks are counted on, sizes and streams are not."""
    recorder = Recorder()
    for step in range(2):
        kept = [recorder.alloc(1000 + at, Buffer.ACTIVATION, stream=at % 2) for at in range(5)]
        recorder.record_stream(kept[1], 2)
        for handle in kept:
            recorder.free(handle)
        recorder.complete(kept[1])
        recorder.mark(f"step{step}")
    half = len(recorder) // 2
    span = (recorder.code, recorder.value, half, 2 * half, 3)
    assert native.repeated(*span) == repeated(*span)
    assert repeated(recorder.code, recorder.value, 0, half, 1) == (recorder.code[half:], recorder.value[half:])
