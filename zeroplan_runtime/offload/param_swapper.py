"""Parameters in files: a rank's shards come through a few pinned buffers, ahead of the gathers that want them.

Note [Pieces]
    What comes through one buffer at once is a *piece* of a unit's shard: all of it where the buffer is long enough, else as
    many of its runs as fit. Trained and frozen parameters lie one after another in it, each run on a page of its own.

Note [Reading ahead]
    The schedule says with each unit that it wants which ones it will want then, and their reads are queued as far as there
    are buffers. A buffer is free again once the copy to the device has left it. What was read and is not wanted is dropped,
    so a wrong guess costs time and nothing else. When reads begin depends on how fast this rank's disk and device are; what
    is gathered in which order, which all ranks must agree upon, does not.

Note [Reading behind an update]
    From the order of an update until its writes are queued, a unit is *held*: nothing of it is read. The reads that come then
    are queued behind those writes, so that the disk goes on without a detour through the model's thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from zeroplan.core.buffers import Buffer
from zeroplan.core.layout import PAGE, PAGE_NUMEL, Layout, align
from zeroplan_runtime.offload.chunks import Run, runs_of_params
from zeroplan_runtime.offload.swap_file import SwapFile, Transfer
from zeroplan_runtime.streams import Event, Stream


@dataclass(frozen=True, slots=True)
class Want:
    """A unit whose shard is wanted on the device; `frozen` tells whether its frozen parameters are, too."""

    unit: str
    frozen: bool


@dataclass(frozen=True, slots=True)
class PiecePart:
    """A run in a piece: `at` is where it lies in the buffer, in elements."""

    buffer: Buffer
    run: Run
    at: int

    @property
    def block(self) -> str:
        """Its block in the file."""
        return self.run.block(self.buffer)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """See Note [Pieces]."""

    unit: str
    parts: tuple[PiecePart, ...]


@dataclass(slots=True, eq=False)
class Reading:
    """A piece that is expected; `transfers` are its reads once they are queued."""

    piece: Piece
    transfers: list[Transfer] | None = None


class ParamSwapper:
    """The parameters of a rank's units that rest in a file, and the buffers that they come through.

    The model's thread calls it, but for :meth:`wrote` and :meth:`release`, which are the updating thread's.

    Args:
        layout: which units, how long, how cut.
        memory: the pinned buffers, as long as the layout's row of them.
        file: with the blocks that :func:`~zeroplan_runtime.offload.chunks.runs_of_params` names.
        device: where the parameters go.
    """

    def __init__(self, layout: Layout, memory: torch.Tensor, file: SwapFile, device: torch.device) -> None:
        self.file = file
        self._buffers = list(memory.view(-1, layout.param_buffer))
        self._free = [Event(device) for _ in self._buffers]
        self._runs = runs_of_params(layout)
        self._pieces: dict[Want, list[Piece]] = {}
        for unit, runs in self._runs.items():
            trained = [pair for pair in runs if pair[0] is Buffer.PARAM_SHARD]
            self._pieces[Want(unit, False)] = _pieces(unit, trained, layout.param_buffer)
            self._pieces[Want(unit, True)] = _pieces(unit, runs, layout.param_buffer)
        self._queue: deque[Reading] = deque()  # the first of them is of piece number `_taken`
        self._taken = 0
        self._held: set[str] = set()
        self._writes: dict[str, Transfer] = {}  # by block: what its next read follows
        self._lock = threading.Lock()

    @property
    def dtype(self) -> torch.dtype:
        """The parameters'."""
        found: torch.dtype = self._buffers[0].dtype
        return found

    # ------------------------------------------------------------------ for the schedule

    def expect(self, coming: Iterable[Want]) -> int:
        """Reads ahead for these units, in the order in which they will be wanted; returns how many pieces the first has."""
        pieces: list[Piece] = []
        first: int | None = None
        for want in coming:
            pieces += self._pieces[want]
            first = len(pieces) if first is None else first
            if len(pieces) >= first + len(self._buffers):
                break
        with self._lock:
            same = 0
            for reading, piece in zip(self._queue, pieces, strict=False):
                if reading.piece is not piece:
                    break
                same += 1
            self._drop(same)
            self._queue.extend(Reading(piece) for piece in pieces[same:])
            self._advance()
        return first or 0

    def bring(self, coming: Iterable[Want], targets: Mapping[Buffer, torch.Tensor], stream: Stream) -> None:
        """Copies the first of these units to `targets` in `stream`, and reads ahead for the others. Waits for its reads.

        Raises:
            DiskFault: when a read failed, or a block is not what was written.
        """
        for _ in range(self.expect(coming)):
            number = self._taken % len(self._buffers)
            self._free[number].synchronize()
            with self._lock:
                reading = self._queue[0]
                transfers = reading.transfers = reading.transfers or self._read(reading.piece, number)
            for transfer in transfers:
                self.file.finish(transfer)
            with stream.as_current():
                for part in reading.piece.parts:
                    source = self._buffers[number][part.at : part.at + part.run.numel]
                    targets[part.buffer][part.run.begin : part.run.end].copy_(source, non_blocking=True)
            self._free[number].record(stream)
            with self._lock:
                self._queue.popleft()
                self._taken += 1
                self._advance()

    def forget(self) -> None:
        """Drops what was read ahead. Nothing reads the file any more when it returns."""
        with self._lock:
            self._drop(0)

    def _drop(self, begin: int) -> None:
        while len(self._queue) > begin:
            for transfer in self._queue.pop().transfers or ():
                transfer.settle()

    def _advance(self) -> None:
        """Queues the reads for which there are buffers, in order."""
        for i, reading in enumerate(self._queue):
            if i == len(self._buffers):
                return
            if reading.transfers is None:
                number = (self._taken + i) % len(self._buffers)
                if reading.piece.unit in self._held or not self._free[number].query():
                    return
                reading.transfers = self._read(reading.piece, number)

    def _read(self, piece: Piece, number: int) -> list[Transfer]:
        memory, begun = self._buffers[number], []
        for part in piece.parts:
            into = memory[part.at :].view(torch.uint8)[: self.file.held(part.block)]
            begun.append(self.file.read(part.block, into, after=self._writes.get(part.block)))
        return begun

    # ------------------------------------------------------------------ for the update

    def hold(self, units: Iterable[str]) -> None:
        """Reads nothing of these units until their update's writes are queued."""
        self.forget()
        with self._lock:
            self._held.update(units)

    def wrote(self, block: str, write: Transfer) -> None:
        """A block's write has been queued: later reads come behind it."""
        with self._lock:
            self._writes[block] = write

    def release(self, unit: str) -> None:
        """All writes of a unit's update have been queued, or it was not updated."""
        with self._lock:
            self._held.discard(unit)
            self._advance()

    # ------------------------------------------------------------------ between steps

    def put(self, unit: str, buffer: Buffer, values: torch.Tensor) -> None:
        """Writes this rank's shard of a unit's trained or frozen parameters. Not while an update is under way."""
        self.forget()
        under_way: deque[Transfer] = deque()
        for i, (_, run) in enumerate(pair for pair in self._runs[unit] if pair[0] is buffer):
            number = i % len(self._buffers)
            if len(under_way) == len(self._buffers):
                self.file.finish(under_way.popleft())
            self._free[number].synchronize()
            memory = self._buffers[number]
            memory[: run.numel].copy_(values[run.begin : run.end])
            pages = -(-run.numel * memory.element_size() // PAGE) * PAGE
            self._writes.pop(run.block(buffer), None)
            under_way.append(self.file.write(run.block(buffer), memory.view(torch.uint8)[:pages]))
        for transfer in under_way:
            self.file.finish(transfer)

    def get(self, unit: str, buffer: Buffer, begin: int, end: int) -> torch.Tensor:
        """Elements ``[begin, end)`` of this rank's shard of them, in new memory. Not while an update is under way."""
        self.forget()
        self._free[0].synchronize()
        memory = self._buffers[0]
        found = torch.empty(end - begin, dtype=memory.dtype)
        for _, run in (pair for pair in self._runs[unit] if pair[0] is buffer):
            first, last = max(begin, run.begin), min(end, run.end)
            if first < last:
                block = run.block(buffer)
                self.file.finish(self.file.read(block, memory.view(torch.uint8)[: self.file.held(block)]))
                found[first - begin : last - begin].copy_(memory[first - run.begin : last - run.begin])
        return found


def _pieces(unit: str, runs: Iterable[tuple[Buffer, Run]], most: int) -> list[Piece]:
    """See Note [Pieces]; `most` are a buffer's elements."""
    made: list[list[PiecePart]] = []
    end = most
    for buffer, run in runs:
        if end + run.numel > most:
            made.append([])
            end = 0
        made[-1].append(PiecePart(buffer, run, end))
        end += align(run.numel, PAGE_NUMEL)
    return [Piece(unit, tuple(parts)) for parts in made]
