"""The optimizer in host memory: gradients come down as they are reduced, updated parameters go up as they are ready.

Note [Exchange]
    Each offloaded unit has one pinned place as long as this rank's share. Its gradients come down into it and its updated
    16-bit parameters go up from it: the update reads element i of the gradient before it writes element i of the parameter,
    so where both have the same width they are the same bytes. Masters and states, which only the CPU touches, are pageable.

Note [Sums over micro batches]
    With accumulation the sum rests on the host, in the exchange. It is brought up to a small slot beside the reduction of the
    unit's next gradients, which are added to it there, and taken down again. The link carries both directions at once, so
    this takes no longer than taking every micro batch's gradients down; keeping the sum on the device would cost what offload
    is to save, and adding on the host would take the memory bandwidth, and the processors, that the updates need. The sum is
    rounded by the same operation as without offload.

Note [What waits for what]
    No thread waits but for what it needs. The worker waits for a unit's gradients (an event) and, where clipping or loss
    scaling make the step depend on all gradients, for the step's scalars (another). The model's thread waits for a unit's
    update when it comes to gather that unit, in the next forward. Streams wait for copies by events. When neither clipping
    nor overflow checks are on, a unit's update begins as soon as its gradients have arrived, beside the rest of the backward.

Note [Delayed update]
    With the delayed parameter update (Ren et al. 2021, ZeRO-Offload, section 5.2) the update by step i's gradients runs
    beside forward and backward i + 1, which use the parameters before it; they go up while the backward i + 1 leaves the
    units, and forward i + 2 is the first to see them. Each unit then has two exchanges that take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from zeroplan_runtime import kernels
from zeroplan_runtime.offload.host_worker import Ticket, Worker
from zeroplan_runtime.streams import Event, Stream

if TYPE_CHECKING:
    from zeroplan_runtime.model_states import AccumSlot, UnitState
    from zeroplan_runtime.offload.optimizer_swapper import OptimizerSwapper
    from zeroplan_runtime.optim.step import GroupSlice

#: ``update(segment, hyperparameters, step, scalars)``: the optimizer's arithmetic.
Update = Callable[["GroupSlice", dict[str, Any], int, torch.Tensor | None], None]


@dataclass(slots=True, eq=False)
class Exchange:
    """See Note [Exchange]. `param` is what goes up: 16-bit parameters, the master in fp32, None where it stays here.

    `landed` marks the arrival of `grad`, `sent` the last copy of `param` upwards.
    """

    grad: torch.Tensor
    param: torch.Tensor | None
    segments: list[GroupSlice]
    landed: Event
    sent: Event
    sends_master: bool = False  # run by run, from the ring that masters in files stream through
    skipped: bool = False


@dataclass(slots=True, eq=False)
class HostUnit:
    """An offloaded unit. `ticket` is for what the unit's next forward needs, `updated` for an update not yet sent up."""

    unit: UnitState
    exchanges: tuple[Exchange, ...]
    turn: int = 0
    summed: bool = False  # the exchange holds gradients of this step
    begun: bool = False  # the work that this step's last gradients allow has been asked for
    ticket: Ticket | None = None
    updated: Exchange | None = None

    @property
    def streamed(self) -> bool:
        """Whether the update streams through files."""
        return self.unit.layout.streamed

    @property
    def pending(self) -> bool:
        """Whether new parameters are to come that :meth:`wait` has not been called for."""
        return self.ticket is not None

    @property
    def present(self) -> Exchange:
        """Where this step's gradients go."""
        return self.exchanges[self.turn]

    def wait(self) -> None:
        """The calling thread waits until the parameters are on their way up (their copy ends at ``unit.updated``)."""
        ticket, self.ticket = self.ticket, None
        if ticket is not None:
            ticket.wait()


