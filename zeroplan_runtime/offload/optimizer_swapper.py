"""The update of units that have something in files: masters and states come and go, new parameters go, run by run.

Each unit's share is cut into *runs* of at most one lane of the ring (:attr:`zeroplan.core.layout.Layout.swap_numel`
elements). What a run has in files is one group: masters and states are read, updated and written back; 16-bit parameters that
rest in a file are written by the update into a lane of their own. Whatever else of the unit is in host memory is met there.
The gradients are in the unit's exchange, as without files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from zeroplan.core.buffers import Buffer, Place
from zeroplan.core.layout import PAGE, SWAP_SLOTS, Layout, UnitLayout
from zeroplan.core.layout_setup import OPTIMIZER_STATES
from zeroplan_runtime import kernels
from zeroplan_runtime.offload.chunks import Run, runs_of_update
from zeroplan_runtime.offload.host_worker import Ticket
from zeroplan_runtime.offload.param_swapper import ParamSwapper
from zeroplan_runtime.offload.swap_file import SwapFile, Transfer
from zeroplan_runtime.offload.swap_pipeline import Part, RingPlan, Streamer
from zeroplan_runtime.streams import Event, Stream

if TYPE_CHECKING:
    from zeroplan_runtime.offload.host_optimizer import Exchange, HostUnit, Order, Update
    from zeroplan_runtime.optim.step import GroupSlice

_FP32_BYTES = 4


def states_in_files(layout: Layout) -> tuple[Buffer, ...]:
    """What an optimizer in files keeps there, in the order of its lanes."""
    masters = (Buffer.PARAM_MASTER,) if layout.setup.masters_apart else ()
    return (*masters, *OPTIMIZER_STATES[layout.setup.optimizer]) if layout.states_in_files else ()


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
        self._runs = runs_of_update(layout)
        self._order = [run for runs in self._runs.values() for run in runs]
        self.streamer = Streamer(
            RingPlan(SWAP_SLOTS, layout.swap_lanes, layout.swap_numel * layout.swap_dtype.bytes), ring.view(torch.uint8)
        )
        self._scratch = ring[: layout.swap_numel]
        self._groups = [self._parts(run) for run in self._order]
        self._prefetched = False

    def _parts(self, run: Run) -> list[Part]:
        unit, parts = self._units[run.unit], []
        if unit.place is Place.NVME:
            assert self.states is not None
            parts += [Part(self.states, run.block(b), run.numel) for b in self.buffers]
        if unit.param_place is Place.NVME:
            assert self.params is not None
            block = run.block(Buffer.PARAM_SHARD)
            parts.append(Part(self.params.file, block, run.numel, self.params.dtype, read=False))
        return parts

    # ------------------------------------------------------------------ outside a step

    def put(self, unit: str, buffer: Buffer, values: torch.Tensor | None) -> None:
        """Writes the whole of one of a unit's masters or states; zeros for None. Not while a step is under way."""
        assert self.states is not None
        self.forget()
        for run in self._runs[unit]:
            if values is None:
                self._scratch[: run.numel].zero_()
            else:
                self._scratch[: run.numel].copy_(values[run.begin : run.end])
            pages = -(-run.numel * _FP32_BYTES // PAGE) * PAGE
            self.states.finish(self.states.write(run.block(buffer), self._scratch.view(torch.uint8)[:pages]))

    def get(self, unit: str, buffer: Buffer, begin: int, end: int) -> torch.Tensor:
        """Elements ``[begin, end)`` of one of them, in new memory. Not while a step is under way."""
        assert self.states is not None
        self.forget()
        found = torch.empty(end - begin, dtype=torch.float32)
        for run in self._runs[unit]:
            first, last = max(begin, run.begin), min(end, run.end)
            if first < last:
                held = self.states.held(run.block(buffer))
                self.states.finish(self.states.read(run.block(buffer), self._scratch.view(torch.uint8)[:held]))
                found[first - begin : last - begin].copy_(self._scratch[first - run.begin : last - run.begin])
        return found

    # ------------------------------------------------------------------ a step

    def prefetch(self) -> None:
        """Begins to read the first runs, which the next update wants, beside the backward. Called in the worker."""
        if not self._prefetched:
            self._prefetched = True
            self.streamer.prefetch(self._groups)

    def forget(self) -> None:
        """Drops what was read ahead."""
        if self._prefetched:
            self._prefetched = False
            self.streamer.abandon()

    def hold(self, units: Iterable[str]) -> None:
        """An update of these units is ordered: their parameters in files are not read until it has queued its writes."""
        if self.params is not None:
            self.params.hold(name for name in units if self._units[name].param_place is Place.NVME)

    def update(
        self,
        wanted: Sequence[tuple[HostUnit, Ticket]],
        order: Order,
        update: Update,
        send: Callable[[HostUnit, Exchange], None],
        up: Stream,
    ) -> None:
        """Updates all units in turn, each sent on (and its ticket finished) when its last run is done. Called in the worker."""
        units = {host.unit.name: (host, ticket) for host, ticket in wanted}

        def work(index: int, tensors: tuple[torch.Tensor, ...]) -> Callable[[], None] | None:
            run = self._order[index]
            host, ticket = units[run.unit]
            place, wait = host.exchanges[0], None
            if run.begin == 0:
                place.landed.synchronize()
                if place.param is None:
                    for event in order.readers:
                        event.synchronize()
            for segment in self._segments(place, run, tensors):
                update(segment, order.hyperparameters[segment.group], order.number, scalars)
            if place.sends_master:
                wait = _send_run(host, run, tensors[0], up)
            if self._ends(run) and host.unit.layout.param_place is not Place.NVME:
                send(host, place)
                ticket.finish()
            return wait

        def queued(index: int, writes: Sequence[Transfer | None]) -> None:
            run = self._order[index]
            if self._units[run.unit].param_place is Place.NVME:
                assert self.params is not None
                write = writes[len(self._groups[index]) - 1]
                assert write is not None
                self.params.wrote(run.block(Buffer.PARAM_SHARD), write)
                if self._ends(run):
                    self.params.release(run.unit)
                    units[run.unit][1].finish()

        try:
            scalars = order.scalars() if order.scalars is not None else None
            if scalars is not None and bool(scalars[kernels.SKIP]):
                return
            self._prefetched = False
            self.streamer.run(self._groups, work, queued)
        finally:
            for host, ticket in wanted:
                if not ticket.done():  # else the next update may have been ordered, and hold it
                    if self.params is not None:
                        self.params.release(host.unit.name)
                    ticket.finish()

    def _ends(self, run: Run) -> bool:
        return run is self._runs[run.unit][-1]

    def _segments(self, place: Exchange, run: Run, tensors: tuple[torch.Tensor, ...]) -> Iterator[GroupSlice]:
        """The parts of a unit's segments that lie in `run`, on the run's tensors."""
        unit: UnitLayout = self._units[run.unit]
        streamed = unit.place is Place.NVME
        param = tensors[-1] if unit.param_place is Place.NVME else None
        first_state = int(self.has_masters)
        for whole in place.segments:
            first, last = max(whole.part.start, run.begin), min(whole.part.stop, run.end)
            if first >= last:
                continue
            inside = slice(first - whole.part.start, last - whole.part.start)
            mine = slice(first - run.begin, last - run.begin)
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


def _send_run(host: HostUnit, run: Run, master: torch.Tensor, up: Stream) -> Callable[[], None]:
    """fp32 parameters go up as they are in the ring; returns what waits until they have left it."""
    assert host.unit.trainable is not None
    shard: Any = host.unit.trainable.shard
    with up.as_current():
        shard[run.begin : run.end].copy_(master, non_blocking=True)
    left = Event(shard.device)
    left.record(up)
    host.unit.updated.record(up)
    return left.synchronize
