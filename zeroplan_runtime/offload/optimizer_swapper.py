"""The update of units that have masters, optimizer states or parameters in files, chunk by chunk through pinned buffers.

Each unit's share is divided into chunks of at most ``ArenaLayout.swap_numel`` elements. The tensors
of a chunk that are in files make one group of the swap pipeline: masters and states are read, updated and written; 16-bit
parameters that rest in a file are only written. Tensors of the unit that are in host memory are updated there. The gradients
are in the unit's pinned buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from zeroplan.core.arena.layout import SWAP_SLOTS, ArenaLayout, UnitLayout
from zeroplan.core.buffers import Buffer, Place
from zeroplan_runtime import kernels
from zeroplan_runtime.offload.chunks import Chunk, optimizer_chunks, read_share, write_share
from zeroplan_runtime.offload.host_worker import HostTask
from zeroplan_runtime.offload.param_swapper import ParamSwapper
from zeroplan_runtime.offload.swap_file import SwapFile, Transfer
from zeroplan_runtime.offload.swap_pipeline import PipelineBuffers, SwapPipeline, SwapTensor
from zeroplan_runtime.offload.update_request import Update, UpdateRequest
from zeroplan_runtime.streams import Event, Stream
from zeroplan_runtime.unit_state import GroupSlice, OffloadedUnit, PinnedBuffers


def states_in_files(layout: ArenaLayout) -> tuple[Buffer, ...]:
    """The buffers of an optimizer in files, in the order of a group's tensors; empty if it is in host memory."""
    masters = (Buffer.PARAM_MASTER,) if layout.setup.separate_masters else ()
    return (*masters, *layout.setup.states) if layout.states_in_files else ()


