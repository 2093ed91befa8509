"""A run under a limit, played on until its steps repeat.

Note [Settling]
    Without a limit, reserved memory stops growing after a step or two: every later request finds the block that it found in
    the step before. Under a limit that need not be so. A step that empties the cache leaves other segments to the next one,
    whose requests are served from other remainders, so that the cache may have to be emptied again, elsewhere, and what cannot
    be returned then may be more: each step is a new draw. A run of Llama-3.2-3B that the first three steps would have let pass
    ended out of memory in the fourth, with 3 GiB of 36 in pieces. So the recorded run's last step is played again and again
    until it *settles*: a step neither takes nor returns a segment, or takes and returns the same ones as the step before.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from zeroplan.core.buffers import Buffer
from zeroplan.simulate.allocator import native
from zeroplan.simulate.allocator.config import AllocatorConfig
from zeroplan.simulate.allocator.events import OP_BITS, AllocatorOp
from zeroplan.simulate.timeline import Labels, Note, Timeline

#: Steps played on, at first and at most. Most runs that settle do so at once, the slowest of those tried in sixteen.
FIRST_STEPS, MOST_STEPS = 4, 24

_OP_MASK = (1 << OP_BITS) - 1
_ON_HANDLES = frozenset({int(AllocatorOp.FREE), int(AllocatorOp.RECORD_STREAM), int(AllocatorOp.COMPLETE)})


@dataclass(frozen=True, slots=True)
class SteadyRun:
    """A limited run, played on.

    Attributes:
        timeline: of all steps, recorded and played on.
        quiet: its last step takes no segment and returns none.
        steady: the last step takes and returns what the one before it did, which a quiet one does, too.
    """

    timeline: Timeline
    quiet: bool
    steady: bool


def settle(
    timeline: Timeline, limit: int, config: AllocatorConfig | None = None, *, device_memory: int | None = None
) -> SteadyRun:
    """The run under a limit, for as many steps as it takes to settle, at most :data:`MOST_STEPS` more than were recorded.

    Args:
        timeline: the run without a limit.
        limit: bytes that the device gives the allocator.
        config: the allocator's settings.
        device_memory: bytes of the whole device.

    Returns:
        The run as far as it came: neither quiet nor steady where it ended out of memory, or never settled.
    """
    found = _judged(timeline.under(limit, config, device_memory=device_memory))
    for times in (FIRST_STEPS, MOST_STEPS):
        if found.steady or found.timeline.oom is not None:
            break
        longer = play_on(timeline, times)
        if longer is None:
            break
        found = _judged(longer.under(limit, config, device_memory=device_memory))
    return found


def _judged(timeline: Timeline) -> SteadyRun:
    if timeline.oom is not None:
        return SteadyRun(timeline, quiet=False, steady=False)
    ends = _step_ends(timeline)
    changes: list[list[tuple[int, int]]] = [[] for _ in ends]
    step = 0
    rows = timeline.result.changes
    for event, size in zip(rows[::3], rows[1::3], strict=True):
        while step < len(ends) and event > ends[step]:
            step += 1
        if step == len(ends):
            break
        changes[step].append((event - (ends[step - 1] if step else 0), size))
    quiet = len(ends) > 1 and not changes[-1]
    return SteadyRun(timeline, quiet, quiet or (len(ends) > 2 and changes[-1] == changes[-2]))


def _step_ends(timeline: Timeline) -> list[int]:
    """The event of each step's mark."""
    marks = zip(timeline.marks, timeline.result.marks, strict=True)
    return [totals.event for mark, totals in marks if mark.name.startswith("step")]


class _PlayedOn:
    """Labels of a run whose last step was played again."""

    def __init__(self, labels: Labels, first: int, times: int) -> None:
        self._labels, self._first, self._times = labels, first, times

    @cached_property
    def marks(self) -> Sequence[str]:
        """The marks' names; further steps are numbered on."""
        names = list(self._labels.marks)
        at = [i for i, name in enumerate(names) if name.startswith("step")]
        step = names[at[-2] + 1 : at[-1]]
        return names + [name for k in range(self._times) for name in (*step, f"step{len(at) + k}")]

    @cached_property
    def buffers(self) -> Sequence[Buffer]:
        """By handle."""
        known = list(self._labels.buffers)
        return known + known[self._first :] * self._times

    @cached_property
    def notes(self) -> Sequence[Note]:
        """By handle."""
        known = list(self._labels.notes)
        return known + known[self._first :] * self._times


def play_on(timeline: Timeline, times: int) -> Timeline | None:
    """The same run with its last step played so many times more, not yet simulated: its totals are those of the shorter run.

    None where the last step does not repeat: where what it leaves is not what it found, under other handles.
    """
    ends = _step_ends(timeline)
    if len(ends) < 2:
        return None
    begin, end = ends[-2] + 1, ends[-1] + 1
    made = len(timeline.result.block_sizes)
    code, value, labels = timeline.recorded
    alloc = int(AllocatorOp.ALLOC)
    count = sum([word & _OP_MASK == alloc for word in code[begin:end]])
    found, left = set(timeline.alive(begin - 1)), set(timeline.alive(end - 1))
    if {handle + count for handle in found - left} != left - found:
        return None
    more_code, more_value = native.repeated(code, value, begin, end, times) or repeated(code, value, begin, end, times)
    return Timeline(code[:end] + more_code, value[:end] + more_value, _PlayedOn(labels, made - count, times), timeline.result)


def repeated(code: array[int], value: array[int], begin: int, end: int, times: int) -> tuple[array[int], array[int]]:
    """The readable twin of ``zeroplan_stream_repeat`` in ``csrc/cpu/allocator_stretches.cpp``."""
    step_code, step_value = code[begin:end], value[begin:end]
    count = sum(word & _OP_MASK == AllocatorOp.ALLOC for word in step_code)
    moved = [at for at, word in enumerate(step_code) if word & _OP_MASK in _ON_HANDLES]
    marks = [at for at, word in enumerate(step_code) if word & _OP_MASK == AllocatorOp.MARK]
    more_code, more_value = array("q"), array("q")
    for _ in range(times):
        for at in moved:
            step_value[at] += count
        for at in marks:
            step_value[at] += len(marks)
        more_code += step_code
        more_value += step_value
    return more_code, more_value
