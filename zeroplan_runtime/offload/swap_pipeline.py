"""Streams groups of tensors from disk through a few pinned buffers and back: read ahead, update, write behind.

Note [Buffers]
    A group has a few tensors (master, exp_avg, exp_avg_sq, and parameters that the update only writes). Each slot holds one
    group in equal buffers, one for each tensor, and the groups take the slots in turn. With three slots, one is read into, one
    is updated and one is written from.

Note [Chained requests]
    When a group has been updated, its writes are queued and, behind each write, the read of the tensor that comes to the same
    buffer next. The I/O engine starts that read when the write is done, without returning to Python, so the disk is never
    idle while there is something to transfer.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from zeroplan.core.arena.layout import PAGE
from zeroplan_runtime.offload.swap_file import SwapFile, Transfer


@dataclass(frozen=True, slots=True)
class PipelineBuffers:
    """The sizes of a pipeline's memory.

    Attributes:
        slots: groups in flight.
        per_slot: buffers of a slot, the most tensors that a group may have.
        buffer_bytes: bytes of a buffer, the most that a tensor may have; a multiple of the page.
    """

    slots: int
    per_slot: int
    buffer_bytes: int

    @property
    def bytes(self) -> int:
        """Bytes of all buffers."""
        return self.slots * self.per_slot * self.buffer_bytes


@dataclass(frozen=True, slots=True)
class SwapTensor:
    """One tensor of a group.

    Attributes:
        file, block: where it is on disk.
        numel: its elements.
        dtype: its dtype.
        read: read it before the update.
        write: write it after the update.
    """

    file: SwapFile
    block: str
    numel: int
    dtype: torch.dtype = torch.float32
    read: bool = True
    write: bool = True

    @property
    def bytes(self) -> int:
        """Bytes of the elements."""
        return self.numel * self.dtype.itemsize


Group = Sequence[SwapTensor]

#: Called with a group's index and its 1-D tensors, in the order of the groups. It may return a function that waits for whatever
#: still uses the tensors (a copy to the GPU). The pipeline calls that function before it writes or overwrites them, one group
#: later if there is more than one slot.
Work = Callable[[int, tuple[torch.Tensor, ...]], Callable[[], None] | None]

#: Called when a group's writes have been queued, with the group's index and the writes (None for a tensor that is not written).
Queued = Callable[[int, Sequence[Transfer | None]], None]


class SwapPipeline:
    """Streams groups through `memory`.

    Args:
        buffers: how the memory is divided.
        memory: ``buffers.bytes`` bytes of (pinned) host memory, uint8, beginning on a page.

    Raises:
        ValueError: when the memory has another size or does not begin on a page.
    """

    def __init__(self, buffers: PipelineBuffers, memory: torch.Tensor) -> None:
        if memory.numel() * memory.element_size() != buffers.bytes or memory.data_ptr() % PAGE:
            raise ValueError(
                f"expected {buffers.bytes} bytes on a page boundary, got {memory.numel()} at {memory.data_ptr():#x}"
            )
        self.buffers = buffers
        views = list(memory.view(torch.uint8).view(-1, buffers.buffer_bytes))
        self._slots = [views[i * buffers.per_slot : (i + 1) * buffers.per_slot] for i in range(buffers.slots)]
        self._groups: Sequence[Group] | None = None
        self._reads: dict[int, list[Transfer]] = {}
        self._writes: dict[int, list[Transfer | None]] = {}
        self._queued: Queued | None = None

    def prefetch(self, groups: Sequence[Group]) -> None:
        """Queues the reads of the first groups; the next :meth:`run` must be given the same `groups`.

        Raises:
            ValueError: when a prefetch is under way, or a group does not fit into a slot.
            DiskFault: when a block was never written.
        """
        if self._groups is not None:
            raise ValueError("the groups of this pass have been prefetched already")
        for index, group in enumerate(groups):
            largest = max((tensor.bytes for tensor in group), default=0)
            if len(group) > self.buffers.per_slot or largest > self.buffers.buffer_bytes:
                raise ValueError(
                    f"group {index} of {len(group)} tensors, the largest of {largest} bytes, does not fit into a slot of "
                    f"{self.buffers.per_slot} buffers of {self.buffers.buffer_bytes} bytes"
                )
        self._groups = groups
        try:
            for index in range(min(self.buffers.slots, len(groups))):
                self._queue_reads(index, [None] * self.buffers.per_slot)
        except BaseException:
            self.cancel()
            raise

    def run(self, groups: Sequence[Group], work: Work, queued: Queued | None = None) -> None:
        """Reads each group, calls `work` on it and writes it; returns when everything is written.

        Raises:
            DiskFault: when a transfer failed or a block is not what was written. No transfer is under way then.
            ValueError: as :meth:`prefetch`, and when other groups were prefetched.
        """
        if self._groups is None:
            self.prefetch(groups)
        elif self._groups is not groups:
            raise ValueError("expected the groups that were prefetched")
        self._queued = queued
        late: deque[tuple[int, Callable[[], None] | None]] = deque()
        keep = min(1, self.buffers.slots - 1)
        try:
            for index in range(len(groups)):
                self._wait_for_reads(index)
                late.append((index, work(index, self._tensors(index))))
                while late and (late[0][1] is None or len(late) > keep):
                    self._queue_writes(*late.popleft())
            while late:
                self._queue_writes(*late.popleft())
            for index in range(max(0, len(groups) - self.buffers.slots), len(groups)):
                self._wait_for_writes(index)
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Drops the pass or the prefetch; returns when no transfer uses the memory any more."""
        under_way = [*itertools.chain(*self._reads.values()), *itertools.chain(*self._writes.values())]
        self._groups = None
        self._reads.clear()
        self._writes.clear()
        for transfer in under_way:
            if transfer is not None:
                transfer.wait_until_idle()

    def _group(self, index: int) -> Group:
        assert self._groups is not None
        return self._groups[index]

    def _slot(self, index: int) -> list[torch.Tensor]:
        return self._slots[index % self.buffers.slots]

    def _tensors(self, index: int) -> tuple[torch.Tensor, ...]:
        pairs = zip(self._group(index), self._slot(index), strict=False)
        return tuple(buffer[: tensor.bytes].view(tensor.dtype) for tensor, buffer in pairs)

    def _queue_reads(self, index: int, after: Sequence[Transfer | None]) -> None:
        queued = self._reads[index] = []
        for tensor, buffer, before in zip(self._group(index), self._slot(index), after, strict=False):
            if tensor.read:
                stored = tensor.file.stored_bytes(tensor.block)
                if 0 < stored < tensor.bytes:
                    raise ValueError(f"block {tensor.block!r} of {tensor.file.path} holds {stored} bytes, not {tensor.bytes}")
                queued.append(tensor.file.read(tensor.block, buffer[:stored], after=before))

    def _wait_for_reads(self, index: int) -> None:
        """Waits for a group's reads, and for the writes of the group that had its slot before."""
        if index >= self.buffers.slots:
            self._wait_for_writes(index - self.buffers.slots)
        read = [tensor for tensor in self._group(index) if tensor.read]
        for tensor, transfer in zip(read, self._reads.pop(index), strict=True):
            tensor.file.finish(transfer)

    def _queue_writes(self, index: int, wait: Callable[[], None] | None) -> None:
        """Queues a group's writes and, behind them, the reads of the slot's next group: see Note [Chained requests]."""
        if wait is not None:
            wait()
        writes: list[Transfer | None] = [None] * self.buffers.per_slot
        self._writes[index] = writes
        for i, (tensor, buffer) in enumerate(zip(self._group(index), self._slot(index), strict=False)):
            if tensor.write:
                writes[i] = tensor.file.write(tensor.block, buffer[: -(-tensor.bytes // PAGE) * PAGE])
        if self._queued is not None:
            self._queued(index, writes)
        assert self._groups is not None
        if index + self.buffers.slots < len(self._groups):
            self._queue_reads(index + self.buffers.slots, writes)

    def _wait_for_writes(self, index: int) -> None:
        for tensor, transfer in zip(self._group(index), self._writes.pop(index), strict=False):
            if transfer is not None:
                tensor.file.finish(transfer)
