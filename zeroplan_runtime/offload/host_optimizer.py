"""The optimizer in host memory: gradients are copied down as they are reduced, parameters up as they are updated.

Note [Pinned buffers]
    Each offloaded unit has one pinned buffer as long as this rank's share. Its gradients are copied into it, and its updated
    16-bit parameters are copied from it: the update reads element i of the gradient before it writes element i of the
    parameter, so where both have the same width they share the bytes. Masters and states, which only the CPU touches, are
    pageable.

Note [Accumulation on the host]
    With accumulation the sum of the gradients stays in the pinned buffer. For each micro batch it is copied to a small slot on
    the device while the unit's new gradients are reduced, they are added there, and the sum is copied back. The link carries
    both directions at once, so this takes as long as copying every micro batch's gradients down. Keeping the sum on the
    device would cost the memory that offload saves; adding on the host would use the memory bandwidth and the cores that the
    updates need. The sum is rounded by the same operation as without offload.

Note [Waits]
    The worker thread waits for a unit's gradients (an event) and, where clipping or loss scaling make the step depend on all
    gradients, for the step's scalars (another event). The model's thread waits for a unit's update when it unshards that unit
    in the next forward. Streams wait for copies by events. With neither clipping nor overflow checks, a unit's update begins
    as soon as its gradients have arrived, beside the rest of the backward.

Note [Delayed update]
    With the delayed parameter update (Ren et al. 2021, ZeRO-Offload, section 5.2) the update with step i's gradients runs
    beside forward and backward i + 1, which use the parameters before it. Its parameters are copied to the device while
    backward i + 1 leaves the units, and forward i + 2 is the first to use them. Each unit then has two sets of pinned buffers
    that take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from zeroplan.core.errors import BadInput
from zeroplan_runtime import kernels
from zeroplan_runtime.offload.host_worker import HostTask, Worker
from zeroplan_runtime.offload.optimizer_swapper import OptimizerSwapper
from zeroplan_runtime.offload.update_request import Update, UpdateRequest
from zeroplan_runtime.streams import Event, Stream, wait_when_dropped
from zeroplan_runtime.unit_state import AccumSlot, OffloadedUnit, PinnedBuffers, UnitState


@dataclass(eq=False)
class HostOptimizer:
    """Updates the offloaded units of one rank, with a worker thread and two copy streams.

    Attributes:
        units: the offloaded units, in the order of definition.
        update: the optimizer's arithmetic.
        worker: the thread that updates.
        sends_grads_directly: each unit is reduced once a step, in the dtype of its pinned buffer, so no sum is needed.
        accum_slot: gives the allocated slot in which a unit's gradients are accumulated.
        delayed_from: the first step whose update is delayed; 0 for none.
        swapper: updates the units that have something in files; None where there are none.
        early_request: gives the request of an update that may begin in the backward; None where updates wait for the step.
    """

    units: Sequence[OffloadedUnit]
    update: Update
    worker: Worker
    device: torch.device
    sends_grads_directly: bool
    accum_slot: Callable[[UnitState], AccumSlot]
    delayed_from: int = 0
    swapper: OptimizerSwapper | None = None
    early_request: Callable[[], UpdateRequest] | None = None
    d2h_stream: Stream = field(init=False)
    h2d_stream: Stream = field(init=False)
    _prefetched: bool = field(init=False, default=False)  # the swapper reads ahead for this step's update

    def __post_init__(self) -> None:
        self.d2h_stream, self.h2d_stream = Stream(self.device), Stream(self.device)
        wait_when_dropped(self, self.device, (self.d2h_stream, self.h2d_stream))

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
        """Copies a unit's reduced gradients to the host and adds them to this step's sum there.

        Args:
            host: the unit.
            arrived: [share] this rank's part of the mean, on the device, complete when `stream` has done its work.
            stream: the stream that computed `arrived`.
            boundary: this is the last micro batch of the step.
            last: no more gradients of this unit are expected in this micro batch.
            measure: called on `stream` with the sum so far, to take its sum of squares; None where no norm is needed.

        Returns:
            The stream whose work so far must be done before `arrived` is overwritten.

        Raises:
            BadInput: when the unit's update for this step has begun.
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
        """Returns the sum of `arrived` and this step's earlier gradients, on the device: see Note [Accumulation on the
        host].
        """
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
        """Starts what can start now that all gradients of the step have been taken."""
        for host in self.units:
            if not host.update_requested:
                self._start_update(host)

    def _start_update(self, host: OffloadedUnit) -> None:
        """Requests the unit's early update, or sends the parameters of its delayed update, once its gradients are complete."""
        if host.unsent_update is not None:
            host.update_requested = True
            self._send_delayed(host, host.current.grad_ready)
        elif self.early_request is not None and not host.is_swapped:
            host.update_requested = True
            self._request_update(host, self.early_request(), send=True)

    # ------------------------------------------------------------------ the step

    def step(self, request: UpdateRequest, readers: Sequence[Stream]) -> None:
        """Requests the updates that have not begun, in the order in which the next forward needs them.

        Args:
            request: the step's hyperparameters and scalars.
            readers: streams that read the parameters; none is overwritten before their work so far is done.
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

    def drop_grads(self, *, anyway: bool = False) -> None:
        """Drops this step's gradients.

        Args:
            anyway: also those that updates have begun with, as where the parameters will be overwritten.

        Raises:
            BadInput: when updates with them have begun.
        """
        if not anyway and self.early_request is not None and any(host.update_requested for host in self.units):
            raise BadInput(
                "gradients cannot be dropped: updates with them have begun, as neither clipping nor overflow checks delay them",
                where="offload_optimizer",
                remedy="set gradient_clipping, with which updates wait for the step",
            )
        for host in self.units:
            host.has_grads = host.update_requested = False

    def _request_update(self, host: OffloadedUnit, request: UpdateRequest, *, send: bool) -> None:
        buffers, slices = host.current, host.current.slices

        def work() -> None:
            buffers.grad_ready.synchronize()
            if buffers.param is None:  # the device reads the parameters where the update writes them
                for event in request.param_readers:
                    event.synchronize()
            scalars = request.scalars() if request.scalars is not None else None
            buffers.skipped = scalars is not None and bool(scalars[kernels.SKIP])
            if buffers.skipped:
                return
            for group_slice in slices:
                self.update(group_slice, request.hyperparameters[group_slice.group], request.step, scalars)
            if send:
                self._send_params(host.unit, buffers)

        task = self.worker.submit(work)
        if send:
            self._expect_params(host, task)
        else:
            host.unsent_update = buffers

    def _request_swapped_updates(self, swapper: OptimizerSwapper, request: UpdateRequest) -> None:
        """Requests one pass over the files that updates all units in them."""
        wanted = [(host, HostTask(self.worker)) for host in self.units if host.is_swapped]
        swapper.block_param_reads(host.unit.name for host, _ in wanted)

        def send(host: OffloadedUnit, buffers: PinnedBuffers) -> None:
            self._send_params(host.unit, buffers)

        self.worker.submit(lambda: swapper.update(wanted, request, self.update, send, self.h2d_stream))
        for host, task in wanted:
            self._expect_params(host, task)

    def _send_params(self, unit: UnitState, buffers: PinnedBuffers) -> None:
        """Copies a unit's updated parameters to the device. The worker calls it."""
        if buffers.param is None or buffers.skipped:
            return
        assert unit.trainable is not None
        with self.h2d_stream.as_current():
            unit.trainable.shard.copy_(buffers.param, non_blocking=True)
        buffers.param_sent.record(self.h2d_stream)
        unit.updated.record(self.h2d_stream)

    def _send_delayed(self, host: OffloadedUnit, after: Event) -> None:
        """Requests the copy of a delayed update's parameters, after `after`: the last read of the parameters before it."""
        buffers, host.unsent_update = host.unsent_update, None
        if buffers is not None:
            after.wait(self.h2d_stream)
            self._expect_params(host, self.worker.submit(lambda: self._send_params(host.unit, buffers)))

    def _expect_params(self, host: OffloadedUnit, task: HostTask) -> None:
        host.update_task = task
        host.unit.param_slot.is_current = False

    # ------------------------------------------------------------------ between steps

    def drain(self, reader: Stream) -> None:
        """Blocks until every requested update is in the masters and its parameters are on their way to the device.

        The parameters of a delayed update are sent too, after `reader`, the stream that reads parameters, has done its work
        so far. Training then continues from the same state as a run resumed from a checkpoint.

        Raises:
            RuntimeError: when an update failed.
        """
        now = Event(self.device)
        now.record(reader)
        for host in self.units:
            host.wait_for_update()
            self._send_delayed(host, now)
        for host in self.units:
            host.wait_for_update()
        self.wait_for_worker()  # for prefetches and the last writes of a pass
        self._prefetched = False

    def wait_for_worker(self) -> None:
        """Blocks until the worker has done what was requested."""
        self.worker.submit(lambda: None).wait()

    def close(self) -> None:
        """Ends the worker thread, after it has done what was requested."""
        self.worker.close()
