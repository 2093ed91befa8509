"""The update of units that have something in files: masters and states come and go, new parameters go, chunk by chunk.

Each unit's share is cut into *chunks* of at most one lane of the ring (:attr:`zeroplan.core.layout.Layout.swap_numel`
elements). What a chunk has in files is one group: masters and states are read, updated and written back; 16-bit parameters that
rest in a file are written by the update into a lane of their own. Whatever else of the unit is in host memory is met there.
The gradients are in the unit's exchange, as without files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from zeroplan.core.buffers import Buffer, Place
from zeroplan.core.layout import PAGE, SWAP_SLOTS, Layout, UnitLayout
from zeroplan_runtime import kernels
from zeroplan_runtime.offload.chunks import Chunk, optimizer_chunks
from zeroplan_runtime.offload.host_worker import Task
from zeroplan_runtime.offload.param_swapper import ParamSwapper
from zeroplan_runtime.offload.swap_file import SwapFile, Transfer
from zeroplan_runtime.offload.swap_pipeline import PipelineBuffers, SwapPipeline, SwapTensor
from zeroplan_runtime.offload.update_request import Update, UpdateRequest
from zeroplan_runtime.streams import Event, Stream
from zeroplan_runtime.unit_state import GroupSlice, OffloadedUnit, PinnedBuffers

_FP32_BYTES = 4


def states_in_files(layout: Layout) -> tuple[Buffer, ...]:
    """What an optimizer in files keeps there, in the order of its lanes."""
    masters = (Buffer.PARAM_MASTER,) if layout.setup.masters_apart else ()
    return (*masters, *layout.setup.states) if layout.states_in_files else ()


class OptimizerSwapper:
    """The updates that stream through files, and the ring that they stream through.

    Args:
        layout: which units, how long, how cut.
        ring: the pinned memory, as long as the layout's row of it.
        states: the file of masters and states, None where they are in host memory.
        params: the parameters in files, None where they are not.
    """

    def __init__(self, layout: Layout, ring: torch.Tensor, states: SwapFile | None, params: ParamSwapper | None) -> None:
        self.buffers = states_in_files(layout)
        self.states, self.params = states, params
        self.has_masters = Buffer.PARAM_MASTER in self.buffers
        self._units = {unit.shape.name: unit for unit in layout.units if unit.streamed}
        self._chunks = optimizer_chunks(layout)
        self._order = [chunk for chunks in self._chunks.values() for chunk in chunks]
        self.pipeline = SwapPipeline(
            PipelineBuffers(SWAP_SLOTS, layout.swap_lanes, layout.swap_numel * layout.swap_dtype.bytes), ring.view(torch.uint8)
        )
        self._scratch = ring[: layout.swap_numel]
        self._groups = [self._parts(chunk) for chunk in self._order]
        self._prefetched = False

    def _parts(self, chunk: Chunk) -> list[SwapTensor]:
        unit, parts = self._units[chunk.unit], []
        if unit.place is Place.NVME:
            assert self.states is not None
            parts += [SwapTensor(self.states, chunk.block(b), chunk.numel) for b in self.buffers]
        if unit.param_place is Place.NVME:
            assert self.params is not None
            block = chunk.block(Buffer.PARAM_SHARD)
            parts.append(SwapTensor(self.params.file, block, chunk.numel, self.params.dtype, read=False))
        return parts

    # ------------------------------------------------------------------ outside a step

    def write(self, unit: str, buffer: Buffer, values: torch.Tensor | None) -> None:
        """Writes the whole of one of a unit's masters or states; zeros for None. Not while a step is under way."""
        assert self.states is not None
        self.drop_prefetch()
        for chunk in self._chunks[unit]:
            if values is None:
                self._scratch[: chunk.numel].zero_()
            else:
                self._scratch[: chunk.numel].copy_(values[chunk.begin : chunk.end])
            pages = -(-chunk.numel * _FP32_BYTES // PAGE) * PAGE
            self.states.finish(self.states.write(chunk.block(buffer), self._scratch.view(torch.uint8)[:pages]))

    def read(self, unit: str, buffer: Buffer, begin: int, end: int) -> torch.Tensor:
        """Elements ``[begin, end)`` of one of them, in new memory. Not while a step is under way."""
        assert self.states is not None
        self.drop_prefetch()
        found = torch.empty(end - begin, dtype=torch.float32)
        for chunk in self._chunks[unit]:
            first, last = max(begin, chunk.begin), min(end, chunk.end)
            if first < last:
                held = self.states.stored_bytes(chunk.block(buffer))
                self.states.finish(self.states.read(chunk.block(buffer), self._scratch.view(torch.uint8)[:held]))
                found[first - begin : last - begin].copy_(self._scratch[first - chunk.begin : last - chunk.begin])
        return found

    # ------------------------------------------------------------------ a step

    def prefetch(self) -> None:
        """Begins to read the first chunks, which the next update wants, beside the backward. Called in the worker."""
        if not self._prefetched:
            self._prefetched = True
            self.pipeline.prefetch(self._groups)

    def drop_prefetch(self) -> None:
        """Drops what was read ahead."""
        if self._prefetched:
            self._prefetched = False
            self.pipeline.cancel()

    def block_param_reads(self, units: Iterable[str]) -> None:
        """An update of these units is ordered: their parameters in files are not read until it has queued its writes."""
        if self.params is not None:
            self.params.block_reads(name for name in units if self._units[name].param_place is Place.NVME)

    def update(
        self,
        wanted: Sequence[tuple[OffloadedUnit, Task]],
        request: UpdateRequest,
        update: Update,
        send: Callable[[OffloadedUnit, PinnedBuffers], None],
        up: Stream,
    ) -> None:
        """Updates all units in turn, each sent on (and its task finished) when its last chunk is done. Called in the worker."""
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
                wait = _send_run(host, chunk, tensors[0], up)
            if self._ends(chunk) and host.unit.layout.param_place is not Place.NVME:
                send(host, buffers)
                task.finish()
            return wait

        def queued(index: int, writes: Sequence[Transfer | None]) -> None:
            chunk = self._order[index]
            if self._units[chunk.unit].param_place is Place.NVME:
                assert self.params is not None
                write = writes[len(self._groups[index]) - 1]
                assert write is not None
                self.params.record_write(chunk.block(Buffer.PARAM_SHARD), write)
                if self._ends(chunk):
                    self.params.unblock_reads(chunk.unit)
                    units[chunk.unit][1].finish()

        try:
            scalars = request.scalars() if request.scalars is not None else None
            if scalars is not None and bool(scalars[kernels.SKIP]):
                return
            self._prefetched = False
            self.pipeline.run(self._groups, work, queued)
        finally:
            for host, task in wanted:
                if not task.done():  # else the next update may have been ordered, and hold it
                    if self.params is not None:
                        self.params.unblock_reads(host.unit.name)
                    task.finish()

    def _ends(self, chunk: Chunk) -> bool:
        return chunk is self._chunks[chunk.unit][-1]

    def _group_slices(self, buffers: PinnedBuffers, chunk: Chunk, tensors: tuple[torch.Tensor, ...]) -> Iterator[GroupSlice]:
        """The parts of a unit's segments that lie in `chunk`, on the chunk's tensors."""
        unit: UnitLayout = self._units[chunk.unit]
        streamed = unit.place is Place.NVME
        param = tensors[-1] if unit.param_place is Place.NVME else None
        first_state = int(self.has_masters)
        for whole in buffers.slices:
            first, last = max(whole.part.start, chunk.begin), min(whole.part.stop, chunk.end)
            if first >= last:
                continue
            inside = slice(first - whole.part.start, last - whole.part.start)
            mine = slice(first - chunk.begin, last - chunk.begin)
            states = [lane[mine] for lane in tensors[first_state : len(self.buffers)]]
            out = None if whole.param is None else whole.param[inside]
            assert whole.grad is not None
            yield replace(
                whole,
                master=tensors[0][mine] if streamed and self.has_masters else whole.master[inside],
                param=out if param is None else param[mine],
                grad=whole.grad[inside],
                part=slice(first, last),
                states=states if streamed else [state[inside] for state in whole.states],
            )


def _send_run(host: OffloadedUnit, chunk: Chunk, master: torch.Tensor, up: Stream) -> Callable[[], None]:
    """fp32 parameters go up as they are in the ring; returns what waits until they have left it."""
    assert host.unit.trainable is not None
    shard: Any = host.unit.trainable.shard
    with up.as_current():
        shard[chunk.begin : chunk.end].copy_(master, non_blocking=True)
    left = Event(shard.device)
    left.record(up)
    host.unit.updated.record(up)
    return left.synchronize
