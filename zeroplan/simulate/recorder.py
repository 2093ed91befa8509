"""Records device allocations and frees, and runs them through the caching allocator."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

from zeroplan.core.buffers import Buffer
from zeroplan.core.sizes import GIB
from zeroplan.simulate.allocator.config import AllocatorConfig
from zeroplan.simulate.allocator.events import OP_BITS, AllocatorOp
from zeroplan.simulate.allocator.run import run_allocator
from zeroplan.simulate.deferred_frees import DeferredFrees
from zeroplan.simulate.event_blocks import PLAY, EventBlocks, write_out
from zeroplan.simulate.timeline import Label, Note, Timeline

_FREE, _RECORD, _SYNC, _COMPLETE, _EMPTY, _MARK = (int(op) for op in list(AllocatorOp)[1:])


class Recorder:
    """Collects allocations and frees in the order in which they happen.

    An engine's schedule calls :meth:`alloc` and :meth:`free` for its own buffers and :meth:`play` for the tape's. Nothing is
    simulated until :func:`simulate` reads the columns.

    Args:
        event_blocks: the blocks that :meth:`play` plays.
    """

    __slots__ = (
        "_bases",
        "_beyond",
        "_buffers",
        "_code",
        "_firsts",
        "_made",
        "_notes",
        "_placed",
        "_played",
        "_value",
        "deferred_frees",
        "event_blocks",
        "marks",
        "sizes",
    )

    def __init__(self, event_blocks: EventBlocks | None = None) -> None:
        self.marks: list[str] = []
        self._code = array("q")
        self._value = array("q")
        self._buffers: list[Buffer] = []  # of the allocations that no event block makes
        self._notes: list[Note] = []
        self._made = 0  # handles so far
        self._beyond = 0  # events of event blocks that were played, beyond the one that plays each
        self._placed: dict[int, int] = {}  # streams of handles that event blocks make on another than the first
        self._played, self._firsts = array("q"), array("q")  # each event block that was played, and its first handle
        self.deferred_frees: DeferredFrees | None = None  # the schedule's, where a device's pace decides
        self.follow(event_blocks or EventBlocks())

    def follow(self, event_blocks: EventBlocks) -> None:
        """Set the event blocks to play. Call this before the first :meth:`play`."""
        self.event_blocks = event_blocks
        self.sizes: Sequence[int] = event_blocks.sizes
        self._bases = [0] * len(event_blocks.begins)  # by event block the first handle of when it was played last

    def __len__(self) -> int:
        """Return the number of events; an event block counts with all of its own."""
        return len(self._code) + self._beyond

    @property
    def stored(self) -> int:
        """The number of events; an event block counts as one."""
        return len(self._code)

    @property
    def handles(self) -> range:
        """Every handle, in the order of allocation."""
        return range(self._made)

    def columns(self) -> tuple[array[int], array[int]]:
        """Return the code and the value of every event; see Note [Event columns]."""
        if not self.event_blocks.beyond:
            return self._code, self._value
        code, value = write_out(self._code, self._value, self.event_blocks, self.sizes, len(self))
        return self._on_their_streams(code), value

    def _on_their_streams(self, code: array[int]) -> array[int]:
        """Return the codes with the streams of :meth:`place`."""
        if self._placed:
            mask, alloc = (1 << OP_BITS) - 1, int(AllocatorOp.ALLOC)
            made = [at for at, word in enumerate(code) if word & mask == alloc]
            for handle, stream in self._placed.items():
                code[made[handle]] = alloc | stream << OP_BITS
        return code

    @property
    def code(self) -> array[int]:
        """The column of codes."""
        return self.columns()[0]

    @property
    def value(self) -> array[int]:
        """The column of values."""
        return self.columns()[1]

    def labels_of(self, handles: Iterable[int]) -> list[Label]:
        """Return what the bytes of each handle are, and who asked for them."""
        blocks, played, firsts = self.event_blocks, self._played, self._firsts
        within = [0, *accumulate(blocks.allocations[block] for block in played)]  # handles of the event blocks before each
        found: list[Label] = []
        for handle in handles:
            begun = bisect_right(firsts, handle)
            block, at = (played[begun - 1], handle - firsts[begun - 1]) if begun else (-1, handle)
            if begun and at < blocks.allocations[block]:
                found.append((blocks.buffers[block][at], blocks.notes[block][at]))
            else:
                alone = handle - within[begun]
                found.append((self._buffers[alone], self._notes[alone]))
        return found

    def alloc(self, nbytes: int, buffer: Buffer, *, stream: int = 0, note: Note = -1) -> int:
        """Record an allocation and return its handle.

        Args:
            nbytes: bytes requested, not rounded; 0 makes a handle without a block.
            buffer: what the bytes are.
            stream: the current stream; the allocator reuses a block only on the stream that it was allocated on.
            note: who asked, such as a module's index or name; :meth:`Timeline.alive_by_buffer_and_note` groups by it.
        """
        self._code.append(stream << OP_BITS)
        self._value.append(nbytes)
        self._notes.append(note)
        self._buffers.append(buffer)
        handle = self._made
        self._made = handle + 1
        return handle

    def free(self, handle: int) -> None:
        """Record a free. The block returns to the cache at once, or when the streams recorded on it are done."""
        self._code.append(_FREE)
        self._value.append(handle)

    def free_all(self, handles: Iterable[int]) -> None:
        """Record the free of each."""
        for handle in handles:
            self.free(handle)

    def play(self, event_block: int) -> None:
        """Record an event block by its number."""
        self._code.append(PLAY)
        self._value.append(event_block)
        self._played.append(event_block)
        self._firsts.append(self._made)
        self._bases[event_block] = self._made
        self._made += self.event_blocks.allocations[event_block]
        self._beyond += self.event_blocks.beyond[event_block]

    def handle_of(self, storage: int) -> int:
        """The handle that a storage of the tape got when it was last allocated."""
        event_block, index = self.event_blocks.place[storage]
        return self._bases[event_block] + index

    def place(self, handle: int, stream: int) -> None:
        """Set the stream on which an event block has made a block."""
        self._placed[handle] = stream

    def resized(self, sizes: Sequence[int]) -> Recorder:
        """Return the recording with other sizes of the event blocks' storages; everything else is shared, not copied.

        Args:
            sizes: each storage's bytes.
        """
        other = Recorder()
        for name in Recorder.__slots__:
            setattr(other, name, getattr(self, name))
        other.sizes = sizes
        return other

    def with_lag(self, back: Sequence[int]) -> Recorder:
        """Return the recording on a device that is further behind; see Note [Another lag].

        Args:
            back: for each tick of a micro batch, the tick at which a free after it completes.
        """
        assert self.deferred_frees is not None, "recorded without deferred frees"
        return self._completing(self.deferred_frees.completions_with_lag(back))

    def _completing(self, points: Sequence[tuple[int, int, Sequence[int]]]) -> Recorder:
        """Return the recording with completions of deferred frees at other events.

        Args:
            points: the result of :meth:`DeferredFrees.completions_with_lag`.
        """
        other = self.resized(self.sizes)
        other._code, other._value = array("q"), array("q")
        begin = 0
        for event, there, handles in points:
            other._code += self._code[begin:event]
            other._value += self._value[begin:event]
            for handle in handles:
                other.complete(handle)
            begin = event + there
        other._code += self._code[begin:]
        other._value += self._value[begin:]
        other._beyond = self._beyond
        return other

    def record_stream(self, handle: int, stream: int) -> None:
        """Record ``Tensor.record_stream``: a later :meth:`free` waits for `stream`."""
        self._code.append(_RECORD | stream << OP_BITS)
        self._value.append(handle)

    def synchronize(self, stream: int) -> None:
        """Record that `stream` has done all of its work so far; the next allocation reclaims the frees that wait for it."""
        self._code.append(_SYNC | stream << OP_BITS)
        self._value.append(0)

    def complete(self, handle: int) -> None:
        """Record that one deferred free takes effect."""
        self._code.append(_COMPLETE)
        self._value.append(handle)

    def empty_cache(self) -> None:
        """Record ``torch.cuda.empty_cache``."""
        self._code.append(_EMPTY)
        self._value.append(0)

    def mark(self, name: str) -> None:
        """Record a named point whose totals are wanted. Its peaks are those since the mark before it."""
        self._code.append(_MARK)
        self._value.append(len(self.marks))
        self.marks.append(name)


def simulate(
    recorder: Recorder,
    config: AllocatorConfig | None = None,
    limit: int | None = None,
    *,
    device_memory: int | None = None,
) -> Timeline:
    """Run the recorded events through the caching allocator.

    Args:
        config: the allocator's settings; None takes torch's defaults.
        limit: bytes that the device can give to the allocator; None for no limit.
        device_memory: bytes of the whole device, of which a memory fraction is a part; None takes `limit`, else 80 GiB.

    Raises:
        BadStream: when a handle is freed twice or was never allocated.
    """
    code, value = recorder.columns()
    known = device_memory or limit or 80 * GIB
    result = run_allocator(code, value, config or AllocatorConfig(), limit=limit, device_memory=known)
    return Timeline(code, value, recorder, result)
