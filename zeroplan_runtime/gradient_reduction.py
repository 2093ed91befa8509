"""The gradients of units: where they are accumulated, when they are reduced over the ranks, and when they are freed.

Note [Lifetime of gradients]
    The memory of gradients is allocated while the compute stream is current, before the reduce stream uses it, and is freed
    once the compute stream waits for the reduce stream. So the allocator sees one stream only, and reuses the memory in that
    stream's order without a host synchronisation. See Note [Lifetimes] in core/layout.

Note [Gradients of a graph]
    A compiled block's backward returns the gradients of all its parameters at once, and nothing is allocated until autograd has
    handed on the last. They are copied together then: one by one they take the host longer than the device. A block that
    is not compiled has them one after the other, and each is copied and freed as it comes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from zeroplan_runtime.comm import Communicator
from zeroplan_runtime.model_states import ModelStates
from zeroplan_runtime.offload.host_optimizer import HostOptimizer
from zeroplan_runtime.streams import Event, Stream
from zeroplan_runtime.unit_state import UnitState

#: Values of `UnitGradients.received` for each parameter: 0 no gradient yet, 1 from an earlier micro batch, 2 from this one.
RECEIVED_EARLIER, RECEIVED_NOW = 1, 2


def note_arrival(unit: UnitState, position: int) -> None:
    """Notes that ``unit.grads.full`` holds a gradient of the parameter at `position`, of this micro batch."""
    unit.grads.received[position], unit.grads.arrived[position] = RECEIVED_NOW, True


class GradientReduction:
    """Collects the gradients of each unit and averages them over the ranks.

    Attributes:
        host: receives the gradients of offloaded units.
        measure: called with a unit and its reduced gradients, on the stream that has them, to take their sum of squares.
        boundary: the optimizer steps after this micro batch.
        keeps_own: gradients stay each rank's own in this step, as the optimizer exchanges its momentum instead.
        has_grads: there are gradients of this step.
        chunk: the units that the present backward reduces, those of one chunk of a pipeline; None for all.
        slots_are_due: slots that an earlier backward kept are to be freed after the next forward's first block.
    """

    def __init__(self, model_states: ModelStates, compute_stream: Stream) -> None:
        self.model_states, self.setup, self.comm = model_states, model_states.setup, model_states.comm
        device = model_states.arena.device
        self.compute_stream, self.reduce_stream = compute_stream, Stream(device)
        self._produced = Event(device)
        self._reducing = False  # the reduce stream has work that the compute stream does not wait for yet
        self.slots_are_due = False
        self.host: HostOptimizer | None = None
        self.measure: Callable[[UnitState, torch.Tensor], None] | None = None
        self.boundary = True
        self.keeps_own = False
        self.has_grads = False
        self.chunk: set[UnitState] | None = None
        self._whose: UnitState | None = None  # whose gradients wait to be copied; see Note [Gradients of a graph]
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # to, from

    def begin_backward(self) -> None:
        """Prepares a micro batch's backward; also clears what an interrupted backward left."""
        self.has_grads = True
        for unit in self.model_states.units:
            unit.grads.reduced = False

    def end_backward(self) -> None:
        """Reduces the gradients that have not been reduced when the whole backward has ended."""
        self._copy()
        for unit in reversed(self.model_states.units):
            came_late = unit.grads.slot is not None and RECEIVED_NOW in unit.grads.received
            if unit.trainable is not None and (came_late or (not unit.grads.reduced and self._is_due(unit))):
                self.reduce(unit, last=True)
        if self.host is not None and self.boundary:
            self.host.post_backward()
        for unit in self.model_states.units:
            unit.grads.reduced, unit.forward_count = False, 0
            unit.grads.received = unit.grads.received.replace(b"\x02", b"\x01")

    def _is_due(self, unit: UnitState) -> bool:
        """Returns whether the present backward reduces `unit`: one of its chunk, or one whose mean the step still waits for."""
        if self.chunk is None or unit in self.chunk:
            return True
        waits = unit.grads.slot is None or unit.offloaded is not None or not unit.grads.accumulated
        return self.boundary and waits

    def post_backward(self, unit: UnitState) -> None:
        """Reduces `unit`'s gradients after its backward, unless more of them are expected."""
        # Gradients that live until the step are best reduced once, so a unit that is called several times waits for the end.
        once = unit.forward_count == 1 and not unit.grads.reduces_late
        if RECEIVED_NOW in unit.grads.received and (once or unit.grads.slot is not None):
            self.reduce(unit, last=once)

    def acquire(self, unit: UnitState) -> None:
        """Makes ``unit.grads.full`` ready to be written by the compute stream.

        It is allocated, its slot is taken from the unit that holds it, or an average that it holds is undone.
        """
        self._copy()
        slot = unit.grads.slot
        if slot is not None:
            if slot.holder is not unit:
                if slot.holder is not None:
                    self.reduce(slot.holder)
                slot.last_use.wait(self.compute_stream)
                self.model_states.alloc_grad_slot(unit)
                slot.holder = unit
        else:
            self.model_states.alloc_grad(unit)
            if unit.grads.averaged:
                self._reopen_average(unit)

    def _reopen_average(self, unit: UnitState) -> None:
        """Turns averaged gradients back into one rank's contribution, so that the next average is the same mean plus what
        the ranks add.

        Gradients come after the average where parameters are used outside their unit's forward (a penalty on weights), and
        in the second of two backwards before a step.
        """
        assert unit.grad is not None
        assert unit.grads.full is not None
        self.wait()
        if self.setup.shards_states:  # only this rank's shard is averaged
            assert unit.trainable is not None
            mean = unit.grad * unit.trainable.layout.ranks
            unit.grads.full.zero_()
            unit.grad.copy_(mean)
        unit.grads.received = bytearray([RECEIVED_NOW]) * len(unit.grads.received)  # also what other ranks received
        unit.grads.reduces_late |= unit.grads.reduced
        unit.grads.averaged = unit.grads.reduced = False

    def accumulate(self, unit: UnitState, position: int, grad: torch.Tensor, *, of_graph: bool = False) -> None:
        """Adds one parameter's complete gradient to ``unit.grads.full``, or copies it there if it is the first.

        Args:
            unit: the parameter's unit.
            position: the parameter's index in the unit's trainable flat.
            grad: the gradient, in the parameter's shape; sparse gradients are made dense.
            of_graph: others of the unit follow at once: see Note [Gradients of a graph].
        """
        received = unit.grads.received
        if self._whose is not unit or received[position]:
            self.acquire(unit)
        if grad.is_sparse:
            grad = grad.to_dense()
        view, scale = unit.grads.views[position], self.model_states.grad_scale(unit)
        if received[position]:
            view.add_(grad, alpha=scale)
        elif scale != 1.0:
            torch.mul(grad, scale, out=view)
        elif of_graph:
            self._whose = unit
            self._copies.append((view, grad))
        else:
            view.copy_(grad)
        note_arrival(unit, position)
        if all(received):
            self._copy()

    def _copy(self) -> None:
        """Copies the gradients that wait for it. See Note [Gradients of a graph]."""
        if self._copies:
            views, grads = zip(*self._copies, strict=True)
            self._whose, self._copies = None, []
            torch._foreach_copy_(views, grads)

    def reduce(self, unit: UnitState, *, last: bool = False) -> None:
        """Averages `unit`'s gradients over the ranks, on the reduce stream. A parameter without a gradient counts as zero.

        At stages 0 and 1 this happens in the last micro batch only, from stage 2 on in each.

        Args:
            unit: the unit.
            last: no more gradients of the unit are expected in this micro batch.
        """
        self._copy()
        if unit.grads.slot is None and not self.boundary:
            unit.grads.reduced = True
            return
        if unit.grads.averaged or (unit.grads.slot is not None and unit.grads.slot.holder is not unit):
            self.acquire(unit)  # no gradient arrived, but the collective needs zeros
        self.model_states.alloc_grad(unit)
        missing = [view for view, received in zip(unit.grads.views, unit.grads.received, strict=True) if not received]
        missing += unit.grads.gaps  # the padding is uninitialised
        if missing:
            torch._foreach_zero_(missing)
        unit.grads.reduced = True
        if self.keeps_own:
            return
        staging = self.model_states.staging
        if staging is not None and not unit.layout.shape.in_ring:
            staging.alloc()
        done = self.reduce_stream
        self.comm.record_collective(2 * unit.index + 1)
        if self.comm.world_size > 1 or unit.offloaded is not None:
            self._produced.record(self.compute_stream)
            self._produced.wait(self.reduce_stream)
            if unit.offloaded is not None:
                done = self._reduce_to_host(unit, last=last)
            else:
                with self.reduce_stream.as_current():
                    self._reduce_on_device(unit)
            self._reducing = True
        if unit.grads.slot is not None:
            unit.grads.slot.last_use.record(done)
            unit.grads.slot.holder = None
            unit.grads.received = bytearray(len(unit.grads.received))

    def _reduce_to_host(self, unit: UnitState, *, last: bool) -> Stream:
        """Reduces in place and copies this rank's part to the host; returns the stream that reads ``grads.full`` last."""
        assert self.host is not None
        assert unit.offloaded is not None
        assert unit.trainable is not None
        assert unit.grads.full is not None
        arrived = unit.grads.full
        if self.comm.world_size > 1:
            arrived = self.model_states.local_shard(unit.grads.full, unit.trainable.layout)
            with self.reduce_stream.as_current():
                self.model_states.comm_of(unit.trainable.layout).reduce_scatter(arrived, unit.grads.full)
        measure = partial(self.measure, unit) if self.measure is not None else None
        return self.host.offload_grad(
            unit.offloaded, arrived, self.reduce_stream, boundary=self.boundary, last=last, measure=measure
        )

    def _reduce_on_device(self, unit: UnitState) -> None:
        assert unit.grad is not None
        assert unit.grads.full is not None
        assert unit.trainable is not None
        comm = self.model_states.comm_of(unit.trainable.layout)
        if not self.setup.shards_grads:
            if self.setup.shards_states:
                comm.reduce_scatter(unit.grad, unit.grads.full)
            else:
                comm.all_reduce_mean(unit.grads.full)
            unit.grads.averaged = True
        elif self.model_states.staging is None or unit.layout.shape.in_ring:
            self._reduce_scatter(comm, unit, unit.grads.full, unit.grad)
        else:
            # Part by part of every rank's shard, cast in the staging buffer: see Note [Layout] in core/arena/layout.
            count, staging, piece = comm.world_size, self.model_states.staging.tensor, self.model_states.layout.piece
            shards = unit.grads.full.view(count, -1)
            for begin in range(0, shards.shape[1], piece):
                part = shards[:, begin : begin + piece]
                whole = staging[: part.numel()]
                whole.view(count, -1).copy_(part)
                self._reduce_scatter(comm, unit, whole, unit.grad[begin : begin + piece])
        unit.grads.accumulated = True

    def _reduce_scatter(self, comm: Communicator, unit: UnitState, whole: torch.Tensor, share: torch.Tensor) -> None:
        """Reduce-scatters `whole` and adds this rank's part of the mean to `share`, or copies it there if it is the first.

        Args:
            comm: the ranks that hold other shards.
            unit: the unit; tells whether earlier micro batches are in `share`.
            whole: [ranks × n] elements; overwritten where the dtypes differ or `share` holds a sum.
            share: [n] elements of this rank's gradients.
        """
        if not unit.grads.accumulated and share.dtype == whole.dtype:
            comm.reduce_scatter(share, whole)
            return
        first = comm.rank * share.numel()
        arrived = whole[first : first + share.numel()]  # in place: the collective sends this part before it writes it
        comm.reduce_scatter(arrived, whole)
        if unit.grads.accumulated:
            share.add_(arrived)
        else:
            share.copy_(arrived)

    def wait(self) -> None:
        """Makes the compute stream wait for all reductions, before the optimizer reads the gradients."""
        self._copy()
        if self._reducing:
            self._produced.record(self.reduce_stream)
            self._produced.wait(self.compute_stream)
            self._reducing = False

    def free_slots(self) -> None:
        """Frees the slots of unsharded gradients, after making the compute stream wait for the reductions that read them."""
        self.slots_are_due = False
        self._copy()  # of an interrupted backward
        held = [slot for slot in self.model_states.grad_slots.values() if slot.buffer.is_allocated]
        if held:
            self.wait()
        if self.model_states.staging is not None:
            self.model_states.staging.free()
        for sums in self.model_states.accum_slots.values():
            if sums.buffer.is_allocated:
                sums.last_use.wait(self.compute_stream)
                sums.buffer.free()
        for slot in held:
            slot.last_use.wait(self.compute_stream)
            if slot.holder is not None:  # an interrupted backward left it
                slot.holder.grads.received = bytearray(len(slot.holder.grads.received))
                slot.holder = None
            slot.buffer.free()

    def free(self, unit: UnitState) -> None:
        """Frees `unit`'s gradients, once its update has been issued or they are dropped; the next ones start a new sum."""
        unit.grads.accumulated = unit.grads.averaged = False
        unit.grads.received, unit.grads.arrived = (bytearray(len(unit.grads.received)) for _ in range(2))
        if unit.grads.buffer is not None:
            unit.grads.buffer.free()

    def drop(self, *, anyway: bool = False) -> None:
        """Frees all gradients without a step.

        Args:
            anyway: also those that updates on the host have begun with.

        Raises:
            BadInput: when updates on the host have begun.
        """
        self._whose, self._copies = None, []
        if self.host is not None:
            self.host.drop_grads(anyway=anyway)
        self.wait()
        self.free_slots()
        for unit in self.model_states.units:
            self.free(unit)
        self.has_grads = False
