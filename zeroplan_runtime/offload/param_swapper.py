"""Parameters in files: a rank's shards are read into a few pinned buffers, ahead of the all-gathers that need them.

Note [Batches]
    What is read into one buffer at once is a *batch*: the whole of a unit's shard if it fits, else as many of its chunks as
    fit. Chunks of trainable and frozen parameters lie one after another in the buffer, each beginning on a page.

Note [Reading ahead]
    With each unit that it unshards, the schedule predicts which units come next, and their reads are queued as far as there
    are buffers. A buffer is free again once the copy to the device has left it. What was read and is not needed is dropped, so
    a wrong prediction only costs time. When reads begin depends on how fast this rank's disk and device are; the order of
    collectives, which must be the same on all ranks, does not.

Note [Reading behind an update]
    From the request of an update until its writes are queued, the reads of a unit are *blocked*. The reads that follow are
    queued behind those writes, so the disk continues without waiting for the model's thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from zeroplan.core.arena.layout import PAGE_NUMEL, ArenaLayout, align
from zeroplan.core.buffers import Buffer
from zeroplan_runtime.offload.chunks import Chunk, param_chunks, read_share, write_share
from zeroplan_runtime.offload.swap_file import SwapFile, Transfer
from zeroplan_runtime.streams import Event, Stream


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """Asks for a unit's shard of trainable parameters on the device and, if `frozen`, of its frozen ones."""

    unit: str
    frozen: bool


@dataclass(frozen=True, slots=True)
class BatchChunk:
    """A chunk in a batch; it begins at element `at` of the buffer."""

    buffer: Buffer
    chunk: Chunk
    at: int

    @property
    def block(self) -> str:
        """The name of its block in the file."""
        return self.chunk.block(self.buffer)


@dataclass(frozen=True, slots=True, eq=False)
class ReadBatch:
    """The chunks that one buffer holds at once: see Note [Batches]."""

    unit: str
    parts: tuple[BatchChunk, ...]


@dataclass(slots=True, eq=False)
class PendingRead:
    """A batch that will be needed; `transfers` are its reads, None until they are queued."""

    batch: ReadBatch
    transfers: list[Transfer] | None = None


class ParamSwapper:
    """Reads and writes the parameters of a rank's units that rest in a file, as DeepSpeed's parameter swapper does.

    The model's thread calls it, except for :meth:`record_write` and :meth:`unblock_reads`, which the worker thread calls.

    Args:
        layout: the units and the sizes of their chunks.
        memory: the pinned buffers, as long as the layout says.
        file: with the blocks that :func:`~zeroplan_runtime.offload.chunks.param_chunks` names.
        device: the device that parameters are copied to.
    """

    def __init__(self, layout: ArenaLayout, memory: torch.Tensor, file: SwapFile, device: torch.device) -> None:
        self.file = file
        self._buffers = list(memory.view(-1, layout.param_buffer))
        self._last_copy = [Event(device) for _ in self._buffers]
        self._chunks = param_chunks(layout)
        self._batches: dict[FetchRequest, list[ReadBatch]] = {}
        for unit, chunks in self._chunks.items():
            trained = [pair for pair in chunks if pair[0] is Buffer.PARAM_SHARD]
            self._batches[FetchRequest(unit, False)] = _batches(unit, trained, layout.param_buffer)
            self._batches[FetchRequest(unit, True)] = _batches(unit, chunks, layout.param_buffer)
        self._queue: deque[PendingRead] = deque()  # the first of them is batch number `_fetched`
        self._fetched = 0
        self._blocked: set[str] = set()
        self._writes: dict[str, Transfer] = {}  # by block: the write that its next read must follow
        self._lock = threading.Lock()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        found: torch.dtype = self._buffers[0].dtype
        return found

    # ------------------------------------------------------------------ for the schedule

    def prefetch(self, coming: Iterable[FetchRequest]) -> int:
        """Queues reads for these units, in the order in which they will be needed.

        Returns:
            The number of batches of the first unit.
        """
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
        """Copies the first of these units to the device and reads ahead for the others. Blocks until its reads are done.

        Args:
            coming: the unit that is needed, then those that will be needed next.
            targets: [shard] where its trainable and frozen parameters go, by Buffer.
            stream: the stream of the copies.

        Raises:
            DiskFault: when a read failed, or a block is not what was written.
        """
        for _ in range(self.prefetch(coming)):
            number = self._fetched % len(self._buffers)
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
                self._fetched += 1
                self._advance()

    def drop_prefetch(self) -> None:
        """Drops what was read ahead; returns when no read is under way."""
        with self._lock:
            self._drop(0)

    def _drop(self, begin: int) -> None:
        while len(self._queue) > begin:
            for transfer in self._queue.pop().transfers or ():
                transfer.wait_until_idle()

    def _advance(self) -> None:
        """Queues the reads for which there are free buffers, in order."""
        for i, pending in enumerate(self._queue):
            if i == len(self._buffers):
                return
            if pending.transfers is None:
                number = (self._fetched + i) % len(self._buffers)
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
        """Drops what was read ahead and reads nothing of these units until :meth:`unblock_reads`."""
        self.drop_prefetch()
        with self._lock:
            self._blocked.update(units)

    def record_write(self, block: str, write: Transfer) -> None:
        """Notes that a block's write has been queued, so that later reads follow it."""
        with self._lock:
            self._writes[block] = write

    def unblock_reads(self, unit: str) -> None:
        """Allows reads of a unit: all writes of its update have been queued, or it was not updated."""
        with self._lock:
            self._blocked.discard(unit)
            self._advance()

    # ------------------------------------------------------------------ between steps

    def write(self, unit: str, buffer: Buffer, values: torch.Tensor) -> None:
        """Writes this rank's shard of a unit's parameters. No update may be under way.

        Args:
            unit: the unit's name.
            buffer: PARAM_SHARD for the trainable parameters, PARAM_FROZEN for the frozen ones.
            values: [shard] of any dtype.

        Raises:
            DiskFault: when the disk refuses.
        """
        self.drop_prefetch()
        for copied in self._last_copy:
            copied.synchronize()
        chunks = self._chunks_of(unit, buffer)
        for chunk in chunks:
            self._writes.pop(chunk.block(buffer), None)
        write_share(self.file, buffer, chunks, values, self._buffers)

    def read(self, unit: str, buffer: Buffer, begin: int, end: int) -> torch.Tensor:
        """Reads elements ``[begin, end)`` of this rank's shard into new memory; arguments as in :meth:`write`.

        Raises:
            DiskFault: when the disk fails or a block is not what was written.
        """
        self.drop_prefetch()
        self._last_copy[0].synchronize()
        return read_share(self.file, buffer, self._chunks_of(unit, buffer), begin, end, self._buffers[0])

    def _chunks_of(self, unit: str, buffer: Buffer) -> list[Chunk]:
        return [chunk for own, chunk in self._chunks[unit] if own is buffer]


def _batches(unit: str, chunks: Iterable[tuple[Buffer, Chunk]], limit: int) -> list[ReadBatch]:
    """Divides a unit's chunks into batches of at most `limit` elements, page padding included."""
    made: list[list[BatchChunk]] = []
    end = limit
    for buffer, chunk in chunks:
        if end + chunk.numel > limit:
            made.append([])
            end = 0
        made[-1].append(BatchChunk(buffer, chunk, end))
        end += align(chunk.numel, PAGE_NUMEL)
    return [ReadBatch(unit, tuple(parts)) for parts in made]
