"""The Schedule: when units are gathered, when their gradients are reduced, and which lane waits for which.

Note [Order of collectives]
    All ranks must issue the same collectives in the same order. So gathers and reductions are issued from the forward and
    backward of *modules*, which all ranks run alike, and never from the arrival of single gradients, which may differ
    (an expert that one rank did not use). A unit's gradients are reduced when the backward reaches the next unit; those of
    the root, and of units whose backward was not seen, when the backward has ended.
    Where the ranks' data decide which units run, the order differs all the same, and equal sizes are mixed without any error.
    So each rank makes a number of its order, and the step compares them (:attr:`Schedule.order`).

Note [Backward of a unit]
    The backward of a unit begins when a gradient of its output arrives, or when gradient checkpointing runs its forward
    again, whichever is first. It is over when another unit's begins: autograd runs the youngest operation first, so all of
    the later unit's work has been issued by then. Weights that are read later still would be those of
    another unit; units that interleave like this need separate slots, and :meth:`Schedule.gather` refuses the others.

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
from typing import TYPE_CHECKING, Any

import torch

from zeroplan.core.buffers import Phase, Place
from zeroplan.core.layout import UnitKind
from zeroplan_runtime.checks import refuse_copy
from zeroplan_runtime.comm import Lane, Mark
from zeroplan_runtime.execution_order import Route
from zeroplan_runtime.model_states import FlatState, Store, UnitState
from zeroplan_runtime.offload.param_swapper import Want
from zeroplan_runtime.pytree import tensors_of

if TYPE_CHECKING:
    from zeroplan_runtime.offload.host_optimizer import HostOptimizer

#: `UnitState.landed`, per parameter: its gradient came in an earlier micro batch, or in this one.
EARLIER, NOW = 1, 2
#: A prime below 2²⁴.
_LARGEST_ORDER = 16777213


class Schedule:
    """Hooks a model's units to the store's slots and the ranks' collectives."""

    def __init__(self, store: Store) -> None:
        self.store, self.setup, self.ranks = store, store.setup, store.ranks
        device = store.arena.device
        self.compute = Lane(device, own=False)
        self.gather_lane = Lane(device, own=True)
        self.reduce_lane = Lane(device, own=True)
        self._produced = Mark(device)
        self._reducing = False  # the reduce lane has work that the model's stream does not wait for yet
        self._slots_due = False  # an earlier backward left its slots, to be given back behind the next forward's first block
        self.host: HostOptimizer | None = None  # takes the gradients of offloaded units
        self.measure: Callable[[UnitState, torch.Tensor], None] | None = None  # takes the sum of squares of theirs
        self.boundary = True  # this micro batch is the last before the step
        self.where = "start"  # for the watchdog
        self.ticks = 0
        self.going_back = False  # within engine.backward(): gradients are this step's
        self.order = 0  # of the collectives since the last step, as a number that fp32 holds exactly
        self._backward = False
        self._learning = False  # a backward follows this forward
        self._current: UnitState | None = None
        units = store.units
        self._route = Route(units)
        self._last: UnitState | None = None
        for unit in units:
            unit.updated.record(self.compute)  # the store has filled the shards in this lane
        self._handles: list[Any] = []
        self._hooked = self.ranks.count > 1 or any(u.layout.offloaded for u in units) or self.setup.shards_params
        if self._hooked:
            for unit in units:
                self._hook(unit)

    def _hook(self, unit: UnitState) -> None:
        # First of all hooks before the forward and last after it, so that what others hook in finds the parameters.
        enter = unit.module.register_forward_pre_hook(partial(self._enter_hook, unit), prepend=True)
        leave = unit.module.register_forward_hook(partial(self._leave_hook, unit), with_kwargs=True)
        self._handles += [enter, leave]

    def remove(self) -> None:
        """Takes the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    __reduce_ex__ = refuse_copy

    # ------------------------------------------------------------------ forward

    def begin_forward(self) -> None:
        """Called before a forward of the whole model; forgets what an interrupted one left."""
        self._set_phase(backward=False)
        self._learning = torch.is_grad_enabled()
        self._current = self._last = None
        for slot in self.store.param_slots.values():
            slot.busy = False
        self._slots_due = any(slot.lease.held for slot in self.store.grad_slots.values())
        self.going_back = False

    def _enter_hook(self, unit: UnitState, _module: torch.nn.Module, _args: Any) -> None:
        if self._backward:  # recomputed under gradient checkpointing
            self.begin_backward(unit, recompute=True)
            return
        self._tick("forward", unit)
        self.gather(unit)
        unit.param_slot.ready.wait(self.compute)
        unit.param_slot.busy = not unit.is_root
        if self._last is not None and self._last is not unit:
            self._route.after[self._last] = unit
        self._last = unit
        unit.visits += 1
        self._prefetch(self._route.after.get(unit))

    def _leave_hook(self, unit: UnitState, _module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._backward:
            return
        self._release(unit)
        if not unit.is_root:  # whose forward ends last
            self._gather_late(self._route.after.get(unit))
        if self._slots_due and unit.layout.shape.kind is not UnitKind.WIDE:
            self.give_slots()
        if torch.is_grad_enabled():
            passed_through = {id(tensor) for tensor in tensors_of((args, kwargs))}
            for tensor in tensors_of(output):
                if tensor.requires_grad and id(tensor) not in passed_through:
                    tensor.register_hook(partial(self._grad_hook, unit))  # type: ignore[no-untyped-call]

    def _release(self, unit: UnitState) -> None:
        slot = unit.param_slot
        if slot.holder is unit and not unit.is_root:
            slot.busy = False
            slot.free.record(self.compute)

    # ------------------------------------------------------------------ gathering

    def gather(self, unit: UnitState) -> None:
        """Starts to bring `unit`'s current parameters into its place, unless they are there.

        Raises:
            RuntimeError: when another unit is still computing in the same slot.
        """
        slot = unit.param_slot
        if slot.holder is unit and slot.fresh:
            return
        if slot.busy and slot.holder is not unit:
            raise RuntimeError(
                f"unit {unit.name!r} is needed while {slot.holder.name if slot.holder else '?'!r} still computes in the slot "
                f'{slot.name!r} that they share; set {{"zeroplan": {{"ring": N}}}} higher, or give a policy that joins them'
            )
        if unit.host is not None:
            unit.host.wait()
        slot.free.wait(self.gather_lane)
        unit.updated.wait(self.gather_lane)
        if unit.in_files:
            shards = {buffer: flat.shard for buffer, flat in unit.flats_by_buffer()}
            self.store.param_files.bring(self._coming(unit), shards, self.gather_lane)
        with self.gather_lane.run():
            if unit.trainable is not None:
                if self.setup.casts_masters and unit.master is not None:
                    unit.trainable.shard.copy_(unit.master)
                self._bring(unit, unit.trainable)
            if unit.frozen is not None and slot.holder is not unit:
                self._bring(unit, unit.frozen)
        slot.ready.record(self.gather_lane)
        slot.holder, slot.fresh = unit, True
        self._count(2 * unit.index)

    def _bring(self, unit: UnitState, flat: FlatState) -> None:
        """Makes `flat` whole, in the gather lane."""
        shard = flat.shard
        if unit.layout.param_place is Place.PINNED:
            shard = self.store.part(flat.full, flat.layout)
            shard.copy_(flat.shard, non_blocking=True)
        if self.ranks.count > 1:
            self.ranks.all_gather(flat.full, shard)

    def _prefetch(self, unit: UnitState | None) -> None:
        """Gathers `unit` early, unless that is to wait: see Note [Waiting for the host]."""
        if unit is not None and _may_hold(unit) and not _is_pending(unit) and (self._backward or not unit.in_files):
            self.gather(unit)

    def _gather_late(self, unit: UnitState | None) -> None:
        """Called when all of the unit before has been launched: the host has nothing better to do than to wait for `unit`."""
        if unit is not None and _may_hold(unit) and (_is_pending(unit) or unit.in_files):
            self.gather(unit)

    def _read_ahead(self) -> None:
        """Reads what the next forward will ask for first."""
        if self.store.layout.param_buffer:
            self.store.param_files.expect(self._coming(self.store.units[0]))

    def _coming(self, unit: UnitState) -> Iterator[Want]:
        slots = self.store.param_slots.values()
        return self._route.reads(unit, slots, backward=self._backward, learning=self._learning)

    def updated(self, unit: UnitState) -> None:
        """Called when the optimizer has been given `unit`'s update: gathered copies of it are out of date from here on.

        Its gather may then run beside the updates of the units that follow.
        """
        unit.updated.record(self.compute)
        if self.setup.shards_states and unit.trainable is not None and unit.param_slot.holder is unit:
            unit.param_slot.fresh = False

    def gather_ahead(self) -> None:
        """Starts the gathers that the next forward will ask for first, as far as their slots are free."""
        if not self._hooked:
            return
        if not self.setup.shards_params:
            for unit in self.store.units:
                self._prefetch(unit)
            return
        self._read_ahead()
        taken: set[str] = set()
        upcoming: UnitState | None = self.store.units[0]
        while upcoming is not None and upcoming.param_slot.name not in taken and not _is_pending(upcoming):
            self.gather(upcoming)
            taken.add(upcoming.param_slot.name)
            upcoming = self._route.after.get(upcoming)

    def wait_gathered(self) -> None:
        """Makes the model's stream wait for every gather that was started."""
        for unit in self.store.units:
            if _is_pending(unit) and not self.setup.shards_params:
                self.gather(unit)
            unit.param_slot.ready.wait(self.compute)

    # ------------------------------------------------------------------ backward

    def start_backward(self) -> None:
        """Called before a micro batch's backward; forgets what an interrupted one left."""
        self.going_back = True
        for unit in self.store.units:
            unit.reduced = False

    def _grad_hook(self, unit: UnitState, _grad: torch.Tensor) -> None:
        if self.going_back:
            self.begin_backward(unit)
        else:  # torch.autograd.grad(), which reads the parameters but leaves no gradients of theirs
            self.gather(unit)
            unit.param_slot.ready.wait(self.compute)

    def begin_backward(self, unit: UnitState, *, recompute: bool = False) -> None:
        """The backward has reached `unit`: see Note [Backward of a unit]."""
        if not self._backward:
            self._set_phase(backward=True)
        if unit is self._current or (unit.is_root and not recompute and unit.param_slot.fresh):
            return
        self._tick("backward", unit)
        before, self._current = self._current, None if unit.is_root else unit
        if before is not None and not unit.is_root:
            self._route.before[before] = unit
        if before is not None:
            self._finish(before)
        if unit.gathers_in_backward or recompute:
            self.gather(unit)
            unit.param_slot.ready.wait(self.compute)
            unit.param_slot.busy = not unit.is_root
        following = self._route.before.get(unit)
        if following is not None and following.gathers_in_backward:
            self._prefetch(following)

    def _finish(self, unit: UnitState) -> None:
        self._release(unit)
        # Gradients kept whole are reduced once, so not before the last of several forwards has been gone back through.
        if NOW in unit.landed and (unit.visits == 1 or unit.grad_slot is not None):
            self.reduce(unit, last=unit.visits == 1)

    def end_backward(self) -> None:
        """Called when a micro batch's backward has returned: reduces what is left."""
        if self._current is not None:
            self._finish(self._current)
        for unit in reversed(self.store.units):
            if unit.trainable is not None and not unit.reduced:
                self.reduce(unit, last=True)
        if self.host is not None and self.boundary:
            self.host.backward_done()
        for unit in self.store.units:
            unit.reduced, unit.visits = False, 0
            unit.landed = unit.landed.replace(b"\x02", b"\x01")
        self._backward = self.going_back = False
        self._current = self._last = None
        if not self.boundary:
            self._read_ahead()
        if self.boundary and not self.setup.delayed_update:
            self.give_slots()

    # ------------------------------------------------------------------ gradients

    def acquire(self, unit: UnitState) -> None:
        """Makes the place for `unit`'s whole gradients ready to be written on the model's stream."""
        slot = unit.grad_slot
        if slot is not None:
            if slot.holder is not unit:
                if slot.holder is not None:
                    self.reduce(slot.holder)
                slot.free.wait(self.compute)
                self.store.take_slot(unit)
                slot.holder = unit
        elif unit.grad_lease is not None and not unit.grad_lease.held:
            self.store.take_gradient(unit)
        elif unit.reduced and self.boundary and self.ranks.count > 1:
            raise RuntimeError(
                f"a gradient of unit {unit.name!r} came after the unit was reduced: its parameters are used outside its "
                "forward; use stage 2 or 3, or a policy that leaves the module to the root"
            )

    def land(self, unit: UnitState, position: int, grad: torch.Tensor) -> None:
        """Takes over the complete gradient of one parameter, adding to what this one has received before."""
        self.acquire(unit)
        if grad.is_sparse:
            grad = grad.to_dense()
        if unit.landed[position]:
            unit.grad_views[position].add_(grad)
        else:
            unit.grad_views[position].copy_(grad)
        unit.landed[position] = NOW

    def reduce(self, unit: UnitState, *, last: bool = False) -> None:
        """Averages `unit`'s gradients over the ranks, in the reduce lane; parameters without gradient count as zero.

        Whole gradients (stages 0 and 1) wait for the last micro batch; those in slots are reduced in each. `last`: no more
        gradients of this unit come in this micro batch.
        """
        unit.reduced = True
        if unit.grad_slot is None and not self.boundary:
            return
        if unit.grad_slot is not None and unit.grad_slot.holder is not unit:
            self.acquire(unit)  # none of its gradients came, and its zeros need a place, too
        if unit.grad_lease is not None and not unit.grad_lease.held:
            self.store.take_gradient(unit)
        missing = [view for view, landed in zip(unit.grad_views, unit.landed, strict=True) if not landed]
        missing += unit.grad_gaps  # anything may lie there
        if missing:
            torch._foreach_zero_(missing)
        staging = self.store.staging
        if staging is not None and not staging.held and unit.layout.shape.kind is not UnitKind.BLOCK:
            staging.take()
        done = self.reduce_lane
        self._count(2 * unit.index + 1)
        if self.ranks.count > 1 or unit.host is not None:
            self._produced.record(self.compute)
            self._produced.wait(self.reduce_lane)
            if unit.host is not None:
                done = self._reduce_to_host(unit, last=last)
            else:
                with self.reduce_lane.run():
                    self._reduce_now(unit)
            self._reducing = True
        if unit.grad_slot is not None:
            unit.grad_slot.free.record(done)
            unit.grad_slot.holder = None
            unit.landed = bytearray(len(unit.landed))

    def _reduce_to_host(self, unit: UnitState, *, last: bool) -> Lane:
        """The reduced share leaves from where it lies; returns the lane that reads it last."""
        assert self.host is not None
        assert unit.host is not None
        assert unit.trainable is not None
        assert unit.grad_full is not None
        arrived = unit.grad_full
        if self.ranks.count > 1:
            arrived = self.store.part(unit.grad_full, unit.trainable.layout)
            with self.reduce_lane.run():
                self.ranks.reduce_scatter(arrived, unit.grad_full)
        measure = partial(self.measure, unit) if self.measure is not None else None
        return self.host.take(unit.host, arrived, self.reduce_lane, boundary=self.boundary, last=last, measure=measure)

    def _reduce_now(self, unit: UnitState) -> None:
        assert unit.grad is not None
        assert unit.grad_full is not None
        if not self.setup.shards_states:
            self.ranks.all_reduce_mean(unit.grad_full)
        elif not self.setup.shards_grads:
            self.ranks.reduce_scatter(unit.grad, unit.grad_full)
        elif self.store.staging is None or unit.layout.shape.kind is UnitKind.BLOCK:
            self._scatter(unit, unit.grad_full, unit.grad)
        else:
            # A piece of every rank's shard at a time, cast on its way: see Note [Layout] in core/layout.
            count, staging, piece = self.ranks.count, self.store.staging.tensor, self.store.layout.piece
            shards = unit.grad_full.view(count, -1)
            for begin in range(0, shards.shape[1], piece):
                part = shards[:, begin : begin + piece]
                whole = staging[: part.numel()]
                whole.view(count, -1).copy_(part)
                self._scatter(unit, whole, unit.grad[begin : begin + piece])
        unit.accumulated = True

    def _scatter(self, unit: UnitState, whole: torch.Tensor, share: torch.Tensor) -> None:
        """Adds this rank's part of the mean of `whole` to `share`, which is a part of `unit`'s, or begins it."""
        if not unit.accumulated and share.dtype == whole.dtype:
            self.ranks.reduce_scatter(share, whole)
            return
        first = self.ranks.rank * share.numel()
        arrived = whole[first : first + share.numel()]  # in place: what lay there is sent first
        self.ranks.reduce_scatter(arrived, whole)
        if unit.accumulated:
            share.add_(arrived)
        else:
            share.copy_(arrived)

    def gradients_ready(self) -> None:
        """Makes the model's stream wait for all reductions, before the optimizer reads the gradients."""
        if self._reducing:
            self._produced.record(self.reduce_lane)
            self._produced.wait(self.compute)
            self._reducing = False

    def give_slots(self) -> None:
        """Gives the slots of whole gradients back, once the model's stream waits for the reductions from them."""
        self._slots_due = False
        held = [slot for slot in self.store.grad_slots.values() if slot.lease.held]
        if held:
            self.gradients_ready()
        if self.store.staging is not None and self.store.staging.held:
            self.store.staging.give()
        for sums in self.store.sum_slots.values():
            if sums.lease.held:
                sums.free.wait(self.compute)
                sums.lease.give()
        for slot in held:
            slot.free.wait(self.compute)
            if slot.holder is not None:  # an interrupted backward's
                slot.holder.landed = bytearray(len(slot.holder.landed))
                slot.holder = None
            slot.lease.give()

    def gradient_taken(self, unit: UnitState) -> None:
        """Called when the optimizer has been given `unit`'s update: its gradients go, and the next begin new sums."""
        unit.accumulated = False
        unit.landed = bytearray(len(unit.landed))
        if unit.grad_lease is not None and unit.grad_lease.held:
            unit.grad_lease.give()

    def drop_gradients(self) -> None:
        """Lets go of all gradients without a step."""
        self.gradients_ready()
        self.give_slots()
        for unit in self.store.units:
            self.gradient_taken(unit)
        if self.host is not None:
            self.host.forget()

    # ------------------------------------------------------------------ progress

    def _set_phase(self, *, backward: bool) -> None:
        self._backward = backward
        self.store.arena.phase = Phase.BACKWARD if backward else Phase.FORWARD

    def _count(self, collective: int) -> None:
        self.order = (self.order * 31 + collective + 1) % _LARGEST_ORDER

    def _tick(self, doing: str, unit: UnitState) -> None:
        self.where = f"{doing} of {unit.name}"
        self.ticks += 1


def _is_pending(unit: UnitState) -> bool:
    return unit.host is not None and unit.host.pending


def _may_hold(unit: UnitState) -> bool:
    """Whether `unit` may be brought into its slot now."""
    return not unit.param_slot.busy or unit.param_slot.holder is unit
