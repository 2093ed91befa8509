"""Event blocks: a tape's allocations and frees between two points at which an engine acts, compiled once, played by number.

Note [Event blocks]
    Between two such points (a module hook, a complete gradient) a tape only allocates and frees. These events are the same in
    every micro batch, on every rank and at every stage. Only handles, which are counted up, and bytes, which grow with the
    micro batch, differ. So a recording holds the block's number, and :func:`write_out` replaces it by the events when the
    allocator reads them: an allocation gets the bytes of its storage, a free the handle that the storage got when the block
    that allocates it was last played. Each storage is allocated at one place of the tape.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from zeroplan.core.buffers import Buffer
from zeroplan.simulate.allocator import native
from zeroplan.simulate.allocator.events import OP_BITS, AllocatorOp
from zeroplan.simulate.timeline import Note

#: A recording's code, beside those of :class:`AllocatorOp`, for an event block that is played; the value is its number.
PLAY = 8

_ALLOC, _FREE = int(AllocatorOp.ALLOC), int(AllocatorOp.FREE)
_OP_MASK = (1 << OP_BITS) - 1


class EventBlocks:
    """The event blocks of one tape, in columns of 64-bit integers that the compiled library reads as they are.

    Call :meth:`alloc` and :meth:`free` in the tape's order, and :meth:`close` at the end of each event block.

    Attributes:
        begins: each event block's first event, then the number of events.
        allocations: each event block's number of allocations.
        beyond: each event block's number of events, less the one that plays it.
        op: each event's operation, ALLOC or FREE, on the compute stream.
        home: for each event, the event block that allocates the storage.
        index: for an allocation, its storage; for a free, the storage's place among the allocations of `home`.
        sizes: each storage's bytes.
        place: each storage's event block, and its place among that block's allocations.
        buffers, notes: for each event block, those of its allocations.
    """

    __slots__ = ("allocations", "begins", "beyond", "buffers", "home", "index", "notes", "op", "place", "sizes")

    def __init__(self) -> None:
        self.begins, self.allocations, self.beyond = array("q", [0]), array("q"), array("q")
        self.op, self.home, self.index, self.sizes = array("q"), array("q"), array("q"), array("q")
        self.place: dict[int, tuple[int, int]] = {}
        self.buffers: list[list[Buffer]] = [[]]
        self.notes: list[list[Note]] = [[]]

    def alloc(self, storage: int, nbytes: int, buffer: Buffer, note: Note) -> None:
        """Add an allocation to the open event block. Raises ValueError: when the tape allocates the storage a second time."""
        if storage in self.place:
            raise ValueError(f"storage {storage} is allocated twice")
        buffers, event_block = self.buffers[-1], len(self.beyond)
        self.place[storage] = (event_block, len(buffers))
        self.op.append(_ALLOC)
        self.home.append(event_block)
        self.index.append(storage)
        sizes = self.sizes
        if storage >= len(sizes):
            sizes.extend([0] * (storage + 1 - len(sizes)))
        sizes[storage] = nbytes
        buffers.append(buffer)
        self.notes[-1].append(note)

    def free(self, storage: int) -> None:
        """Add a free to the open event block, of a storage that the tape has allocated before."""
        home, index = self.place[storage]
        self.op.append(_FREE)
        self.home.append(home)
        self.index.append(index)

    def close(self) -> int | None:
        """End the open event block and return its number, or None if it has no event."""
        if self.begins[-1] == len(self.op):
            return None
        self.beyond.append(len(self.op) - self.begins[-1] - 1)
        self.begins.append(len(self.op))
        self.allocations.append(len(self.buffers[-1]))
        self.buffers.append([])
        self.notes.append([])
        return len(self.beyond) - 1


def write_out(
    code: array[int],
    value: array[int],
    event_blocks: EventBlocks,
    sizes: Sequence[int],
    events: int,
    *,
    compiled: bool | None = None,
) -> tuple[array[int], array[int]]:
    """Replace each PLAY event of a recording's columns by its event block; see Note [Event columns].

    Args:
        sizes: each storage's bytes.
        events: the number of events in the result.
        compiled: True for the compiled library, False for Python; None takes the library where there is one.
    """
    if compiled is None:
        compiled = native.available()
    if compiled:
        columns = (event_blocks.begins, event_blocks.allocations, event_blocks.op, event_blocks.home, event_blocks.index)
        return native.write_out(code, value, columns, array("q", sizes), events)
    return _write_out(code, value, event_blocks, sizes)


def _write_out(
    code: array[int], value: array[int], event_blocks: EventBlocks, sizes: Sequence[int]
) -> tuple[array[int], array[int]]:
    """Write out in Python; the readable twin of ``zeroplan_event_blocks_write_out`` in
    ``csrc/cpu/allocator_event_blocks.cpp``.
    """
    whole_code, whole_value = array("q"), array("q")
    bases = [0] * len(event_blocks.begins)
    made = 0
    for word, operand in zip(code, value, strict=True):
        if word != PLAY:
            whole_code.append(word)
            whole_value.append(operand)
            made += (word & _OP_MASK) == _ALLOC
            continue
        bases[operand] = made
        for at in range(event_blocks.begins[operand], event_blocks.begins[operand + 1]):
            op, index = event_blocks.op[at], event_blocks.index[at]
            whole_code.append(op)
            whole_value.append(sizes[index] if op == _ALLOC else bases[event_blocks.home[at]] + index)
        made += event_blocks.allocations[operand]
    return whole_code, whole_value
