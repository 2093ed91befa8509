"""The Schedule: when units are gathered, when their gradients are reduced, and which lane waits for which.

Note [Order of collectives]
    All ranks must issue the same collectives in the same order. So gathers and reductions are issued from the forward and
    backward of *modules*, which all ranks run alike, and never from the arrival of single gradients, which may differ
    (an expert that one rank did not use). A unit's gradients are reduced when the backward reaches the next unit; those of
    the root, and of units whose backward was not seen, when the backward has ended.
    Where the ranks' data decide which units run, the order differs all the same, and equal sizes are mixed without any error.
    So each rank makes a number of its order, and the step compares them (:attr:`Schedule.collectives_hash`).

Note [Backward of a unit]
    The backward of a unit begins when a gradient of its output arrives, or when gradient checkpointing runs its forward
    again, whichever is first. It is over when another unit's begins: autograd runs the youngest operation first, so all of
    the later unit's work has been issued by then. Weights that are read later still would be those of
    another unit; units that interleave like this need separate slots, and :meth:`Schedule.unshard` refuses the others.

Note [Gradients come and go]
    Their memory comes while the model's stream is current, before the reduce lane is told of it, and goes once that stream
    waits for the reduce lane. So it belongs to one stream throughout, and is reused in that stream's order without the host.
    See Note [Lifetimes] in core/layout.

Note [Waiting for the host]
    A unit whose update is still to come, or that is still to be read from a file, makes the host wait when it is gathered.
    In the forward it is therefore gathered when all of the unit before it has been launched. In the backward, which tells
    nobody when that is, it is gathered before: the device has what the host launched earlier to go on with, as many units of
    it as have been read ahead. Both depend on where a unit rests alone, never on whether it has arrived, as that may differ
    between the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from zeroplan.core.buffers import Phase, Place
from zeroplan.core.errors import BadInput
from zeroplan.core.layout import UnitKind
from zeroplan_runtime.checks import refuse_copy
from zeroplan_runtime.execution_order import ExecutionOrder
from zeroplan_runtime.model_states import ModelStates
from zeroplan_runtime.offload.host_optimizer import HostOptimizer
from zeroplan_runtime.offload.param_swapper import FetchRequest
from zeroplan_runtime.pytree import tensors_of
from zeroplan_runtime.streams import Event, Stream
from zeroplan_runtime.unit_state import FlatParam, UnitState

#: `UnitState.grad_received`, per parameter: its gradient came in an earlier micro batch, or in this one.
RECEIVED_EARLIER, RECEIVED_NOW = 1, 2
#: A prime below 2²⁴.
_HASH_MODULUS = 16777213


class Schedule:
    """Hooks a model's units to the store's slots and the ranks' collectives."""

    def __init__(self, model_states: ModelStates) -> None:
        self.model_states, self.setup, self.comm = model_states, model_states.setup, model_states.comm
        device = model_states.arena.device
        self.compute_stream = Stream.current(device)
        self.all_gather_stream = Stream(device)
        self.reduce_stream = Stream(device)
        self._produced = Event(device)
        self._reducing = False  # the reduce lane has work that the model's stream does not wait for yet
        self._frees_grad_slots = (
            False  # an earlier backward left its slots, to be given back behind the next forward's first block
        )
        self.host: HostOptimizer | None = None  # takes the gradients of offloaded units
        self.measure: Callable[[UnitState, torch.Tensor], None] | None = None  # takes the sum of squares of theirs
        self.boundary = True  # this micro batch is the last before the step
        self.where = "start"  # for the watchdog
        self.progress_count = 0
        self.in_backward = False  # within engine.backward(): gradients are this step's
        self.collectives_hash = 0  # of the collectives since the last step, as a number that fp32 holds exactly
        self._in_backward = False
        self._grad_enabled = False  # a backward follows this forward
        self._current: UnitState | None = None
        units = model_states.units
        self._execution_order = ExecutionOrder(units)
        self._last: UnitState | None = None
        for unit in units:
            unit.updated.record(self.compute_stream)  # the store has filled the shards in this lane
        self._handles: list[Any] = []
        self._hooked = self.comm.world_size > 1 or any(u.layout.offloaded for u in units) or self.setup.shards_params
        if self._hooked:
            for unit in units:
                self._hook(unit)

    def _hook(self, unit: UnitState) -> None:
        # First of all hooks before the forward and last after it, so that what others hook in finds the parameters.
        enter = unit.module.register_forward_pre_hook(partial(self._pre_forward, unit), prepend=True)
        leave = unit.module.register_forward_hook(partial(self._post_forward, unit), with_kwargs=True)
        self._handles += [enter, leave]

    def remove(self) -> None:
        """Takes the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    __reduce_ex__ = refuse_copy

    # ------------------------------------------------------------------ forward

    def root_pre_forward(self) -> None:
        """Called before a forward of the whole model; forgets what an interrupted one left."""
        self._set_phase(backward=False)
        self._grad_enabled = torch.is_grad_enabled()
        self._current = self._last = None
        for slot in self.model_states.param_slots.values():
            slot.in_use = False
        self._frees_grad_slots = any(slot.buffer.is_allocated for slot in self.model_states.grad_slots.values())
        self.in_backward = False

    def _pre_forward(self, unit: UnitState, _module: torch.nn.Module, _args: Any) -> None:
        if self._in_backward:  # recomputed under gradient checkpointing
            self.pre_backward(unit, recompute=True)
            return
        self._record_progress("forward", unit)
        self.unshard(unit)
        unit.param_slot.ready.wait(self.compute_stream)
        unit.param_slot.in_use = not unit.is_root
        if self._last is not None and self._last is not unit:
            self._execution_order.next_in_forward[self._last] = unit
        self._last = unit
        unit.forward_count += 1
        self._prefetch_unshard(self._execution_order.next_in_forward.get(unit))

    def _post_forward(self, unit: UnitState, _module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._in_backward:
            return
        self._reshard(unit)
        if not unit.is_root:  # whose forward ends last
            self._unshard_deferred(self._execution_order.next_in_forward.get(unit))
        if self._frees_grad_slots and unit.layout.shape.kind is not UnitKind.WIDE:
            self.free_grad_slots()
        if torch.is_grad_enabled():
            passed_through = {id(tensor) for tensor in tensors_of((args, kwargs))}
            for tensor in tensors_of(output):
                if tensor.requires_grad and id(tensor) not in passed_through:
                    tensor.register_hook(partial(self._output_grad_hook, unit))  # type: ignore[no-untyped-call]

    def _reshard(self, unit: UnitState) -> None:
        slot = unit.param_slot
        if slot.holder is unit and not unit.is_root:
            slot.in_use = False
            slot.last_use.record(self.compute_stream)

    # ------------------------------------------------------------------ gathering

    def unshard(self, unit: UnitState) -> None:
        """Starts to bring `unit`'s current parameters into its place, unless they are there.

        Raises:
            BadInput: when another unit is still computing in the same slot.
        """
        slot = unit.param_slot
        if slot.holder is unit and slot.is_current:
            return
        if slot.in_use and slot.holder is not unit:
            holder = slot.holder.name if slot.holder else "?"
            raise BadInput(
                f"unit {unit.name!r} is needed while {holder!r} still computes in the slot {slot.name!r} that they share",
                where="stage 3",
                remedy='set {"zeroplan": {"ring": N}} higher, or give a policy that joins them',
            )
        if unit.offloaded is not None:
            unit.offloaded.wait_for_update()
        slot.last_use.wait(self.all_gather_stream)
        unit.updated.wait(self.all_gather_stream)
        if unit.in_files:
            shards = {buffer: flat.shard for buffer, flat in unit.flats_by_buffer()}
            self.model_states.param_swapper.fetch(self._upcoming_reads(unit), shards, self.all_gather_stream)
        with self.all_gather_stream.as_current():
            if unit.trainable is not None:
                if self.setup.casts_masters and unit.master is not None:
                    unit.trainable.shard.copy_(unit.master)
                self._all_gather(unit, unit.trainable)
            if unit.frozen is not None and slot.holder is not unit:
                self._all_gather(unit, unit.frozen)
        slot.ready.record(self.all_gather_stream)
        slot.holder, slot.is_current = unit, True
        self._record_collective(2 * unit.index)

    def _all_gather(self, unit: UnitState, flat: FlatParam) -> None:
        """Makes `flat` whole, in the gather lane."""
        shard = flat.shard
        if unit.layout.param_place is Place.PINNED:
            shard = self.model_states.local_shard(flat.full, flat.layout)
            shard.copy_(flat.shard, non_blocking=True)
        if self.comm.world_size > 1:
            self.comm.all_gather(flat.full, shard)

    def _prefetch_unshard(self, unit: UnitState | None) -> None:
        """Gathers `unit` early, unless that is to wait: see Note [Waiting for the host]."""
        if (
            unit is not None
            and _can_use_slot(unit)
            and not _has_pending_update(unit)
            and (self._in_backward or not unit.in_files)
        ):
            self.unshard(unit)

    def _unshard_deferred(self, unit: UnitState | None) -> None:
        """Called when all of the unit before has been launched: the host has nothing better to do than to wait for `unit`."""
        if unit is not None and _can_use_slot(unit) and (_has_pending_update(unit) or unit.in_files):
            self.unshard(unit)

    def _read_ahead(self) -> None:
        """Reads what the next forward will ask for first."""
        if self.model_states.layout.param_buffer:
            self.model_states.param_swapper.prefetch(self._upcoming_reads(self.model_states.units[0]))

    def _upcoming_reads(self, unit: UnitState) -> Iterator[FetchRequest]:
        slots = self.model_states.param_slots.values()
        return self._execution_order.reads(unit, slots, backward=self._in_backward, grad_enabled=self._grad_enabled)

    def mark_updated(self, unit: UnitState) -> None:
        """Called when the optimizer has been given `unit`'s update: gathered copies of it are out of date from here on.

        Its gather may then run beside the updates of the units that follow.
        """
        unit.updated.record(self.compute_stream)
        if self.setup.shards_states and unit.trainable is not None and unit.param_slot.holder is unit:
            unit.param_slot.is_current = False

    def prefetch_forward(self) -> None:
        """Starts the gathers that the next forward will ask for first, as far as their slots are free."""
        if not self._hooked:
            return
        if not self.setup.shards_params:
            for unit in self.model_states.units:
                self._prefetch_unshard(unit)
            return
        self._read_ahead()
        taken: set[str] = set()
        upcoming: UnitState | None = self.model_states.units[0]
        while upcoming is not None and upcoming.param_slot.name not in taken and not _has_pending_update(upcoming):
            self.unshard(upcoming)
            taken.add(upcoming.param_slot.name)
            upcoming = self._execution_order.next_in_forward.get(upcoming)

    def wait_for_unshard(self) -> None:
        """Makes the model's stream wait for every gather that was started."""
        for unit in self.model_states.units:
            if _has_pending_update(unit) and not self.setup.shards_params:
                self.unshard(unit)
            unit.param_slot.ready.wait(self.compute_stream)

    # ------------------------------------------------------------------ backward

    def root_pre_backward(self) -> None:
        """Called before a micro batch's backward; forgets what an interrupted one left."""
        self.in_backward = True
        for unit in self.model_states.units:
            unit.reduced = False

    def _output_grad_hook(self, unit: UnitState, _grad: torch.Tensor) -> None:
        if self.in_backward:
            self.pre_backward(unit)
        else:  # torch.autograd.grad(), which reads the parameters but leaves no gradients of theirs
            self.unshard(unit)
            unit.param_slot.ready.wait(self.compute_stream)

    def pre_backward(self, unit: UnitState, *, recompute: bool = False) -> None:
        """The backward has reached `unit`: see Note [Backward of a unit]."""
        if not self._in_backward:
            self._set_phase(backward=True)
        if unit is self._current or (unit.is_root and not recompute and unit.param_slot.is_current):
            return
        self._record_progress("backward", unit)
        before, self._current = self._current, None if unit.is_root else unit
        if before is not None and not unit.is_root:
            self._execution_order.next_in_backward[before] = unit
        if before is not None:
            self._post_backward(before)
        if unit.gathers_in_backward or recompute:
            self.unshard(unit)
            unit.param_slot.ready.wait(self.compute_stream)
            unit.param_slot.in_use = not unit.is_root
        following = self._execution_order.next_in_backward.get(unit)
        if following is not None and following.gathers_in_backward:
            self._prefetch_unshard(following)

    def _post_backward(self, unit: UnitState) -> None:
        self._reshard(unit)
        # Gradients kept whole are best reduced once: not before the last of several forwards has been gone back through.
        once = unit.forward_count == 1 and not unit.reduces_late
        if RECEIVED_NOW in unit.grad_received and (once or unit.grad_slot is not None):
            self.reduce_grads(unit, last=once)

    def root_post_backward(self) -> None:
        """Called when a micro batch's backward has returned: reduces what is left."""
        if self._current is not None:
            self._post_backward(self._current)
        for unit in reversed(self.model_states.units):
            came_late = unit.grad_slot is not None and RECEIVED_NOW in unit.grad_received
            if unit.trainable is not None and (came_late or not unit.reduced):
                self.reduce_grads(unit, last=True)
        if self.host is not None and self.boundary:
            self.host.post_backward()
        for unit in self.model_states.units:
            unit.reduced, unit.forward_count = False, 0
            unit.grad_received = unit.grad_received.replace(b"\x02", b"\x01")
        self._in_backward = self.in_backward = False
        self._current = self._last = None
        if not self.boundary:
            self._read_ahead()
        if self.boundary and not self.setup.delayed_update:
            self.free_grad_slots()

    # ------------------------------------------------------------------ gradients

    def acquire_full_grad(self, unit: UnitState) -> None:
        """Makes the place for `unit`'s whole gradients ready to be written on the model's stream."""
        slot = unit.grad_slot
        if slot is not None:
            if slot.holder is not unit:
                if slot.holder is not None:
                    self.reduce_grads(slot.holder)
                slot.last_use.wait(self.compute_stream)
                self.model_states.alloc_grad_slot(unit)
                slot.holder = unit
        elif unit.grad_buffer is not None and not unit.grad_buffer.is_allocated:
            self.model_states.alloc_grad(unit)
        elif unit.averaged:
            self._reopen_average(unit)

    def _reopen_average(self, unit: UnitState) -> None:
        """Makes whole gradients that have been averaged a rank's own again, such that the next average is theirs and what is
        added. Gradients come this late where parameters are used outside their unit's forward (a penalty on weights), and in
        the second of two backwards before a step.
        """
        assert unit.grad is not None
        assert unit.grad_full is not None
        self.wait_for_reductions()
        if self.setup.shards_states:  # only this rank's shard holds the mean
            mean = unit.grad * self.comm.world_size
            unit.grad_full.zero_()
            unit.grad.copy_(mean)
        unit.grad_received = bytearray([RECEIVED_NOW]) * len(unit.grad_received)  # also what other ranks received
        unit.reduces_late |= unit.reduced
        unit.averaged = unit.reduced = False

    def accumulate_grad(self, unit: UnitState, position: int, grad: torch.Tensor) -> None:
        """Takes over the complete gradient of one parameter, adding to what this one has received before."""
        self.acquire_full_grad(unit)
        if grad.is_sparse:
            grad = grad.to_dense()
        if unit.grad_received[position]:
            unit.grad_views[position].add_(grad)
        else:
            unit.grad_views[position].copy_(grad)
        unit.grad_received[position] = RECEIVED_NOW

    def reduce_grads(self, unit: UnitState, *, last: bool = False) -> None:
        """Averages `unit`'s gradients over the ranks, in the reduce lane; parameters without gradient count as zero.

        Whole gradients (stages 0 and 1) wait for the last micro batch; those in slots are reduced in each. `last`: no more
        gradients of this unit are expected in this micro batch.
        """
        if unit.grad_slot is None and not self.boundary:
            unit.reduced = True
            return
        if unit.averaged or (unit.grad_slot is not None and unit.grad_slot.holder is not unit):
            self.acquire_full_grad(unit)  # none of its gradients came, and its zeros need a place, too
        if unit.grad_buffer is not None and not unit.grad_buffer.is_allocated:
            self.model_states.alloc_grad(unit)
        missing = [view for view, grad_received in zip(unit.grad_views, unit.grad_received, strict=True) if not grad_received]
        missing += unit.grad_gaps  # anything may lie there
        if missing:
            torch._foreach_zero_(missing)
        unit.reduced = True
        staging = self.model_states.staging
        if staging is not None and not staging.is_allocated and unit.layout.shape.kind is not UnitKind.BLOCK:
            staging.alloc()
        done = self.reduce_stream
        self._record_collective(2 * unit.index + 1)
        if self.comm.world_size > 1 or unit.offloaded is not None:
            self._produced.record(self.compute_stream)
            self._produced.wait(self.reduce_stream)
            if unit.offloaded is not None:
                done = self._reduce_to_host(unit, last=last)
            else:
                with self.reduce_stream.as_current():
                    self._reduce_on_device(unit)
            self._reducing = True
        if unit.grad_slot is not None:
            unit.grad_slot.last_use.record(done)
            unit.grad_slot.holder = None
            unit.grad_received = bytearray(len(unit.grad_received))

    def _reduce_to_host(self, unit: UnitState, *, last: bool) -> Stream:
        """The reduced share leaves from where it lies; returns the lane that reads it last."""
        assert self.host is not None
        assert unit.offloaded is not None
        assert unit.trainable is not None
        assert unit.grad_full is not None
        arrived = unit.grad_full
        if self.comm.world_size > 1:
            arrived = self.model_states.local_shard(unit.grad_full, unit.trainable.layout)
            with self.reduce_stream.as_current():
                self.comm.reduce_scatter(arrived, unit.grad_full)
        measure = partial(self.measure, unit) if self.measure is not None else None
        return self.host.offload_grad(
            unit.offloaded, arrived, self.reduce_stream, boundary=self.boundary, last=last, measure=measure
        )

    def _reduce_on_device(self, unit: UnitState) -> None:
        assert unit.grad is not None
        assert unit.grad_full is not None
        if not self.setup.shards_grads:
            if self.setup.shards_states:
                self.comm.reduce_scatter(unit.grad, unit.grad_full)
            else:
                self.comm.all_reduce_mean(unit.grad_full)
            unit.averaged = True
        elif self.model_states.staging is None or unit.layout.shape.kind is UnitKind.BLOCK:
            self._reduce_scatter(unit, unit.grad_full, unit.grad)
        else:
            # A piece of every rank's shard at a time, cast on its way: see Note [Layout] in core/layout.
            count, staging, piece = self.comm.world_size, self.model_states.staging.tensor, self.model_states.layout.piece
            shards = unit.grad_full.view(count, -1)
            for begin in range(0, shards.shape[1], piece):
                part = shards[:, begin : begin + piece]
                whole = staging[: part.numel()]
                whole.view(count, -1).copy_(part)
                self._reduce_scatter(unit, whole, unit.grad[begin : begin + piece])
        unit.accumulated = True

    def _reduce_scatter(self, unit: UnitState, whole: torch.Tensor, share: torch.Tensor) -> None:
        """Adds this rank's part of the mean of `whole` to `share`, which is a part of `unit`'s, or begins it."""
        if not unit.accumulated and share.dtype == whole.dtype:
            self.comm.reduce_scatter(share, whole)
            return
        first = self.comm.rank * share.numel()
        arrived = whole[first : first + share.numel()]  # in place: what lay there is sent first
        self.comm.reduce_scatter(arrived, whole)
        if unit.accumulated:
            share.add_(arrived)
        else:
            share.copy_(arrived)

    def wait_for_reductions(self) -> None:
        """Makes the model's stream wait for all reductions, before the optimizer reads the gradients."""
        if self._reducing:
            self._produced.record(self.reduce_stream)
            self._produced.wait(self.compute_stream)
            self._reducing = False

    def free_grad_slots(self) -> None:
        """Gives the slots of whole gradients back, once the model's stream waits for the reductions from them."""
        self._frees_grad_slots = False
        held = [slot for slot in self.model_states.grad_slots.values() if slot.buffer.is_allocated]
        if held:
            self.wait_for_reductions()
        if self.model_states.staging is not None and self.model_states.staging.is_allocated:
            self.model_states.staging.free()
        for sums in self.model_states.accum_slots.values():
            if sums.buffer.is_allocated:
                sums.last_use.wait(self.compute_stream)
                sums.buffer.free()
        for slot in held:
            slot.last_use.wait(self.compute_stream)
            if slot.holder is not None:  # an interrupted backward's
                slot.holder.grad_received = bytearray(len(slot.holder.grad_received))
                slot.holder = None
            slot.buffer.free()

    def free_grads(self, unit: UnitState) -> None:
        """Called when the optimizer has been given `unit`'s update: its gradients go, and the next begin new sums."""
        unit.accumulated = unit.averaged = False
        unit.grad_received = bytearray(len(unit.grad_received))
        if unit.grad_buffer is not None and unit.grad_buffer.is_allocated:
            unit.grad_buffer.free()

    def drop_grads(self) -> None:
        """Lets go of all gradients without a step."""
        self.wait_for_reductions()
        self.free_grad_slots()
        for unit in self.model_states.units:
            self.free_grads(unit)
        if self.host is not None:
            self.host.drop_grads()

    # ------------------------------------------------------------------ progress

    def _set_phase(self, *, backward: bool) -> None:
        self._in_backward = backward
        self.model_states.arena.phase = Phase.BACKWARD if backward else Phase.FORWARD

    def _record_collective(self, collective: int) -> None:
        self.collectives_hash = (self.collectives_hash * 31 + collective + 1) % _HASH_MODULUS

    def _record_progress(self, doing: str, unit: UnitState) -> None:
        self.where = f"{doing} of {unit.name}"
        self.progress_count += 1


def _has_pending_update(unit: UnitState) -> bool:
    return unit.offloaded is not None and unit.offloaded.update_pending


def _can_use_slot(unit: UnitState) -> bool:
    """Whether `unit` may be brought into its slot now."""
    return not unit.param_slot.in_use or unit.param_slot.holder is unit
