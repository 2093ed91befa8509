"""A run under a memory limit, whose last step is repeated until the run is in a steady state.

Note [Steady state]
    Without a limit, reserved memory stops growing after a step or two, because every later request finds the block that it
    found in the step before. Under a limit this need not be so. A step that empties the cache leaves other segments to the
    next step. That step may have to empty the cache elsewhere, where more of it cannot be returned, and so on. A measured run
    of Llama-3.2-3B went through three steps and ran out of memory in the fourth, with 3 GiB of 36 in fragments. So the
    recording's last step is repeated until a step takes and returns no segment, or the same segments as the step before.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from zeroplan.simulate.allocator import native
from zeroplan.simulate.allocator.config import AllocatorConfig
from zeroplan.simulate.allocator.events import OP_BITS, AllocatorOp
from zeroplan.simulate.timeline import Label, Labels, Timeline

#: How often the last step is repeated, at first and at most. Of the runs tried, the slowest was steady after sixteen.
FIRST_STEPS, MOST_STEPS = 4, 24

_OP_MASK = (1 << OP_BITS) - 1
_ON_HANDLES = frozenset({int(AllocatorOp.FREE), int(AllocatorOp.RECORD_STREAM), int(AllocatorOp.COMPLETE)})


@dataclass(frozen=True, slots=True)
class SteadyRun:
    """A run under a limit.

    Attributes:
        timeline: the recorded steps and the repeated ones.
        quiet: whether the last step takes no segment and returns none.
        steady: whether the last step takes and returns the same segments as the one before, or is quiet.
    """

    timeline: Timeline
    quiet: bool
    steady: bool


def steady_run(
    timeline: Timeline, limit: int, config: AllocatorConfig | None = None, *, device_memory: int | None = None
) -> SteadyRun:
    """The run under a limit, with its last step repeated until it is steady, at most :data:`MOST_STEPS` times.

    Args:
        timeline: the run without a limit.
        limit: bytes that the device gives to the allocator.
        config: the allocator's settings.
        device_memory: bytes of the whole device.

    Returns:
        The run as far as it came. It is neither quiet nor steady where it ran out of memory or never repeated.
    """
    found = _judged(timeline.under(limit, config, device_memory=device_memory))
    for times in (FIRST_STEPS, MOST_STEPS):
        if found.steady or found.timeline.oom is not None:
            break
        longer = repeat_last_step(timeline, times)
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
    """Return the events at which the steps end."""
    marks = zip(timeline.marks, timeline.result.marks, strict=True)
    return [totals.event for mark, totals in marks if mark.name.startswith("step")]


class _RepeatedLabels:
    """The labels of a run of `made` handles whose last step is repeated `times` times. `first` is that step's first handle."""

    def __init__(self, labels: Labels, first: int, made: int, times: int) -> None:
        self._labels, self._first, self._made, self._times = labels, first, made, times

    @cached_property
    def marks(self) -> Sequence[str]:
        """The marks' names; repeated steps count on."""
        names = list(self._labels.marks)
        at = [i for i, name in enumerate(names) if name.startswith("step")]
        step = names[at[-2] + 1 : at[-1]]
        return names + [name for k in range(self._times) for name in (*step, f"step{len(at) + k}")]

    def labels_of(self, handles: Iterable[int]) -> list[Label]:
        """Return the label of each handle; a repeated step's are those of the step."""
        step = range(self._first, self._made)
        return self._labels.labels_of(h if h < self._made else step[(h - self._made) % len(step)] for h in handles)


def repeat_last_step(timeline: Timeline, times: int) -> Timeline | None:
    """The run with its last step repeated `times` times. It is not simulated yet: its totals are those of the shorter run.

    None where the step cannot be repeated: it does not leave alive what it found alive, under new handles.
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
    labels = _RepeatedLabels(labels, made - count, made, times)
    return Timeline(code[:end] + more_code, value[:end] + more_value, labels, timeline.result)


def repeated(code: array[int], value: array[int], begin: int, end: int, times: int) -> tuple[array[int], array[int]]:
    """Repeat the events from `begin` to `end` `times` times, with handles and marks counted on.

    The readable twin of ``zeroplan_stream_repeat`` in ``csrc/cpu/allocator_event_blocks.cpp``.
    """
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
