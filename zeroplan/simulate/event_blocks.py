"""A tape's allocations and frees between the points at which an engine acts, compiled once and recorded by their number.

Note [Event blocks]
    Between two such points (a module hook, a complete gradient) a tape only allocates and frees. Such an event block is the
    same in every micro batch, on every rank and under every stage, but for the handles, which are counted up, and for the
    bytes, which grow with the micro batch. So a recording names the event block, and its events are written out only when the
    allocator is to read them: an allocation with the bytes of its storage, a free with the handle that the event block which
    makes the storage gave it when it was last played. A storage is made in one place of the tape.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from zeroplan.core.buffers import Buffer
from zeroplan.simulate.allocator import native
from zeroplan.simulate.allocator.events import OP_BITS, AllocatorOp
from zeroplan.simulate.timeline import Note

#: In a recording's column of codes, beside :class:`AllocatorOp`: an event block is played, which the value numbers.
PLAY = 8

_ALLOC, _FREE = int(AllocatorOp.ALLOC), int(AllocatorOp.FREE)
_OP_MASK = (1 << OP_BITS) - 1


class EventBlocks:
    """The event blocks of one tape, in columns of 64-bit integers that the compiled library reads as they lie.

    Built by :meth:`alloc` and :meth:`free` in the tape's order, a :meth:`close` behind each event block.

    Attributes:
        begins: by event block its first event; the last entry is the number of events.
        allocations: by event block how many it makes.
        beyond: by event block its events beyond the one that plays it.
        op: by event ALLOC or FREE, on the compute stream.
        home: by event the event block that makes the storage.
        index: by event the storage of an allocation; of a free the storage's place among the allocations of `home`.
        sizes: by storage its bytes.
        place: by storage the event block that makes it, and its place among that event block's allocations.
        buffers, notes: by event block those of its allocations.
    """

    __slots__ = ("allocations", "begins", "beyond", "buffers", "home", "index", "notes", "op", "place", "sizes")

    def __init__(self) -> None:
        self.begins, self.allocations, self.beyond = array("q", [0]), array("q"), array("q")
        self.op, self.home, self.index, self.sizes = array("q"), array("q"), array("q"), array("q")
        self.place: dict[int, tuple[int, int]] = {}
        self.buffers: list[list[Buffer]] = [[]]
        self.notes: list[list[Note]] = [[]]

    def alloc(self, storage: int, nbytes: int, buffer: Buffer, note: Note) -> None:
        """An allocation of the open event block.

        Raises:
            ValueError: when the tape makes the storage a second time.
        """
        if storage in self.place:
            raise ValueError(f"storage {storage} is made twice")
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
        """A free of the open event block, of what the tape has made before."""
        home, index = self.place[storage]
        self.op.append(_FREE)
        self.home.append(home)
        self.index.append(index)

    def close(self) -> int | None:
        """Ends the open event block; its number, or None if nothing happens in it."""
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
    """The columns that the allocator reads (Note [Event columns]) from those of a recording, whose PLAY events are written out.

    Args:
        code, value: a recording's columns.
        event_blocks: what its PLAY events play.
        sizes: by storage its bytes.
        events: how many it comes to.
        compiled: True to insist on the compiled library, False on Python; None takes what is there.
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
    """The readable twin of ``zeroplan_stretches_write_out`` in ``csrc/cpu/allocator_stretches.cpp``."""
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
