"""The optimizer in host memory: gradients come down as they are reduced, updated parameters go up as they are ready.

Note [PinnedBuffers]
    Each offloaded unit has one pinned buffers as long as this rank's share. Its gradients come down into it and its updated
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

import torch

from zeroplan.core.errors import BadInput
from zeroplan_runtime import kernels
from zeroplan_runtime.offload.host_worker import Task, Worker
from zeroplan_runtime.offload.optimizer_swapper import OptimizerSwapper
from zeroplan_runtime.offload.update_request import Update, UpdateRequest
from zeroplan_runtime.streams import Event, Stream
from zeroplan_runtime.unit_state import AccumSlot, OffloadedUnit, PinnedBuffers, UnitState


@dataclass(eq=False)
class HostOptimizer:
    """All offloaded units of one rank, and the streams and the thread that serve them.

    `sends_grads_directly`: there is one reduction a step and unit, in the dtype of the pinned buffer, so no sum is needed.
    `accum_slot` gives a unit's slot for sums, its memory brought. `delayed_from` is the first step whose update is delayed (0:
    none).
    """

    units: Sequence[OffloadedUnit]
    update: Update
    worker: Worker
    device: torch.device
    sends_grads_directly: bool
    accum_slot: Callable[[UnitState], AccumSlot]
    delayed_from: int = 0
    swapper: OptimizerSwapper | None = None
    early_request: Callable[[], UpdateRequest] | None = None  # set where updates may begin in the backward
    d2h_stream: Stream = field(init=False)
    h2d_stream: Stream = field(init=False)
    _prefetched: bool = field(init=False, default=False)  # the files have been told to read ahead for this step

    def __post_init__(self) -> None:
        self.d2h_stream, self.h2d_stream = Stream(self.device), Stream(self.device)

    # ------------------------------------------------------------------ gradients

    def offload_grad(
        self,
        host: OffloadedUnit,
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
        if host.update_requested:
            raise BadInput(
                f"unit {host.unit.name!r} got a gradient after its update had begun: a parameter is used outside its forward",
                where="offload_optimizer",
                remedy="set gradient_clipping, with which updates wait for all gradients",
            )
        host.wait_for_update()
        if boundary and self.swapper is not None and not self._prefetched:
            self._prefetched = True
            self.worker.submit(self.swapper.prefetch)
        buffers, produced = host.current, Event(self.device)
        slot = None if self.sends_grads_directly and not host.has_grads else self.accum_slot(host.unit)
        source = arrived if slot is None else self._accumulate(host, slot, arrived, stream)
        host.has_grads = True
        if boundary and measure is not None:
            with stream.as_current():
                measure(source)
        produced.record(stream)
        produced.wait(self.d2h_stream)
        buffers.param_sent.wait(self.d2h_stream)
        with self.d2h_stream.as_current():
            buffers.grad.copy_(source, non_blocking=True)
        buffers.grad_ready.record(self.d2h_stream)
        if slot is not None:
            slot.last_use.record(self.d2h_stream)
        if boundary and last:
            self._start_update(host)
        return self.d2h_stream if slot is None else stream

    def _accumulate(self, host: OffloadedUnit, slot: AccumSlot, arrived: torch.Tensor, stream: Stream) -> torch.Tensor:
        """See Note [Sums over micro batches]."""
        total = slot.buffer.tensor[: arrived.numel()]
        if host.has_grads:
            buffers = host.current
            slot.last_use.wait(self.h2d_stream)
            buffers.grad_ready.wait(self.h2d_stream)
            with self.h2d_stream.as_current():
                total.copy_(buffers.grad, non_blocking=True)
            slot.ready.record(self.h2d_stream)
            slot.ready.wait(stream)
            with stream.as_current():
                total.add_(arrived)
        else:
            slot.last_use.wait(stream)
            with stream.as_current():
                total.copy_(arrived)
        return total

    def post_backward(self) -> None:
        """The step's last gradients have all been taken."""
        for host in self.units:
            if not host.update_requested:
                self._start_update(host)

    def _start_update(self, host: OffloadedUnit) -> None:
        """What needs no more than this unit's gradients: its update, or, where updates are delayed, the one before's end."""
        if host.unsent_update is not None:
            host.update_requested = True
            self._send_delayed(host, host.current.grad_ready)
        elif self.early_request is not None and not host.is_swapped:
            host.update_requested = True
            self._request_update(host, self.early_request(), send=True)

    # ------------------------------------------------------------------ the step

    def step(self, request: UpdateRequest, readers: Sequence[Stream]) -> None:
        """Asks for the updates that have not begun, in the request in which the next forward needs them.

        No parameter is overwritten before the present work of `readers` is done.
        """
        request.param_readers = tuple(Event(self.device) for _ in readers)
        for event, stream in zip(request.param_readers, readers, strict=True):
            event.record(stream)
            event.wait(self.h2d_stream)
        delayed = 0 < self.delayed_from <= request.step
        for host in self.units:
            if self.early_request is None and not host.is_swapped:
                self._request_update(host, request, send=not delayed)
            host.update_requested = host.has_grads = False
            host.turn = (host.turn + 1) % len(host.buffers)
        if self.swapper is not None:
            self._prefetched = False
            self._request_swapped_updates(self.swapper, request)

    def drop_grads(self) -> None:
        """Drops this step's sums.

        Raises:
            BadInput: when updates by them have begun.
        """
        if self.early_request is not None and any(host.update_requested for host in self.units):
            raise BadInput(
                "gradients cannot be dropped: updates by them have begun, as nothing clips or checks them",
                where="offload_optimizer",
                remedy="set gradient_clipping, with which updates wait for the step",
            )
        for host in self.units:
            host.has_grads = host.update_requested = False

    def _request_update(self, host: OffloadedUnit, request: UpdateRequest, *, send: bool) -> None:
        buffers = host.current

        def work() -> None:
            buffers.grad_ready.synchronize()
            if buffers.param is None:  # they are read, and written, where they are
                for event in request.param_readers:
                    event.synchronize()
            scalars = request.scalars() if request.scalars is not None else None
            buffers.skipped = scalars is not None and bool(scalars[kernels.SKIP])
            if buffers.skipped:
                return
            for group_slice in buffers.slices:
                self.update(group_slice, request.hyperparameters[group_slice.group], request.step, scalars)
            if send:
                self._send_params(host.unit, buffers)

        task = self.worker.submit(work)
        if send:
            self._expect_params(host, task)
        else:
            host.unsent_update = buffers

    def _request_swapped_updates(self, swapper: OptimizerSwapper, request: UpdateRequest) -> None:
        """One pass over the files updates all units in them, one after another."""
        wanted = [(host, Task(self.worker)) for host in self.units if host.is_swapped]
        swapper.block_param_reads(host.unit.name for host, _ in wanted)

        def send(host: OffloadedUnit, buffers: PinnedBuffers) -> None:
            self._send_params(host.unit, buffers)

        self.worker.submit(lambda: swapper.update(wanted, request, self.update, send, self.h2d_stream))
        for host, task in wanted:
            self._expect_params(host, task)

    def _send_params(self, unit: UnitState, buffers: PinnedBuffers) -> None:
        """Copies the updated parameters up (in the worker)."""
        if buffers.param is None or buffers.skipped:
            return
        assert unit.trainable is not None
        with self.h2d_stream.as_current():
            unit.trainable.shard.copy_(buffers.param, non_blocking=True)
        buffers.param_sent.record(self.h2d_stream)
        unit.updated.record(self.h2d_stream)

    def _send_delayed(self, host: OffloadedUnit, after: Event) -> None:
        """Asks for the parameters of an update that was delayed, once the work at `after` has read those of before."""
        buffers, host.unsent_update = host.unsent_update, None
        if buffers is not None:
            after.wait(self.h2d_stream)
            self._expect_params(host, self.worker.submit(lambda: self._send_params(host.unit, buffers)))

    def _expect_params(self, host: OffloadedUnit, task: Task) -> None:
        host.update_task = task
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
            host.wait_for_update()
            self._send_delayed(host, now)
        for host in self.units:
            host.wait_for_update()
        self.worker.submit(lambda: None).wait()  # reads ahead, and a pass's last writes
        self._prefetched = False

    def close(self) -> None:
        """Ends the thread."""
        self.worker.close()
