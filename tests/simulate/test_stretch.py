"""A stretch recorded as a whole is what its allocations and frees are one by one."""

from __future__ import annotations

import random

from zeroplan.core.buffers import Buffer
from zeroplan.simulate.stream import Recorder, Stretch


def one_by_one(recorder: Recorder, program: list[tuple[int, int]], live: dict[int, int]) -> None:
    """`program` holds (storage, bytes), and (storage, -1) for a free."""
    for storage, nbytes in program:
        if nbytes < 0:
            recorder.free(live.pop(storage))
        else:
            live[storage] = recorder.alloc(nbytes, Buffer.ACTIVATION, note=storage)


def test_stretches_equal_their_events() -> None:
    """Storages cross the stretches' ends, come back under the same id, and others allocate in between."""
    rng = random.Random(7)
    plain, whole = Recorder(), Recorder()
    expected: dict[int, int] = {}
    live = [-1] * 12
    for _ in range(60):
        alive = set(expected)
        program = []
        for _ in range(rng.randrange(12)):
            storage = rng.randrange(12)
            program.append((storage, -1 if storage in alive else rng.randrange(1 << 20)))
            alive ^= {storage}
        stretch = Stretch()
        for storage, nbytes in program:
            if nbytes < 0:
                stretch.free(storage)
            else:
                stretch.alloc(storage, nbytes, Buffer.ACTIVATION, storage)
        one_by_one(plain, program, expected)
        whole.play(stretch, live)
        for recorder in (plain, whole):
            recorder.alloc(512, Buffer.WORKSPACE)
        assert {storage: live[storage] for storage in expected} == expected
    assert (whole.code, whole.value) == (plain.code, plain.value)
    assert (whole.buffers, whole.notes) == (plain.buffers, plain.notes)
    assert len(plain) > 200
