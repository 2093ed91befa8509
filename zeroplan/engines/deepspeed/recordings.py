"""What ranks allocate and free, kept to be used again: micro batches differ in the sizes of the tape's storages only.

Note [Shapes of recordings]
    A schedule reads the job and the order of the tape's events, never the bytes of its storages. So a recording serves every
    configuration with the same job but for its micro batch, as long as the tape has the same events: the sizes are put in,
    in a small part of the time that playing the tape takes. A search asks for the same few sharded layouts at many micro
    batches, and under two settings of the allocator.
    How far the device falls behind (device_lag.py) does depend on the sizes, and is put in as well
    (simulate/deferred_frees.py).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

from zeroplan.core.tape import ExpandedTape, Op
from zeroplan.engines.base import Case
from zeroplan.engines.deepspeed.job import Job
from zeroplan.engines.deepspeed.schedule import record_deepspeed
from zeroplan.engines.script import Scripts
from zeroplan.simulate.recorder import Recorder

#: Events that are kept, an event block counted as one: some 150 MB. And tapes whose sizes are at hand.
MOST_EVENTS, MOST_TAPES = 5_000_000, 32


@dataclass(frozen=True, slots=True)
class _Tape:
    """A stream, all of it that is not a size, hashed, and by storage its bytes."""

    stream: ExpandedTape
    shape: int
    sizes: list[int]

    @classmethod
    def of(cls, tape: ExpandedTape) -> _Tape:
        """Of a stream."""
        made = {arg: aux for op, arg, aux in zip(tape.op, tape.arg, tape.aux, strict=True) if op == Op.ALLOC}
        sizes = [made.get(storage, 0) for storage in range(1 + max(made, default=0))]
        events = (tuple(tape.op), tuple(tape.arg), tuple(tape.kind), tuple(tape.module))
        return cls(tape, hash((events, tape.modules, tape.params)), sizes)


class Recordings:
    """Recordings by layout, rank, skipped steps and the tape's shape, the latest of them kept."""

    def __init__(self) -> None:
        self._played: OrderedDict[int, tuple[ExpandedTape, Scripts]] = OrderedDict()  # by shape, the stream that is played
        self._kept: OrderedDict[tuple[object, ...], tuple[_Tape, Recorder]] = OrderedDict()
        self._events = 0
        self._tapes: OrderedDict[int, _Tape] = OrderedDict()

    def of(self, case: Case, expanded: ExpandedTape, job: Job) -> Recorder:
        """The job's recording: played, or an earlier one with this stream's sizes."""
        tape = self._tape(expanded)
        workload = replace(case.workload, micro_batch=1)
        layout = (case.zero, workload, case.cluster, job.rank, job.skipped_steps, tape.shape)
        found = self._kept.get(layout)
        if found is not None:
            self._kept.move_to_end(layout)
            known, recorder = found
            return recorder if known.stream is expanded else recorder.resized(tape.sizes)
        played, scripts = self._stream_to_play(tape)
        recorder = record_deepspeed(job, played, scripts)
        self._kept[layout] = (self._tape(played), recorder)
        self._events += recorder.stored
        while self._events > MOST_EVENTS and len(self._kept) > 1:
            self._events -= self._kept.popitem(last=False)[1][1].stored
        return recorder if played is expanded else recorder.resized(tape.sizes)

    def _stream_to_play(self, tape: _Tape) -> tuple[ExpandedTape, Scripts]:
        """The first stream of the tape's shape, whose scripts are at hand."""
        found = self._played.get(tape.shape)
        if found is None:
            found = self._played[tape.shape] = (tape.stream, Scripts())
            if len(self._played) > MOST_TAPES:
                self._played.popitem(last=False)
        return found

    def _tape(self, tape: ExpandedTape) -> _Tape:
        found = self._tapes.get(id(tape))
        if found is None:
            found = self._tapes[id(tape)] = _Tape.of(tape)  # holds the stream, so that its id stays its own
            if len(self._tapes) > MOST_TAPES:
                self._tapes.popitem(last=False)
        return found
