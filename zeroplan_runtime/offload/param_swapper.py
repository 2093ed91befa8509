"""Parameters in files: a rank's shards come through a few pinned buffers, ahead of the gathers that want them.

Note [Pieces]
    What comes through one buffer at once is a *batch* of a unit's shard: all of it where the buffer is long enough, else as
    many of its chunks as fit. Trained and frozen parameters lie one after another in it, each chunk on a page of its own.

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
from zeroplan_runtime.offload.chunks import Chunk, param_chunks
from zeroplan_runtime.offload.swap_file import SwapFile, Transfer
from zeroplan_runtime.streams import Event, Stream


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """A unit whose shard is wanted on the device; `frozen` tells whether its frozen parameters are, too."""

    unit: str
    frozen: bool


@dataclass(frozen=True, slots=True)
class BatchChunk:
    """A chunk in a batch: `at` is where it lies in the buffer, in elements."""

    buffer: Buffer
    chunk: Chunk
    at: int

    @property
    def block(self) -> str:
        """Its block in the file."""
        return self.chunk.block(self.buffer)


@dataclass(frozen=True, slots=True, eq=False)
class ReadBatch:
    """See Note [Pieces]."""

    unit: str
    parts: tuple[BatchChunk, ...]


@dataclass(slots=True, eq=False)
class PendingRead:
    """A batch that is expected; `transfers` are its reads once they are queued."""

    batch: ReadBatch
    transfers: list[Transfer] | None = None


class ParamSwapper:
    """The parameters of a rank's units that rest in a file, and the buffers that they come through.

    The model's thread calls it, but for :meth:`record_write` and :meth:`unblock_reads`, which are the updating thread's.

    Args:
        layout: which units, how long, how cut.
        memory: the pinned buffers, as long as the layout's row of them.
        file: with the blocks that :func:`~zeroplan_runtime.offload.chunks.param_chunks` names.
        device: where the parameters go.
    """

    def __init__(self, layout: Layout, memory: torch.Tensor, file: SwapFile, device: torch.device) -> None:
        self.file = file
        self._buffers = list(memory.view(-1, layout.param_buffer))
        self._last_copy = [Event(device) for _ in self._buffers]
        self._chunks = param_chunks(layout)
        self._batches: dict[FetchRequest, list[ReadBatch]] = {}
        for unit, chunks in self._chunks.items():
            trained = [pair for pair in chunks if pair[0] is Buffer.PARAM_SHARD]
            self._batches[FetchRequest(unit, False)] = _batches(unit, trained, layout.param_buffer)
            self._batches[FetchRequest(unit, True)] = _batches(unit, chunks, layout.param_buffer)
        self._queue: deque[PendingRead] = deque()  # the first of them is of batch number `_taken`
        self._taken = 0
        self._blocked: set[str] = set()
        self._writes: dict[str, Transfer] = {}  # by block: what its next read follows
        self._lock = threading.Lock()

    @property
    def dtype(self) -> torch.dtype:
        """The parameters'."""
        found: torch.dtype = self._buffers[0].dtype
        return found

    # ------------------------------------------------------------------ for the schedule

    def prefetch(self, coming: Iterable[FetchRequest]) -> int:
        """Reads ahead for these units, in the order in which they will be wanted; returns how many batches the first has."""
        batches: list[ReadBatch] = []
        first: int | None = None
        for want in coming:
            batches += self._batches[want]
            first = len(batches) if first is None else first
            if len(batches) >= first + len(self._buffers):
                break
        with self._lock:
            same = 0
            for pending, batch in zip(self._queue, batches, strict=False):
                if pending.batch is not batch:
                    break
                same += 1
            self._drop(same)
            self._queue.extend(PendingRead(batch) for batch in batches[same:])
            self._advance()
        return first or 0

    def fetch(self, coming: Iterable[FetchRequest], targets: Mapping[Buffer, torch.Tensor], stream: Stream) -> None:
        """Copies the first of these units to `targets` in `stream`, and reads ahead for the others. Waits for its reads.

        Raises:
            DiskFault: when a read failed, or a block is not what was written.
        """
        for _ in range(self.prefetch(coming)):
            number = self._taken % len(self._buffers)
            self._last_copy[number].synchronize()
            with self._lock:
                pending = self._queue[0]
                transfers = pending.transfers = pending.transfers or self._read(pending.batch, number)
            for transfer in transfers:
                self.file.finish(transfer)
            with stream.as_current():
                for part in pending.batch.parts:
                    source = self._buffers[number][part.at : part.at + part.chunk.numel]
                    targets[part.buffer][part.chunk.begin : part.chunk.end].copy_(source, non_blocking=True)
            self._last_copy[number].record(stream)
            with self._lock:
                self._queue.popleft()
                self._taken += 1
                self._advance()

    def drop_prefetch(self) -> None:
        """Drops what was read ahead. Nothing reads the file any more when it returns."""
        with self._lock:
            self._drop(0)

    def _drop(self, begin: int) -> None:
        while len(self._queue) > begin:
            for transfer in self._queue.pop().transfers or ():
                transfer.wait_until_idle()

    def _advance(self) -> None:
        """Queues the reads for which there are buffers, in order."""
        for i, pending in enumerate(self._queue):
            if i == len(self._buffers):
                return
            if pending.transfers is None:
                number = (self._taken + i) % len(self._buffers)
                if pending.batch.unit in self._blocked or not self._last_copy[number].query():
                    return
                pending.transfers = self._read(pending.batch, number)

    def _read(self, batch: ReadBatch, number: int) -> list[Transfer]:
        memory, begun = self._buffers[number], []
        for part in batch.parts:
            into = memory[part.at :].view(torch.uint8)[: self.file.stored_bytes(part.block)]
            begun.append(self.file.read(part.block, into, after=self._writes.get(part.block)))
        return begun

    # ------------------------------------------------------------------ for the update

    def block_reads(self, units: Iterable[str]) -> None:
        """Reads nothing of these units until their update's writes are queued."""
        self.drop_prefetch()
        with self._lock:
            self._blocked.update(units)

    def record_write(self, block: str, write: Transfer) -> None:
        """A block's write has been queued: later reads come behind it."""
        with self._lock:
            self._writes[block] = write

    def unblock_reads(self, unit: str) -> None:
        """All writes of a unit's update have been queued, or it was not updated."""
        with self._lock:
            self._blocked.discard(unit)
            self._advance()

    # ------------------------------------------------------------------ between steps

    def write(self, unit: str, buffer: Buffer, values: torch.Tensor) -> None:
        """Writes this rank's shard of a unit's trained or frozen parameters. Not while an update is under way."""
        self.drop_prefetch()
        under_way: deque[Transfer] = deque()
        for i, (_, chunk) in enumerate(pair for pair in self._chunks[unit] if pair[0] is buffer):
            number = i % len(self._buffers)
            if len(under_way) == len(self._buffers):
                self.file.finish(under_way.popleft())
            self._last_copy[number].synchronize()
            memory = self._buffers[number]
            memory[: chunk.numel].copy_(values[chunk.begin : chunk.end])
            pages = -(-chunk.numel * memory.element_size() // PAGE) * PAGE
            self._writes.pop(chunk.block(buffer), None)
            under_way.append(self.file.write(chunk.block(buffer), memory.view(torch.uint8)[:pages]))
        for transfer in under_way:
            self.file.finish(transfer)

    def read(self, unit: str, buffer: Buffer, begin: int, end: int) -> torch.Tensor:
        """Elements ``[begin, end)`` of this rank's shard of them, in new memory. Not while an update is under way."""
        self.drop_prefetch()
        self._last_copy[0].synchronize()
        memory = self._buffers[0]
        found = torch.empty(end - begin, dtype=memory.dtype)
        for _, chunk in (pair for pair in self._chunks[unit] if pair[0] is buffer):
            first, last = max(begin, chunk.begin), min(end, chunk.end)
            if first < last:
                block = chunk.block(buffer)
                self.file.finish(self.file.read(block, memory.view(torch.uint8)[: self.file.stored_bytes(block)]))
                found[first - begin : last - begin].copy_(memory[first - chunk.begin : last - chunk.begin])
        return found


def _batches(unit: str, chunks: Iterable[tuple[Buffer, Chunk]], most: int) -> list[ReadBatch]:
    """See Note [Pieces]; `most` are a buffer's elements."""
    made: list[list[BatchChunk]] = []
    end = most
    for buffer, chunk in chunks:
        if end + chunk.numel > most:
            made.append([])
            end = 0
        made[-1].append(BatchChunk(buffer, chunk, end))
        end += align(chunk.numel, PAGE_NUMEL)
    return [ReadBatch(unit, tuple(parts)) for parts in made]