@dataclass(slots=True)
class Order:
    """One step's update: its number, hyperparameters by group, and whoever knows the scalars (None: nothing to scale)."""

    number: int
    hyperparameters: list[dict[str, Any]]
    scalars: Callable[[], torch.Tensor] | None = None
    readers: tuple[Event, ...] = ()  # of the parameters as they are


@dataclass(eq=False)
class HostOptimizer:
    """All offloaded units of one rank, and the streams and the thread that serve them.

    `direct` says that gradients go down as they lie: one reduction a step and unit, in the dtype that the exchange keeps.
    `sum_slot` gives a unit's slot for sums, its memory brought. `delayed_from` is the first step whose update is delayed (0:
    none).
    """

    units: Sequence[HostUnit]
    update: Update
    worker: Worker
    device: torch.device
    direct: bool
    sum_slot: Callable[[UnitState], AccumSlot]
    delayed_from: int = 0
    files: OptimizerSwapper | None = None
    early: Callable[[], Order] | None = None  # set where updates may begin in the backward
    down: Stream = field(init=False)
    up: Stream = field(init=False)
    _reading: bool = field(init=False, default=False)  # the files have been told to read ahead for this step

    def __post_init__(self) -> None:
        self.down, self.up = Stream(self.device), Stream(self.device)

    # ------------------------------------------------------------------ gradients

    def take(
        self,
        host: HostUnit,
        arrived: torch.Tensor,
        stream: Stream,
        *,
        boundary: bool,
        last: bool,
        measure: Callable[[torch.Tensor], None] | None,
    ) -> Stream:
        """Takes a unit's reduced gradients to the host, adding to what is there of this step.

        Args:
            arrived: this rank's part of the mean, on the device, final in `stream`.
            boundary: this is the step's last micro batch.
            last: and no more gradients of this unit are to come.
            measure: called in `stream` with the sum so far, which may yet grow unless `last`.

        Returns:
            The stream after whose present work `arrived` may be overwritten.
        """
        if host.begun:
            raise RuntimeError(
                f"a gradient of unit {host.unit.name!r} came after its update had begun: its parameters are used outside its "
                "forward; set gradient_clipping, or give a policy that leaves the module to the root"
            )
        host.wait()
        if boundary and self.files is not None and not self._reading:
            self._reading = True
            self.worker.submit(self.files.prefetch)
        place, produced = host.present, Event(self.device)
        slot = None if self.direct and not host.summed else self.sum_slot(host.unit)
        source = arrived if slot is None else self._sum(host, slot, arrived, stream)
        host.summed = True
        if boundary and measure is not None:
            with stream.as_current():
                measure(source)
        produced.record(stream)
        produced.wait(self.down)
        place.sent.wait(self.down)
        with self.down.as_current():
            place.grad.copy_(source, non_blocking=True)
        place.landed.record(self.down)
        if slot is not None:
            slot.last_use.record(self.down)
        if boundary and last:
            self._begin(host)
        return self.down if slot is None else stream

    def _sum(self, host: HostUnit, slot: AccumSlot, arrived: torch.Tensor, stream: Stream) -> torch.Tensor:
        """See Note [Sums over micro batches]."""
        total = slot.buffer.tensor[: arrived.numel()]
        if host.summed:
            place = host.present
            slot.last_use.wait(self.up)
            place.landed.wait(self.up)
            with self.up.as_current():
                total.copy_(place.grad, non_blocking=True)
            slot.ready.record(self.up)
            slot.ready.wait(stream)
            with stream.as_current():
                total.add_(arrived)
        else:
            slot.last_use.wait(stream)
            with stream.as_current():
                total.copy_(arrived)
        return total

    def backward_done(self) -> None:
        """The step's last gradients have all been taken."""
        for host in self.units:
            if not host.begun:
                self._begin(host)

    def _begin(self, host: HostUnit) -> None:
        """What needs no more than this unit's gradients: its update, or, where updates are delayed, the one before's end."""
        if host.updated is not None:
            host.begun = True
            self._send_delayed(host, host.present.landed)
        elif self.early is not None and not host.streamed:
            host.begun = True
            self._order(host, self.early(), send=True)

    # ------------------------------------------------------------------ the step

    def step(self, order: Order, readers: Sequence[Stream]) -> None:
        """Asks for the updates that have not begun, in the order in which the next forward needs them.

        No parameter is overwritten before the present work of `readers` is done.
        """
        order.readers = tuple(Event(self.device) for _ in readers)
        for event, stream in zip(order.readers, readers, strict=True):
            event.record(stream)
            event.wait(self.up)
        delayed = 0 < self.delayed_from <= order.number
        for host in self.units:
            if self.early is None and not host.streamed:
                self._order(host, order, send=not delayed)
            host.begun = host.summed = False
            host.turn = (host.turn + 1) % len(host.exchanges)
        if self.files is not None:
            self._reading = False
            self._order_files(self.files, order)

    def forget(self) -> None:
        """Drops this step's sums.

        Raises:
            RuntimeError: when updates by them have begun.
        """
        if self.early is not None and any(host.begun for host in self.units):
            raise RuntimeError("gradients cannot be dropped: updates by them have begun, as nothing clips or checks them")
        for host in self.units:
            host.summed = host.begun = False

    def _order(self, host: HostUnit, order: Order, *, send: bool) -> None:
        place = host.present

        def work() -> None:
            place.landed.synchronize()
            if place.param is None:  # they are read, and written, where they are
                for event in order.readers:
                    event.synchronize()
            scalars = order.scalars() if order.scalars is not None else None
            place.skipped = scalars is not None and bool(scalars[kernels.SKIP])
            if place.skipped:
                return
            for segment in place.segments:
                self.update(segment, order.hyperparameters[segment.group], order.number, scalars)
            if send:
                self._send(host.unit, place)

        ticket = self.worker.submit(work)
        if send:
            self._expect(host, ticket)
        else:
            host.updated = place

    def _order_files(self, files: OptimizerSwapper, order: Order) -> None:
        """One pass over the files updates all units in them, one after another."""
        wanted = [(host, Ticket(self.worker)) for host in self.units if host.streamed]
        files.hold(host.unit.name for host, _ in wanted)

        def send(host: HostUnit, place: Exchange) -> None:
            self._send(host.unit, place)

        self.worker.submit(lambda: files.update(wanted, order, self.update, send, self.up))
        for host, ticket in wanted:
            self._expect(host, ticket)

    def _send(self, unit: UnitState, place: Exchange) -> None:
        """Copies the updated parameters up (in the worker)."""
        if place.param is None or place.skipped:
            return
        assert unit.trainable is not None
        with self.up.as_current():
            unit.trainable.shard.copy_(place.param, non_blocking=True)
        place.sent.record(self.up)
        unit.updated.record(self.up)

    def _send_delayed(self, host: HostUnit, after: Event) -> None:
        """Asks for the parameters of an update that was delayed, once the work at `after` has read those of before."""
        place, host.updated = host.updated, None
        if place is not None:
            after.wait(self.up)
            self._expect(host, self.worker.submit(lambda: self._send(host.unit, place)))

    def _expect(self, host: HostUnit, ticket: Ticket) -> None:
        host.ticket = ticket
        host.unit.param_slot.is_current = False

    # ------------------------------------------------------------------ between steps

    def drain(self, reader: Stream) -> None:
        """Returns when every update that was asked for is in the masters and its parameters are on their way up.

        A delayed update is sent up, too, once `reader` has read the parameters of before: what follows goes on from the same
        state as a run resumed from a checkpoint.
        """
        now = Event(self.device)
        now.record(reader)
        for host in self.units:
            host.wait()
            self._send_delayed(host, now)
        for host in self.units:
            host.wait()
        self.worker.submit(lambda: None).wait()  # reads ahead, and a pass's last writes
        self._reading = False

    def close(self) -> None:
        """Ends the thread."""
        self.worker.close()
