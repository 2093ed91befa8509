"""Masters and states in files: one rank's swap file, the runs that are streamed through it, and the update on the way.

Each unit's share is cut into *runs* of at most one lane of the ring (:attr:`zeroplan.core.layout.Layout.swap_numel`
elements). A run's master and states are the blocks of one group: read, updated, written back. The gradients, and the 16-bit
parameters that go up, are in the unit's exchange, as without files.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from zeroplan.core.buffers import Buffer, Place
from zeroplan.core.layout import SWAP_SLOTS, Layout
from zeroplan.core.layout_setup import OPTIMIZER_STATES
from zeroplan.core.zero_config import Aio
from zeroplan_runtime import kernels
from zeroplan_runtime.comm import Lane, Mark
from zeroplan_runtime.offload.files_folder import SwapFolder
from zeroplan_runtime.offload.host_worker import Ticket
from zeroplan_runtime.offload.io import IoEngine
from zeroplan_runtime.offload.pinned import PAGE
from zeroplan_runtime.offload.stream import Part, RingPlan, Streamer

if TYPE_CHECKING:
    from zeroplan_runtime.offload.host import Exchange, HostUnit, Order, Update
    from zeroplan_runtime.optim.step import Segment

_count = itertools.count()
_FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Run:
    """Elements ``[begin, end)`` of a unit's share."""

    unit: str
    begin: int
    end: int

    def block(self, buffer: Buffer) -> str:
        """The name of the block that holds one of its tensors."""
        return f"{self.unit}/{self.begin}/{buffer.value}"


