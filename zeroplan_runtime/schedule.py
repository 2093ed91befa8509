"""When each unit is unsharded and resharded, when its gradients are reduced, and which stream waits for which.

Note [Order of collectives]
    All ranks must issue the same collectives in the same order. So all-gathers and reductions are issued from the forward and
    backward of *modules*, which all ranks run alike, and never from the arrival of single gradients, which may differ
    between ranks (an expert that one rank did not use). A unit's gradients are reduced when the backward reaches the next
    unit; those of the root, and of units whose backward was not seen, when the whole backward has ended.
    Where a rank's data decides which units run, the order can still differ, and collectives of equal size would mix two
    units' bytes without an error. So each rank hashes its order, and the step compares the hashes
    (:attr:`Schedule.collectives_hash`).

Note [Backward of a unit]
    The backward of a unit begins when a gradient of its output arrives, or when gradient checkpointing runs its forward
    again, whichever comes first. It is over when another unit's backward begins: autograd runs the latest operation first, so
    all of the later unit's work has been issued by then. A weight that is read even later would be another unit's; units that
    interleave like this need separate slots, and :meth:`Schedule.unshard` refuses them if they share one.

Note [Lifetime of gradients]
    The memory of gradients is allocated while the compute stream is current, before the reduce stream uses it, and is freed
    once the compute stream waits for the reduce stream. So the allocator sees one stream only, and reuses the memory in that
    stream's order without a host synchronisation. See Note [Lifetimes] in core/layout.

Note [Host waits]
    To unshard a unit whose update on the host is not done, or whose parameters are still to be read from a file, the host
    must wait. In the forward such a unit is therefore unsharded after the whole previous unit has been launched, so that the
    device has work meanwhile. No hook tells when a unit's backward has been launched, so in the backward the unit is
    unsharded before the previous unit: the device still has the work that was launched earlier. Which of the two happens
    depends only on where a unit's parameters rest, which is the same on all ranks, never on whether they have arrived.
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

#: Values of `UnitState.grad_received` for each parameter: 0 no gradient yet, 1 from an earlier micro batch, 2 from this one.
RECEIVED_EARLIER, RECEIVED_NOW = 1, 2
#: The largest prime below 2²⁴, so that fp32 holds every hash exactly.
_HASH_MODULUS = 16777213


class Schedule:
    """Unshards, reshards and reduces units from hooks on their modules, as FSDP2's state and parameter group do.

    Attributes:
        host: receives the gradients of offloaded units.
        measure: called with a unit and its reduced gradients, on the stream that has them, to take their sum of squares.
        boundary: the optimizer steps after this micro batch.
        in_engine_backward: ``engine.backward()`` is running, so gradients belong to this step.
        collectives_hash: the hash of the order of collectives since the last step, below 2²⁴.
        where: what is being done, in words, for the watchdog.
        progress_count: rises with every unit, for the watchdog.
    """

    def __init__(self, model_states: ModelStates) -> None:
        self.model_states, self.setup, self.comm = model_states, model_states.setup, model_states.comm
        device = model_states.arena.device
        self.compute_stream = Stream.current(device)
        self.all_gather_stream = Stream(device)
        self.reduce_stream = Stream(device)
        self._produced = Event(device)
        self._reducing = False  # the reduce stream has work that the compute stream does not wait for yet
        self._frees_grad_slots = False  # slots that an earlier backward kept go after the next forward's first block
        self.host: HostOptimizer | None = None
        self.measure: Callable[[UnitState, torch.Tensor], None] | None = None
        self.boundary = True
        self.where = "start"
        self.progress_count = 0
        self.in_engine_backward = False
        self.collectives_hash = 0
        self._in_backward = False
        self._grad_enabled = False  # in this forward, so a backward is expected
        self._current: UnitState | None = None
        units = model_states.units
        self._execution_order = ExecutionOrder(units)
        self._last: UnitState | None = None
        for unit in units:
            unit.updated.record(self.compute_stream)  # ModelStates filled the shards on this stream
        self._handles: list[Any] = []
        self._hooked = self.comm.world_size > 1 or any(u.layout.offloaded for u in units) or self.setup.shards_params
        if self._hooked:
            for unit in units:
                self._hook(unit)

    def _hook(self, unit: UnitState) -> None:
        # Ours is the first pre-forward and the last post-forward hook, so the user's hooks see unsharded parameters.
        enter = unit.module.register_forward_pre_hook(partial(self._pre_forward, unit), prepend=True)
        leave = unit.module.register_forward_hook(partial(self._post_forward, unit), with_kwargs=True)
        self._handles += [enter, leave]

    def remove(self) -> None:
        """Removes the hooks from the model."""
        for handle in self._handles:
            handle.remove()

    __reduce_ex__ = refuse_copy

    # ------------------------------------------------------------------ forward

    def root_pre_forward(self) -> None:
        """Prepares a forward of the whole model; also clears what an interrupted forward left."""
        self._set_phase(backward=False)
        self._grad_enabled = torch.is_grad_enabled()
        self._current = self._last = None
        for slot in self.model_states.param_slots.values():
            slot.in_use = False
        self._frees_grad_slots = any(slot.buffer.is_allocated for slot in self.model_states.grad_slots.values())
        self.in_engine_backward = False

    def _pre_forward(self, unit: UnitState, _module: torch.nn.Module, _args: Any) -> None:
        if self._in_backward:  # gradient checkpointing recomputes the unit
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
        if not unit.is_root:  # the root's forward ends after all others
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

    # ------------------------------------------------------------------ unshard

    def unshard(self, unit: UnitState) -> None:
        """Issues the all-gather of `unit`'s parameters into its slot, unless the slot holds them and they are current.

        The compute stream must wait for ``unit.param_slot.ready`` before it reads them.

        Raises:
            BadInput: when another unit still computes in the same slot.
        """
        slot = unit.param_slot
        if slot.holder is unit and slot.is_current:
            return
        if slot.in_use and slot.holder is not unit:
            holder = slot.holder.name if slot.holder else "?"
            raise BadInput(
                f"unit {unit.name!r} is needed while unit {holder!r} still computes in the slot {slot.name!r} that both use",
                where="stage 3",
                remedy='raise "ring" in the config\'s "zeroplan" section, or give a policy that makes them one unit',
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
        """Fills ``flat.full`` from the ranks' shards. The all-gather stream must be current."""
        shard = flat.shard
        if unit.layout.param_place is Place.PINNED:
            shard = self.model_states.local_shard(flat.full, flat.layout)
            shard.copy_(flat.shard, non_blocking=True)
        if self.comm.world_size > 1:
            self.comm.all_gather(flat.full, shard)

    def _prefetch_unshard(self, unit: UnitState | None) -> None:
        """Unshards `unit` ahead of its use, unless the host would wait for it: see Note [Host waits]."""
        if (
            unit is not None
            and _can_use_slot(unit)
            and not _has_pending_update(unit)
            and (self._in_backward or not unit.in_files)
        ):
            self.unshard(unit)

    def _unshard_deferred(self, unit: UnitState | None) -> None:
        """Unshards a unit that the host must wait for; called when the previous unit has been launched."""
        if unit is not None and _can_use_slot(unit) and (_has_pending_update(unit) or unit.in_files):
            self.unshard(unit)

    def _read_ahead(self) -> None:
        """Queues the reads of the parameters in files that the next forward needs first."""
        if self.model_states.layout.param_buffer:
            self.model_states.param_swapper.prefetch(self._upcoming_reads(self.model_states.units[0]))

    def _upcoming_reads(self, unit: UnitState) -> Iterator[FetchRequest]:
        slots = self.model_states.param_slots.values()
        return self._execution_order.reads(unit, slots, backward=self._in_backward, grad_enabled=self._grad_enabled)

    def mark_updated(self, unit: UnitState) -> None:
        """Notes that `unit`'s update has been issued: its unsharded parameters are stale from here on.

        Its next all-gather waits for this update only and may run beside the updates of later units.
        """
        unit.updated.record(self.compute_stream)
        if self.setup.shards_states and unit.trainable is not None and unit.param_slot.holder is unit:
            unit.param_slot.is_current = False

    def prefetch_forward(self) -> None:
        """Unshards the units that the next forward needs first, one for each free slot."""
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
        """Makes the compute stream wait for every all-gather that has been issued."""
        for unit in self.model_states.units:
            if _has_pending_update(unit) and not self.setup.shards_params:
                self.unshard(unit)
            unit.param_slot.ready.wait(self.compute_stream)

    # ------------------------------------------------------------------ backward

    def root_pre_backward(self) -> None:
        """Prepares a micro batch's backward; also clears what an interrupted backward left."""
        self.in_engine_backward = True
        for unit in self.model_states.units:
            unit.reduced = False

    def _output_grad_hook(self, unit: UnitState, _grad: torch.Tensor) -> None:
        if self.in_engine_backward:
            self.pre_backward(unit)
        else:  # torch.autograd.grad() reads the parameters but must leave no gradients in ours
            self.unshard(unit)
            unit.param_slot.ready.wait(self.compute_stream)

    def pre_backward(self, unit: UnitState, *, recompute: bool = False) -> None:
        """Starts the backward of `unit` and ends that of the unit before it: see Note [Backward of a unit].

        Args:
            unit: the unit that the backward has reached.
            recompute: gradient checkpointing runs the unit's forward again, so its parameters are needed in any case.
        """
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
        # Gradients that live until the step are best reduced once, so a unit that is called several times waits for the end.
        once = unit.forward_count == 1 and not unit.reduces_late
        if RECEIVED_NOW in unit.grad_received and (once or unit.grad_slot is not None):
            self.reduce_grads(unit, last=once)

    def root_post_backward(self) -> None:
        """Ends a micro batch's backward: reduces the gradients that have not been reduced."""
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
        self._in_backward = self.in_engine_backward = False
        self._current = self._last = None
        if not self.boundary:
            self._read_ahead()
        if self.boundary and not self.setup.delayed_update:
            self.free_grad_slots()

    # ------------------------------------------------------------------ gradients

    def acquire_full_grad(self, unit: UnitState) -> None:
        """Makes ``unit.grad_full`` ready to be written by the compute stream.

        It is allocated, its slot is taken from the unit that holds it, or an average that it holds is undone.
        """
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
        """Turns averaged gradients back into one rank's contribution, so that the next average is the same mean plus what
        the ranks add.

        Gradients come after the average where parameters are used outside their unit's forward (a penalty on weights), and
        in the second of two backwards before a step.
        """
        assert unit.grad is not None
        assert unit.grad_full is not None
        self.wait_for_reductions()
        if self.setup.shards_states:  # only this rank's shard is averaged
            mean = unit.grad * self.comm.world_size
            unit.grad_full.zero_()
            unit.grad.copy_(mean)
        unit.grad_received = bytearray([RECEIVED_NOW]) * len(unit.grad_received)  # also what other ranks received
        unit.reduces_late |= unit.reduced
        unit.averaged = unit.reduced = False

    def accumulate_grad(self, unit: UnitState, position: int, grad: torch.Tensor) -> None:
        """Adds one parameter's complete gradient to ``unit.grad_full``, or copies it there if it is the first.

        Args:
            unit: the parameter's unit.
            position: the parameter's index in the unit's trainable flat.
            grad: the gradient, in the parameter's shape; sparse gradients are made dense.
        """
        self.acquire_full_grad(unit)
        if grad.is_sparse:
            grad = grad.to_dense()
        if unit.grad_received[position]:
            unit.grad_views[position].add_(grad)
        else:
            unit.grad_views[position].copy_(grad)
        unit.grad_received[position] = RECEIVED_NOW

    def reduce_grads(self, unit: UnitState, *, last: bool = False) -> None:
        """Averages `unit`'s gradients over the ranks, on the reduce stream. A parameter without a gradient counts as zero.

        At stages 0 and 1 this happens in the last micro batch only, from stage 2 on in each.

        Args:
            unit: the unit.
            last: no more gradients of the unit are expected in this micro batch.
        """
        if unit.grad_slot is None and not self.boundary:
            unit.reduced = True
            return
        if unit.averaged or (unit.grad_slot is not None and unit.grad_slot.holder is not unit):
            self.acquire_full_grad(unit)  # no gradient arrived, but the collective needs zeros
        if unit.grad_buffer is not None and not unit.grad_buffer.is_allocated:
            self.model_states.alloc_grad(unit)
        missing = [view for view, grad_received in zip(unit.grad_views, unit.grad_received, strict=True) if not grad_received]
        missing += unit.grad_gaps  # the padding is uninitialised
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
        """Reduces in place and copies this rank's part to the host; returns the stream that reads ``grad_full`` last."""
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
            # Part by part of every rank's shard, cast in the staging buffer: see Note [Layout] in core/layout.
            count, staging, piece = self.comm.world_size, self.model_states.staging.tensor, self.model_states.layout.piece
            shards = unit.grad_full.view(count, -1)
            for begin in range(0, shards.shape[1], piece):
                part = shards[:, begin : begin + piece]
                whole = staging[: part.numel()]
                whole.view(count, -1).copy_(part)
                self._reduce_scatter(unit, whole, unit.grad[begin : begin + piece])
        unit.accumulated = True

    def _reduce_scatter(self, unit: UnitState, whole: torch.Tensor, share: torch.Tensor) -> None:
        """Reduce-scatters `whole` and adds this rank's part of the mean to `share`, or copies it there if it is the first.

        Args:
            unit: the unit; tells whether earlier micro batches are in `share`.
            whole: [ranks × n] elements; overwritten where the dtypes differ or `share` holds a sum.
            share: [n] elements of this rank's gradients.
        """
        if not unit.accumulated and share.dtype == whole.dtype:
            self.comm.reduce_scatter(share, whole)
            return
        first = self.comm.rank * share.numel()
        arrived = whole[first : first + share.numel()]  # in place: the collective sends this part before it writes it
        self.comm.reduce_scatter(arrived, whole)
        if unit.accumulated:
            share.add_(arrived)
        else:
            share.copy_(arrived)

    def wait_for_reductions(self) -> None:
        """Makes the compute stream wait for all reductions, before the optimizer reads the gradients."""
        if self._reducing:
            self._produced.record(self.reduce_stream)
            self._produced.wait(self.compute_stream)
            self._reducing = False

    def free_grad_slots(self) -> None:
        """Frees the slots of unsharded gradients, after making the compute stream wait for the reductions that read them."""
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
            if slot.holder is not None:  # an interrupted backward left it
                slot.holder.grad_received = bytearray(len(slot.holder.grad_received))
                slot.holder = None
            slot.buffer.free()

    def free_grads(self, unit: UnitState) -> None:
        """Frees `unit`'s gradients, once its update has been issued or they are dropped; the next ones start a new sum."""
        unit.accumulated = unit.averaged = False
        unit.grad_received = bytearray(len(unit.grad_received))
        if unit.grad_buffer is not None and unit.grad_buffer.is_allocated:
            unit.grad_buffer.free()

    def drop_grads(self) -> None:
        """Frees all gradients without a step."""
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
    """Whether no other unit computes in `unit`'s slot."""
    return not unit.param_slot.in_use or unit.param_slot.holder is unit
