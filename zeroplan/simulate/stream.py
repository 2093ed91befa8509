"""Recording a stream of device allocations."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from zeroplan.core.buffers import Buffer
from zeroplan.core.units import GIB
from zeroplan.simulate.allocator import run_allocator
from zeroplan.simulate.allocator_config import AllocatorConfig
from zeroplan.simulate.allocator_events import OP_BITS, AllocatorOp
from zeroplan.simulate.timeline import Note, Timeline

_FREE, _RECORD, _SYNC, _COMPLETE, _EMPTY, _MARK, _RESET = (int(op) for op in list(AllocatorOp)[1:])


class Stretch:
    """Allocations and frees on the compute stream that are recorded together, again and again; storages are the caller's ids.

    A column `value` holds bytes for an allocation; for a free it is filled in when the handles are known.
    """

    __slots__ = ("buffers", "code", "inner", "last", "made", "notes", "outer", "value")

    def __init__(self) -> None:
        self.code = array("q")
        self.value = array("q")
        self.made: list[tuple[int, int]] = []  # allocations: event, storage
        self.buffers: list[Buffer] = []
        self.notes: list[Note] = []
        self.inner: list[tuple[int, int]] = []  # frees of what the stretch allocates: event, allocation
        self.outer: list[tuple[int, int]] = []  # frees of what was there before: event, storage
        self.last: dict[int, int] = {}  # storages that outlive the stretch: their allocation

    def alloc(self, storage: int, nbytes: int, buffer: Buffer, note: Note) -> None:
        """As :meth:`Recorder.alloc`, of a storage."""
        self.last[storage] = len(self.buffers)
        self.made.append((len(self.code), storage))
        self.code.append(0)
        self.value.append(nbytes)
        self.buffers.append(buffer)
        self.notes.append(note)

    def free(self, storage: int) -> None:
        """As :meth:`Recorder.free`, of a storage."""
        made = self.last.pop(storage, None)
        if made is None:
            self.outer.append((len(self.code), storage))
        else:
            self.inner.append((len(self.code), made))
        self.code.append(_FREE)
        self.value.append(0)


class Recorder:
    """Collects allocations and frees in the order in which they happen.

    The columns are those of Note [Event columns]. An engine's schedule calls :meth:`alloc` and :meth:`free`; nothing is
    simulated until :func:`simulate` reads the columns. A call costs well under a microsecond.
    """

    __slots__ = ("buffers", "code", "marks", "notes", "stretches", "value")

    def __init__(self) -> None:
        self.code = array("q")
        self.value = array("q")
        self.buffers: list[Buffer] = []  # by handle
        self.notes: list[Note] = []  # by handle
        self.marks: list[str] = []
        self.stretches: list[tuple[int, Stretch]] = []  # with the event that each begins at

    def __len__(self) -> int:
        """Number of events."""
        return len(self.code)

    def alloc(self, nbytes: int, buffer: Buffer, *, stream: int = 0, note: Note = -1) -> int:
        """Allocates `nbytes` (as requested, not rounded; 0 makes a handle without a block) and returns its handle.

        Args:
            nbytes: bytes requested.
            buffer: what the bytes are.
            stream: the stream that is current; freed memory is reused only on the stream that it was allocated on.
            note: who asked, such as a module's index or name; :meth:`Timeline.alive_by_note` groups by it.
        """
        self.code.append(stream << OP_BITS)
        self.value.append(nbytes)
        self.notes.append(note)
        buffers = self.buffers
        buffers.append(buffer)
        return len(buffers) - 1

    def free(self, handle: int) -> None:
        """Gives a block back to the allocator's cache, at once or, if streams were recorded on it, once they are done."""
        self.code.append(_FREE)
        self.value.append(handle)

    def play(self, stretch: Stretch, live: list[int]) -> None:
        """Records a stretch.

        Args:
            stretch: what is allocated and freed.
            live: by storage the handle that it has now; updated.
        """
        value, start, base = self.value, len(self.value), len(self.buffers)
        self.stretches.append((start, stretch))
        self.code.extend(stretch.code)
        value.extend(stretch.value)
        self.buffers.extend(stretch.buffers)
        self.notes.extend(stretch.notes)
        for event, made in stretch.inner:
            value[start + event] = base + made
        for event, storage in stretch.outer:
            value[start + event] = live[storage]
        for storage, made in stretch.last.items():
            live[storage] = base + made

    def resized(self, sizes: Sequence[int]) -> Recorder:
        """The same events where the storages of the stretches have other sizes; all but the sizes is shared, not copied.

        Args:
            sizes: by storage its bytes.
        """
        other = Recorder()
        other.code, other.buffers, other.notes, other.marks = self.code, self.buffers, self.notes, self.marks
        other.stretches = self.stretches
        other.value = value = self.value[:]
        for start, stretch in self.stretches:
            for event, storage in stretch.made:
                value[start + event] = sizes[storage]
        return other

    def record_stream(self, handle: int, stream: int) -> None:
        """What ``Tensor.record_stream`` does: a later :meth:`free` waits until `stream` has caught up."""
        self.code.append(_RECORD | stream << OP_BITS)
        self.value.append(handle)

    def synchronize(self, stream: int) -> None:
        """The device has done all work enqueued on `stream` so far: its deferred frees are reclaimed by the next alloc."""
        self.code.append(_SYNC | stream << OP_BITS)
        self.value.append(0)

    def complete(self, handle: int) -> None:
        """One deferred free takes effect now (for replaying recorded histories, which say when)."""
        self.code.append(_COMPLETE)
        self.value.append(handle)

    def empty_cache(self) -> None:
        """What ``torch.cuda.empty_cache`` does."""
        self.code.append(_EMPTY)
        self.value.append(0)

    def mark(self, name: str) -> None:
        """A point whose totals are wanted. A mark's peaks are those since the mark before it."""
        self.code.append(_MARK)
        self.value.append(len(self.marks))
        self.marks.append(name)

    def reset_peak(self) -> None:
        """What ``torch.cuda.reset_peak_memory_stats`` does, which DeepSpeed calls while it initialises.

        The next mark's peaks are those since here; the peak of the whole run is not affected.
        """
        self.code.append(_RESET)
        self.value.append(0)


def simulate(
    recorder: Recorder,
    config: AllocatorConfig | None = None,
    limit: int | None = None,
    *,
    device_memory: int | None = None,
) -> Timeline:
    """Runs the recorded events through the caching allocator.

    Args:
        recorder: the events.
        config: the allocator's settings; torch's defaults if None.
        limit: bytes that the device can give the allocator (its memory without what others use); None never runs out.
        device_memory: bytes of the whole device, for a memory fraction; `limit`, or 80 GiB, if None.

    Raises:
        BadStream: when a handle is freed twice or was never made.
    """
    result = run_allocator(
        recorder.code,
        recorder.value,
        config or AllocatorConfig(),
        limit=limit,
        device_memory=device_memory or limit or 80 * GIB,
    )
    return Timeline(recorder.code, recorder.value, recorder.buffers, recorder.notes, recorder.marks, result)