class OptimizerSwapper:
    """Reads, updates and writes what the optimizer has in files, as DeepSpeed's optimizer swappers do.

    Args:
        layout: the units and the sizes of their chunks.
        memory: the pinned memory of the pipeline, as long as the layout says.
        states: the file of masters and states; None where they are in host memory.
        param_swapper: the parameters in files; None where they are in memory.

    Attributes:
        state_buffers: the masters and states in files.
        has_masters: the masters are among them.
    """

    def __init__(
        self, layout: ArenaLayout, memory: torch.Tensor, states: SwapFile | None, param_swapper: ParamSwapper | None
    ) -> None:
        self.state_buffers = states_in_files(layout)
        self.states, self.param_swapper = states, param_swapper
        self.has_masters = Buffer.PARAM_MASTER in self.state_buffers
        self._units = {unit.shape.name: unit for unit in layout.units if unit.streamed}
        self._chunks = optimizer_chunks(layout)
        self._order = [chunk for chunks in self._chunks.values() for chunk in chunks]
        self.pipeline = SwapPipeline(
            PipelineBuffers(SWAP_SLOTS, layout.swapped_tensors, layout.swap_numel * layout.swap_dtype.bytes),
            memory.view(torch.uint8),
        )
        self._scratch = memory[: layout.swap_numel]
        self._groups = [self._group(chunk) for chunk in self._order]
        self._prefetched = False

    def _group(self, chunk: Chunk) -> list[SwapTensor]:
        unit, group = self._units[chunk.unit], []
        if unit.place is Place.NVME:
            assert self.states is not None
            group += [SwapTensor(self.states, chunk.block(b), chunk.numel) for b in self.state_buffers]
        if unit.param_place is Place.NVME:
            assert self.param_swapper is not None
            block = chunk.block(Buffer.PARAM_SHARD)
            group.append(SwapTensor(self.param_swapper.file, block, chunk.numel, self.param_swapper.dtype, read=False))
        return group

    # ------------------------------------------------------------------ outside a step

    def write(self, unit: str, buffer: Buffer, values: torch.Tensor | None) -> None:
        """Writes all of a unit's masters or of one of its states. No update may be under way.

        Args:
            unit: the unit's name.
            buffer: one of `state_buffers`.
            values: this rank's share, fp32; None writes zeros.

        Raises:
            DiskFault: when the disk refuses.
        """
        assert self.states is not None
        self.drop_prefetch()
        write_share(self.states, buffer, self._chunks[unit], values, [self._scratch])

    def read(self, unit: str, buffer: Buffer, begin: int, end: int) -> torch.Tensor:
        """Elements ``[begin, end)`` of a unit's masters or states, fp32, in new memory. No update may be under way.

        Raises:
            DiskFault: when the disk fails or a block is not what was written.
        """
        assert self.states is not None
        self.drop_prefetch()
        return read_share(self.states, buffer, self._chunks[unit], begin, end, self._scratch)

    # ------------------------------------------------------------------ a step

    def prefetch(self) -> None:
        """Queues the reads of the first chunks, during the backward. The worker calls it."""
        if not self._prefetched:
            self._prefetched = True
            self.pipeline.prefetch(self._groups)

    def drop_prefetch(self) -> None:
        """Drops what :meth:`prefetch` has read."""
        if self._prefetched:
            self._prefetched = False
            self.pipeline.cancel()

    def block_param_reads(self, units: Iterable[str]) -> None:
        """Blocks reads of these units' parameters in files until their requested update has queued its writes."""
        if self.param_swapper is not None:
            self.param_swapper.block_reads(name for name in units if self._units[name].param_place is Place.NVME)

    def update(
        self,
        wanted: Sequence[tuple[OffloadedUnit, HostTask]],
        request: UpdateRequest,
        update: Update,
        send: Callable[[OffloadedUnit, PinnedBuffers], None],
        h2d_stream: Stream,
    ) -> None:
        """Updates the units one after another. The worker calls it.

        Args:
            wanted: the units, and for each the task that is done when its parameters can be unsharded.
            request: the step's hyperparameters and scalars.
            update: the optimizer's arithmetic.
            send: copies a unit's updated parameters to the device.
            h2d_stream: the stream of such copies.

        Raises:
            DiskFault: when the disk fails or a block is not what was written.
        """
        units = {host.unit.name: (host, task) for host, task in wanted}

        def work(index: int, tensors: tuple[torch.Tensor, ...]) -> Callable[[], None] | None:
            chunk = self._order[index]
            host, task = units[chunk.unit]
            buffers, wait = host.buffers[0], None
            if chunk.begin == 0:
                buffers.grad_ready.synchronize()
                if buffers.param is None:
                    for event in request.param_readers:
                        event.synchronize()
            for group_slice in self._group_slices(buffers, chunk, tensors):
                update(group_slice, request.hyperparameters[group_slice.group], request.step, scalars)
            if buffers.sends_master:
                wait = _send_chunk(host, chunk, tensors[0], h2d_stream)
            if self._is_last(chunk) and host.unit.layout.param_place is not Place.NVME:
                send(host, buffers)
                task.finish()
            return wait

        def queued(index: int, writes: Sequence[Transfer | None]) -> None:
            chunk = self._order[index]
            if self._units[chunk.unit].param_place is Place.NVME:
                assert self.param_swapper is not None
                write = writes[len(self._groups[index]) - 1]
                assert write is not None
                self.param_swapper.record_write(chunk.block(Buffer.PARAM_SHARD), write)
                if self._is_last(chunk):
                    self.param_swapper.unblock_reads(chunk.unit)
                    units[chunk.unit][1].finish()

        try:
            scalars = request.scalars() if request.scalars is not None else None
            if scalars is not None and bool(scalars[kernels.SKIP]):
                return
            self._prefetched = False
            self.pipeline.run(self._groups, work, queued)
        finally:
            for host, task in wanted:
                if not task.done():  # if it is done, the next update may have blocked the reads again
                    if self.param_swapper is not None:
                        self.param_swapper.unblock_reads(host.unit.name)
                    task.finish()

    def _is_last(self, chunk: Chunk) -> bool:
        return chunk is self._chunks[chunk.unit][-1]

    def _group_slices(self, buffers: PinnedBuffers, chunk: Chunk, tensors: tuple[torch.Tensor, ...]) -> Iterator[GroupSlice]:
        """The parts of a unit's slices that are in `chunk`, with the chunk's `tensors` where they are in files."""
        unit: UnitLayout = self._units[chunk.unit]
        in_files = unit.place is Place.NVME
        param = tensors[-1] if unit.param_place is Place.NVME else None
        first_state = int(self.has_masters)
        for whole in buffers.slices:
            first, last = max(whole.part.start, chunk.begin), min(whole.part.stop, chunk.end)
            if first >= last:
                continue
            inside = slice(first - whole.part.start, last - whole.part.start)
            mine = slice(first - chunk.begin, last - chunk.begin)
            states = [tensor[mine] for tensor in tensors[first_state : len(self.state_buffers)]]
            out = None if whole.param is None else whole.param[inside]
            assert whole.grad is not None
            yield replace(
                whole,
                master=tensors[0][mine] if in_files and self.has_masters else whole.master[inside],
                param=out if param is None else param[mine],
                grad=whole.grad[inside],
                part=slice(first, last),
                states=states if in_files else [state[inside] for state in whole.states],
            )


def _send_chunk(host: OffloadedUnit, chunk: Chunk, master: torch.Tensor, h2d_stream: Stream) -> Callable[[], None]:
    """Copies a chunk of fp32 parameters to the device; returns a function that waits for the copy."""
    assert host.unit.trainable is not None
    shard: Any = host.unit.trainable.shard
    with h2d_stream.as_current():
        shard[chunk.begin : chunk.end].copy_(master, non_blocking=True)
    copied = Event(shard.device)
    copied.record(h2d_stream)
    host.unit.updated.record(h2d_stream)
    return copied.synchronize
