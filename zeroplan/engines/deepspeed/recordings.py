"""Recordings of what ranks allocate and free, kept to be used again: micro batches differ in the sizes of the tape's storages
only.

Note [Shapes of recordings]
    A schedule reads the rank and the order of the tape's events, never the bytes of its storages. So a recording serves every
    configuration that differs in its micro batch alone, as long as the tape has the same events: the sizes are put in,
    in a small part of the time that playing the tape takes. A search asks for the same few sharded layouts at many micro
    batches, and under two settings of the allocator.
    How far the device falls behind (device_lag.py) does depend on the sizes, and is put in as well
    (simulate/deferred_frees.py).
"""

from __future__ import annotations

from collections import OrderedDict

from zeroplan.engines.base import Case
from zeroplan.engines.deepspeed.rank import DeepSpeedRank
from zeroplan.engines.deepspeed.schedule import record_deepspeed
from zeroplan.engines.script import Scripts
from zeroplan.simulate.recorder import Recorder
from zeroplan.tape.expanded import ExpandedTape

#: Events that are kept, an event block counted as one: some 150 MB. And shapes of tapes whose scripts are kept.
MOST_EVENTS, MOST_TAPES = 5_000_000, 32


class Recordings:
    """Recordings by layout, rank, skipped steps and the tape's shape, the latest of them kept."""

    def __init__(self) -> None:
        self._played: OrderedDict[int, tuple[ExpandedTape, Scripts]] = OrderedDict()  # by shape, the tape that is played
        self._kept: OrderedDict[tuple[object, ...], tuple[ExpandedTape, Recorder]] = OrderedDict()
        self._events = 0

    def of(self, case: Case, tape: ExpandedTape, rank: DeepSpeedRank, skipped_steps: int) -> Recorder:
        """Return the rank's recording: an earlier one of the same shape with this tape's sizes, else a new one."""
        workload = case.workload.but(micro_batch=1)
        layout = (case.zero, case.zero_init, workload, case.cluster, case.parallel, rank.rank, skipped_steps, tape.shape)
        found = self._kept.get(layout)
        if found is None:
            played, scripts = self._tape_to_play(tape)
            recorder = record_deepspeed(rank, played, skipped_steps=skipped_steps, scripts=scripts)
            self._kept[layout] = (played, recorder)
            self._events += recorder.stored
            while self._events > MOST_EVENTS and len(self._kept) > 1:
                self._events -= self._kept.popitem(last=False)[1][1].stored
        else:
            self._kept.move_to_end(layout)
            played, recorder = found
        return recorder if played is tape else recorder.resized(tape.storage_bytes)

    def _tape_to_play(self, tape: ExpandedTape) -> tuple[ExpandedTape, Scripts]:
        """The first tape of this one's shape, whose scripts are at hand."""
        found = self._played.get(tape.shape)
        if found is None:
            found = self._played[tape.shape] = (tape, Scripts())
            if len(self._played) > MOST_TAPES:
                self._played.popitem(last=False)
        return found
