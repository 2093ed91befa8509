"""Groups of blocks streamed from disk through a few pinned buffers and back: read ahead, worked on, written behind.

Note [Ring]
    ``buffer_count`` buffers of ``buffer_size`` elements are one piece of pinned memory. A group needs one *lane* for each of
    its tensors (master, exp_avg, exp_avg_sq); the lanes of one group are a *slot*, and slots take turns: with three, one is
    read into, one worked on, one written from. So the memory is cut into slots of equal lanes, whatever the count of buffers
    was, and is never more than was told.

Note [Chain]
    When a slot's work is done, its write is queued, and behind it, lane by lane, the read of the group that comes to this
    slot next. The I/O engine begins that read when the write is done, without coming back to Python, so the disk is never
    idle while there is anything to move.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from zeroplan.core.errors import BadInput
from zeroplan.core.layout import PAGE
from zeroplan_runtime.offload.swap_file import SwapFile, Transfer

#: Read, worked on, written.
SLOTS = 3


@dataclass(frozen=True, slots=True)
class PipelineBuffers:
    """The ring's memory: `slots` groups of `lanes` tensors, each of up to `lane_bytes`."""

    slots: int
    lanes: int
    lane_bytes: int

    @property
    def bytes(self) -> int:
        """Pinned bytes of the ring."""
        return self.slots * self.lanes * self.lane_bytes

    def numel(self, element_size: int) -> int:
        """The most elements that a group's tensors may have."""
        return self.lane_bytes // element_size