class StateFiles:
    """The swap file of a rank's units whose optimizer is in files, and the ring that streams it.

    Args:
        layout: which units, how long, how cut.
        ring: the pinned memory, fp32, as long as the layout's row of it.
        nvme_path: a folder on a disk.
        allow_memory: accept a file system in host memory.

    Raises:
        BadInput: when the folder is unfit or has no room.
    """

    def __init__(
        self, layout: Layout, ring: torch.Tensor, *, nvme_path: str, rank: int, aio: Aio, allow_memory: bool = False
    ) -> None:
        setup = layout.setup
        masters = (Buffer.PARAM_MASTER,) if setup.masters_apart else ()
        self.buffers: tuple[Buffer, ...] = (*masters, *OPTIMIZER_STATES[setup.optimizer])
        self.has_masters = bool(masters)
        self._runs: dict[str, list[Run]] = {}
        for unit in layout.units:
            if unit.trainable is not None and unit.place is Place.NVME:
                share, step = layout.share(unit), layout.swap_numel
                cuts = [*range(0, share, step), share]
                self._runs[unit.shape.name] = [Run(unit.shape.name, a, b) for a, b in itertools.pairwise(cuts)]
        self.engine = IoEngine(aio)
        self.folder = SwapFolder(nvme_path, f"{os.getpid()}-{next(_count)}", rank, self.engine, allow_memory=allow_memory)
        runs = [run for found in self._runs.values() for run in found]
        blocks = {run.block(b): (run.end - run.begin) * _FP32_BYTES for run in runs for b in self.buffers}
        self.file = self.folder.file("states", blocks)
        plan = RingPlan(SWAP_SLOTS, layout.swap_lanes, layout.swap_numel * _FP32_BYTES)
        self.streamer = Streamer(plan, ring.view(torch.uint8))
        self._scratch = ring[: layout.swap_numel]
        self._order = runs
        self._groups = [[Part(self.file, run.block(b), run.end - run.begin) for b in self.buffers] for run in runs]
        self._prefetched = False

    # ------------------------------------------------------------------ outside a step

    def put(self, unit: str, buffer: Buffer, values: torch.Tensor | None) -> None:
        """Writes the whole of one of a unit's tensors; zeros for None. Not while a step is under way."""
        self._forget_prefetched()
        for run in self._runs[unit]:
            numel = run.end - run.begin
            if values is None:
                self._scratch[:numel].zero_()
            else:
                self._scratch[:numel].copy_(values[run.begin : run.end])
            pages = -(-numel * _FP32_BYTES // PAGE) * PAGE
            self.file.finish(self.file.write(run.block(buffer), self._scratch.view(torch.uint8)[:pages]))

    def get(self, unit: str, buffer: Buffer, begin: int, end: int) -> torch.Tensor:
        """Elements ``[begin, end)`` of one of a unit's tensors, in new memory. Not while a step is under way."""
        self._forget_prefetched()
        found = torch.empty(end - begin, dtype=torch.float32)
        for run in self._runs[unit]:
            first, last = max(begin, run.begin), min(end, run.end)
            if first < last:
                held = self.file.held(run.block(buffer))
                self.file.finish(self.file.read(run.block(buffer), self._scratch.view(torch.uint8)[:held]))
                found[first - begin : last - begin].copy_(self._scratch[first - run.begin : last - run.begin])
        return found

    # ------------------------------------------------------------------ a step

    def prefetch(self) -> None:
        """Begins to read the first runs, which the next update wants, beside the backward. Called in the worker."""
        if not self._prefetched:
            self._prefetched = True
            self.streamer.prefetch(self._groups)

    def _forget_prefetched(self) -> None:
        if self._prefetched:
            self._prefetched = False
            self.streamer.abandon()

    def update(
        self,
        wanted: Sequence[tuple[HostUnit, Ticket]],
        order: Order,
        update: Update,
        send: Callable[[HostUnit, Exchange], None],
        up: Lane,
    ) -> None:
        """Updates all units in turn, each sent up (and its ticket finished) when its last run is done. Called in the worker."""
        try:
            scalars = order.scalars() if order.scalars is not None else None
            if scalars is not None and bool(scalars[kernels.SKIP]):
                return
            units = {host.unit.name: (host, ticket) for host, ticket in wanted}

            def work(index: int, tensors: tuple[torch.Tensor, ...]) -> Callable[[], None] | None:
                run = self._order[index]
                host, ticket = units[run.unit]
                place, wait = host.exchanges[0], None
                if run.begin == 0:
                    place.landed.finish()
                    if place.param is None:
                        for mark in order.readers:
                            mark.finish()
                for segment in self._segments(place, run, tensors):
                    update(segment, order.hypers[segment.group], order.number, scalars)
                if place.sends_master:
                    wait = _send_run(host, run, tensors[0], up)
                if run is self._runs[run.unit][-1]:
                    send(host, place)
                    ticket.finish()
                return wait

            self._prefetched = False
            self.streamer.run(self._groups, work)
        finally:
            for _, ticket in wanted:
                ticket.finish()

    def _segments(self, place: Exchange, run: Run, tensors: tuple[torch.Tensor, ...]) -> Iterator[Segment]:
        """The parts of a unit's segments that lie in `run`, on the run's tensors."""
        for whole in place.segments:
            first, last = max(whole.part.start, run.begin), min(whole.part.stop, run.end)
            if first >= last:
                continue
            inside = slice(first - whole.part.start, last - whole.part.start)
            mine = slice(first - run.begin, last - run.begin)
            states = tensors[1:] if self.has_masters else tensors
            assert whole.grad is not None
            yield replace(
                whole,
                master=tensors[0][mine] if self.has_masters else whole.master[inside],
                param=None if whole.param is None else whole.param[inside],
                grad=whole.grad[inside],
                part=slice(first, last),
                states=[state[mine] for state in states],
            )

    def close(self) -> None:
        """Removes the file. The worker has ended."""
        self._forget_prefetched()
        self.folder.close()
        self.engine.close()


def _send_run(host: HostUnit, run: Run, master: torch.Tensor, up: Lane) -> Callable[[], None]:
    """fp32 parameters go up as they are in the ring; returns what waits until they have left it."""
    assert host.unit.trainable is not None
    shard: Any = host.unit.trainable.shard
    with up.run():
        shard[run.begin : run.end].copy_(master, non_blocking=True)
    left = Mark(shard.device)
    left.record(up)
    host.unit.updated.record(up)
    return left.finish