def plan_buffers(
    buffer_count: int, buffer_size: int, *, lanes: int, element_size: int = 4, largest: int | None = None, slots: int = SLOTS
) -> PipelineBuffers:
    """Cuts ``buffer_count`` buffers of ``buffer_size`` elements into a ring. See Note [Ring].

    Args:
        lanes: tensors of a group.
        element_size: bytes of an element.
        largest: elements of the largest group, where groups are given; then no lane is larger, and there are as many slots
            as fit, up to `slots`. Without it lanes are as large as fit, and cut groups by :meth:`PipelineBuffers.numel`.
        slots: groups in flight.

    Raises:
        BadInput: when the buffers do not hold one group.
    """
    told = buffer_count * buffer_size * element_size
    lane = told // (slots * lanes) // PAGE * PAGE
    if largest is not None:
        need = max(PAGE, -(-largest * element_size // PAGE) * PAGE)
        slots, lane = min(slots, told // (lanes * need)), need
    if slots < 1 or lane < PAGE:
        need = max(largest or 0, PAGE // element_size) * lanes
        raise BadInput(
            f"{buffer_count} buffers of {buffer_size:,} elements do not hold a group of {lanes} tensors",
            where="buffer_count, buffer_size",
            remedy=f"make their product at least {need * (1 if largest else SLOTS):,} elements",
        )
    return PipelineBuffers(slots, lanes, lane)


@dataclass(frozen=True, slots=True)
class SwapTensor:
    """One tensor of a group: `numel` elements in a block of a swap file, to be read before the work and written after it."""

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

#: Called with a group's index and its tensors, in the group's order. It may return a function that waits for whatever still
#: uses the tensors (a copy to the GPU); it is called before they are written or overwritten, one group later if slots allow.
Work = Callable[[int, tuple[torch.Tensor, ...]], Callable[[], None] | None]

#: Called with a group's index and its writes (None for a part without) when they have been queued.
Queued = Callable[[int, Sequence[Transfer | None]], None]


@dataclass(slots=True)
class PipelineStats:
    """What a pass moved, and the seconds that it stood still for the disk."""

    read_bytes: int = 0
    written_bytes: int = 0
    waited: float = 0.0


class SwapPipeline:
    """Streams groups through `memory`, ``plan.bytes`` bytes of page-aligned (pinned) memory as a uint8 tensor."""

    def __init__(self, plan: PipelineBuffers, memory: torch.Tensor) -> None:
        if memory.numel() * memory.element_size() != plan.bytes or memory.data_ptr() % PAGE:
            raise ValueError(f"expected {plan.bytes} bytes on a page boundary, got {memory.numel()} at {memory.data_ptr():#x}")
        self.plan = plan
        lanes = list(memory.view(torch.uint8).view(-1, plan.lane_bytes))
        self._slots = [lanes[i * plan.lanes : (i + 1) * plan.lanes] for i in range(plan.slots)]
        self._groups: Sequence[Group] | None = None
        self._reads: dict[int, list[Transfer]] = {}
        self._writes: dict[int, list[Transfer | None]] = {}
        self._times = PipelineStats()
        self._queued: Queued | None = None

    def prefetch(self, groups: Sequence[Group]) -> None:
        """Begins to read the first groups of a pass, which the next :meth:`run` must be given."""
        if self._groups is not None:
            raise ValueError("a pass has begun already")
        for index, group in enumerate(groups):
            too_large = next((part for part in group if part.bytes > self.plan.lane_bytes), None)
            if len(group) > self.plan.lanes or too_large is not None:
                raise ValueError(
                    f"group {index} of {len(group)} tensors, {max(part.bytes for part in group)} bytes, does not fit into "
                    f"{self.plan.lanes} lanes of {self.plan.lane_bytes}"
                )
        self._groups, self._times = groups, PipelineStats()
        try:
            for index in range(min(self.plan.slots, len(groups))):
                self._read(index, [None] * self.plan.lanes)
        except BaseException:
            self.cancel()
            raise

    def run(self, groups: Sequence[Group], work: Work, queued: Queued | None = None) -> PipelineStats:
        """Reads every group, hands it to `work`, writes it back (and tells `queued`); returns when all is written.

        Raises:
            DiskFault: when a transfer failed or a block is not what was written. Nothing is under way any more then.
        """
        if self._groups is None:
            self.prefetch(groups)
        elif self._groups is not groups:
            raise ValueError("expected the groups that were prefetched")
        self._queued = queued
        late: deque[tuple[int, Callable[[], None] | None]] = deque()
        keep = min(1, self.plan.slots - 1)
        try:
            for index in range(len(groups)):
                self._wait_for_reads(index)
                late.append((index, work(index, self._tensors(index))))
                while late and (late[0][1] is None or len(late) > keep):
                    self._queue_writes(*late.popleft())
            while late:
                self._queue_writes(*late.popleft())
            for index in range(max(0, len(groups) - self.plan.slots), len(groups)):
                self._wait_for_writes(index)
        finally:
            times = self._times
            self.cancel()
        return times

    def cancel(self) -> None:
        """Waits until nothing uses the memory, and forgets the pass."""
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

    def _tensors(self, index: int) -> tuple[torch.Tensor, ...]:
        slot = self._slots[index % self.plan.slots]
        return tuple(lane[: part.bytes].view(part.dtype) for lane, part in zip(slot, self._group(index), strict=False))

    def _read(self, index: int, after: Sequence[Transfer | None]) -> None:
        slot = self._slots[index % self.plan.slots]
        begun = self._reads[index] = []
        for part, lane, before in zip(self._group(index), slot, after, strict=False):
            if part.read:
                held = part.file.stored_bytes(part.block)
                if 0 < held < part.bytes:
                    raise ValueError(f"block {part.block!r} of {part.file.path} holds {held} bytes, not {part.bytes}")
                begun.append(part.file.read(part.block, lane[:held], after=before))
                self._times.read_bytes += held

    def _wait_for_reads(self, index: int) -> None:
        """Waits for a group's reads, and for the writes of the group that had its slot before."""
        begin = time.perf_counter()
        if index >= self.plan.slots:
            self._wait_for_writes(index - self.plan.slots)
        read = [part for part in self._group(index) if part.read]
        for part, transfer in zip(read, self._reads.pop(index), strict=True):
            part.file.finish(transfer)
        self._times.waited += time.perf_counter() - begin

    def _queue_writes(self, index: int, wait: Callable[[], None] | None) -> None:
        """Queues a group's writes and, behind them, the reads of the slot's next group. See Note [Chain]."""
        if wait is not None:
            wait()
        slot = self._slots[index % self.plan.slots]
        begun = self._writes[index] = [None] * self.plan.lanes
        for i, (part, lane) in enumerate(zip(self._group(index), slot, strict=False)):
            if part.write:
                size = -(-part.bytes // PAGE) * PAGE
                begun[i] = part.file.write(part.block, lane[:size])
                self._times.written_bytes += size
        if self._queued is not None:
            self._queued(index, begun)
        assert self._groups is not None
        if index + self.plan.slots < len(self._groups):
            self._read(index + self.plan.slots, begun)

    def _wait_for_writes(self, index: int) -> None:
        begin = time.perf_counter()
        for part, transfer in zip(self._group(index), self._writes.pop(index), strict=False):
            if transfer is not None:
                part.file.finish(transfer)
        self._times.waited += time.perf_counter() - begin
