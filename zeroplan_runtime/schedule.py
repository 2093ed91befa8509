"""The order of a step: when each unit is unsharded and resharded, when its gradients are reduced, and which stream waits for
which.

Note [Backward of a unit]
    The backward of a unit begins when a gradient of its output arrives, or when gradient checkpointing runs its forward
    again, whichever comes first. It is over when another unit's backward begins: autograd runs the latest operation first, so
    all of the later unit's work has been issued by then. A weight that is read even later would be another unit's; units that
    interleave like this need separate slots, and :meth:`Schedule.unshard` refuses them if they share one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from zeroplan.core.arena.layout import UnitKind
from zeroplan.core.buffers import Phase, Place
from zeroplan.core.errors import BadInput
from zeroplan_runtime.checks import refuse_copy
from zeroplan_runtime.compiled import keep_out_of_graphs, may_compile
from zeroplan_runtime.execution_order import ExecutionOrder
from zeroplan_runtime.function_transforms import require_seen_backward
from zeroplan_runtime.gradient_reduction import GradientReduction
from zeroplan_runtime.model_states import ModelStates
from zeroplan_runtime.offload.param_swapper import FetchRequest
from zeroplan_runtime.parameter_guard import ParameterGuard, not_gathered
from zeroplan_runtime.pytree import tensors_of
from zeroplan_runtime.streams import Stream, wait_when_dropped
from zeroplan_runtime.unit_state import FlatParam, UnitState

if TYPE_CHECKING:
    from zeroplan_runtime.parameter_aliases import ParameterAliases
    from zeroplan_runtime.parameter_writes import ParameterWrites


class Schedule:
    """Unshards, reshards and reduces units from hooks on their modules, as FSDP2's state and parameter group do.

    Attributes:
        grads: the gradients and their reduction.
        guard: the guard of the parameters.
        in_engine_backward: ``engine.backward()`` is running, so gradients belong to this step.
        where: what is being done, in words, for the watchdog.
        progress_count: rises with every unit, for the watchdog.
        reading: gives a context for a read of a parameter, which may have to wait for other ranks.
        keeps_guard: parameters stay guarded in the forward, so that aliases taken there are, too.
        has_aliases: the forward keeps aliases of parameters, so a step waits until these are current.
        halves: backwards run in two halves (:mod:`zeroplan_runtime.pipeline_halves`), so autograd returns all gradients.
        resting: the user has gathered all parameters, whose forwards need none of the hooks.
        hooked: hooks are on the units, as parameters are not always current; else they are but for hand-written ones.
        aliases: finds aliases that a unit's forward leaves behind; None where no memory is shared.
        writes: keeps what forwards write into parameters at stage 3; None where nothing is sharded.
    """

    def __init__(self, model_states: ModelStates) -> None:
        self.model_states, self.setup, self.comm = model_states, model_states.setup, model_states.comm
        device = model_states.arena.device
        self.compute_stream = Stream.current(device)
        self.all_gather_stream = Stream(device)
        self.grads = GradientReduction(model_states, self.compute_stream)
        self._wait_for_all = wait_when_dropped(self, device, (self.all_gather_stream, self.grads.reduce_stream))
        self.where, self.progress_count = "start", 0
        self.writes: ParameterWrites | None = None
        self.reading: Callable[[str], AbstractContextManager[object]] = nullcontext
        self.in_engine_backward = self._in_backward = self._grad_enabled = self.halves = self.resting = False
        self._current: UnitState | None = None
        self._execution_order = ExecutionOrder(model_states.leaders)
        self._chunks: dict[int, tuple[ExecutionOrder, set[UnitState]]] = {}  # of a pipeline: see choose_chunk
        self._last: UnitState | None = None
        for unit in model_states.units:
            unit.updated.record(self.compute_stream)  # ModelStates filled the shards on this stream
        self.handles: list[Any] = []
        self.guard = ParameterGuard(model_states.units, self)
        self.keeps_guard = self.has_aliases = self._out_of_graphs = False
        self.aliases: ParameterAliases | None = None
        self._in_forward: set[UnitState] = set()
        self._reads_on: int | None = None  # the stream that waits for all unshards since the last step
        renews = self.setup.shards_params or model_states.quantiser is not None
        self.hooked = self.comm.world_size > 1 or any(u.layout.offloaded for u in model_states.units) or renews
        for unit in model_states.leaders if self.hooked else ():
            self._hook(unit)

    def _hook(self, unit: UnitState) -> None:
        # Ours is the first pre-forward and the last post-forward hook, so the user's hooks see unsharded parameters.
        enter = unit.module.register_forward_pre_hook(partial(self._pre_forward, unit), prepend=True)
        leave = unit.module.register_forward_hook(partial(self._post_forward, unit), with_kwargs=True)
        self.handles += [enter, leave]

    def remove(self) -> None:
        """Removes the hooks from the model; what was issued has ended for the compute stream then, so memory can be freed."""
        for handle in self.handles:
            handle.remove()
        self._wait_for_all()

    __reduce_ex__ = refuse_copy

    # ------------------------------------------------------------------ forward

    def root_pre_forward(self) -> None:
        """Prepares a forward of the whole model; also clears what an interrupted forward left."""
        if not self._out_of_graphs and may_compile():
            keep_out_of_graphs(self.handles)
            self._out_of_graphs = True
        self._set_phase(backward=False)
        self._grad_enabled = torch.is_grad_enabled()
        self._current = self._last = None
        self._in_forward.clear()
        for slot in self.model_states.param_slots.values():
            slot.in_use = False
        if not self.hooked:
            self.guard.open_all()
        self.grads.slots_are_due = any(slot.buffer.is_allocated for slot in self.model_states.grad_slots.values())
        self.in_engine_backward = False

    def choose_chunk(self, number: int) -> None:
        """Notes of which chunk of a pipeline the next forward or backward is: see Note [Chunks] in pipeline."""
        if number not in self._chunks:
            roots = {unit for unit in self.model_states.units if unit.is_root}
            self._chunks[number] = ExecutionOrder(self.model_states.leaders, learns=True), roots
        self._execution_order, self.grads.chunk = self._chunks[number]

    def leave_out(self, units: frozenset[UnitState]) -> None:
        """Notes that the next forward and backward do not run these units, though their modules are called."""
        self._execution_order.left_out = units

    def _pre_forward(self, unit: UnitState, _module: torch.nn.Module, _args: Any) -> None:
        if self.resting:
            if torch.is_grad_enabled():
                what = "a forward with gradients is called while the user has gathered all parameters"
                raise BadInput(what, where="stage 3", remedy="call it under torch.no_grad(), or after they are let go")
            return
        if unit in self._execution_order.left_out:
            if not self._in_backward:
                self._follow(unit)
            return
        self._in_forward.update(unit.parts)
        if self._in_backward:  # gradient checkpointing recomputes the unit
            self.pre_backward(unit, recompute=True)
            return
        self._record_progress("forward", unit)
        if self.grads.chunk is not None:
            self.grads.chunk.update(unit.parts)
        for part in unit.parts:
            if part.offloaded is not None and part.offloaded.update_requested:
                self.require_no_early_updates("engine")
            self._enter(part)
            if self.aliases is not None:
                self.aliases.begin_forward(part)
            part.forward_count += 1
        self._follow(unit)
        self._prefetch_unshard(self._execution_order.after_in_forward(unit))

    def _enter(self, unit: UnitState) -> None:
        """Makes the parameters of `unit` ready for its forward or its backward, in a slot of its own."""
        self.unshard(unit)
        unit.param_slot.ready.wait(self.compute_stream)
        if not self.keeps_guard:
            self.guard.open(unit)
        unit.param_slot.in_use = not unit.is_root

    def _follow(self, unit: UnitState) -> None:
        """Notes the unit that the forward has reached."""
        if self._last is not None and self._last is not unit:
            self._execution_order.next_in_forward[self._last] = unit
        self._last = unit

    def _post_forward(self, unit: UnitState, _module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self.resting or unit in self._execution_order.left_out:
            return
        self._in_forward.difference_update(unit.parts)
        if torch.is_grad_enabled():
            self._watch_outputs(unit, (args, kwargs), output)
        if self._in_backward:
            return
        for part in unit.parts:
            if self.setup.shards_params:
                if self.writes is not None:
                    self.writes.keep_unit(part)
                if not unit.is_root:
                    self.guard.guard_outputs(part, output)
                if self.aliases is not None:
                    self.aliases.end_forward(part, guarded=self.keeps_guard)
            self._reshard(part)
        if not unit.is_root:  # the root's forward ends after all others
            self._unshard_deferred(self._execution_order.after_in_forward(unit))
        if self.grads.slots_are_due and unit.layout.shape.kind is not UnitKind.WIDE:
            self.grads.free_slots()

    def _watch_outputs(self, unit: UnitState, inputs: Any, output: Any) -> None:
        """Lets the first gradient of an output begin the backward of `unit`.

        This is also done where gradient checkpointing runs the forward again, as the first time may have made no graph, and
        several units may be in one checkpoint.
        """
        if self.setup.shards_params and not unit.is_root:
            require_seen_backward(unit.name, output)
        passed_through = {id(tensor) for tensor in tensors_of(inputs)}
        for tensor in tensors_of(output):
            if tensor.requires_grad and id(tensor) not in passed_through:
                tensor.register_hook(partial(self._output_grad_hook, unit))

    def _reshard(self, unit: UnitState) -> None:
        slot = unit.param_slot
        if slot.holder is unit and not unit.is_root:
            slot.in_use = False
            slot.last_use.record(self.compute_stream)
            if self.setup.shards_params:
                self.guard.close(unit)

    def unshard(self, unit: UnitState, *, exact: bool = False) -> None:
        """Issues the all-gather of `unit`'s parameters into its slot, unless the slot holds them and they are current.

        The compute stream must wait for ``unit.param_slot.ready`` before it reads them. Where blocks are gathered in 8 bits,
        `exact` gathers this one in 16, unless it is computing.

        Raises:
            BadInput: when another unit still computes in the same slot.
        """
        slot, narrow = unit.param_slot, self.model_states.float8_gathers
        rounds = narrow is not None and not exact and narrow.takes(unit)
        if slot.holder is unit and slot.is_current and (slot.is_rounded is rounds or slot.in_use):
            return
        if slot.in_use and slot.holder is not unit:
            holder = slot.holder.name if slot.holder else "?"
            raise BadInput(
                f"unit {unit.name!r} is needed while unit {holder!r} still computes in the slot {slot.name!r} that both use",
                where="stage 3",
                remedy='raise "ring" in the config\'s "zeroplan" section, or give a policy that makes them one unit',
            )
        if slot.holder is not None and slot.holder is not unit:
            self.guard.close(slot.holder)
        if unit.offloaded is not None:
            unit.offloaded.wait_for_update()
        slot.last_use.wait(self.all_gather_stream)
        unit.updated.wait(self.all_gather_stream)
        if unit.in_files:
            shards = {buffer: flat.shard for buffer, flat in unit.flats_by_buffer()}
            self.model_states.param_swapper.fetch(self._upcoming_reads(unit), shards, self.all_gather_stream)
        quantiser = self.model_states.quantiser
        with self.all_gather_stream.as_current():
            if quantiser is not None and unit.param_16bit is not None and unit.master is not None:
                unit.param_16bit.copy_(unit.master)  # below stage 3 it holds what was rounded before, if a step was skipped
            if unit.trainable is not None:
                if self.setup.casts_masters and unit.master is not None:
                    unit.trainable.shard.copy_(unit.master)
                if rounds and narrow is not None:
                    narrow.gather(unit)
                else:
                    self._all_gather(unit, unit.trainable)
            if unit.frozen is not None and slot.holder is not unit:
                self._all_gather(unit, unit.frozen)
            if quantiser is not None:
                quantiser.round(unit)
        slot.ready.record(self.all_gather_stream)
        slot.holder, slot.is_current, slot.is_rounded = unit, True, rounds
        self.comm.record_collective(2 * unit.index)

    def _all_gather(self, unit: UnitState, flat: FlatParam) -> None:
        """Fills ``flat.full`` from the ranks' shards. The all-gather stream must be current."""
        shard = flat.shard
        if unit.layout.param_place is Place.PINNED:
            shard = flat.part
            shard.copy_(flat.shard, non_blocking=True)
        if self.setup.shards_states:
            self.model_states.comm_of(flat.layout).all_gather(flat.full, shard)

    def _prefetch_unshard(self, unit: UnitState | None) -> None:
        """Unshards `unit` ahead of its use, unless the host would wait for it: see Note [Host waits] in execution_order."""
        for part in unit.parts if unit is not None else ():
            if part.can_use_slot and not part.has_pending_update and (self._in_backward or not part.in_files):
                self.unshard(part)

    def _unshard_deferred(self, unit: UnitState | None) -> None:
        """Unshards a unit that the host must wait for; called when the previous unit has been launched."""
        for part in unit.parts if unit is not None else ():
            if part.can_use_slot and (part.has_pending_update or part.in_files):
                self.unshard(part)

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
        renewed = self.setup.shards_states or self.model_states.quantiser is not None
        if renewed and unit.trainable is not None and unit.param_slot.holder is unit:
            unit.param_slot.is_current = False

    def prefetch_forward(self) -> None:
        """Unshards the units that the next forward needs first, one for each free slot."""
        self.parameters_were_sent()
        if not self.hooked:
            return
        if not self.setup.shards_params:
            for unit in self.model_states.leaders:
                self._prefetch_unshard(unit)
            if self.has_aliases:
                self.wait_for_unshard()
            return
        self._read_ahead()
        taken: set[str] = set()
        upcoming: UnitState | None = self.model_states.units[0]
        while upcoming is not None and upcoming.param_slot.name not in taken and not upcoming.has_pending_update:
            self.unshard(upcoming)
            self._prefetch_unshard(upcoming)  # the experts beside it
            taken.add(upcoming.param_slot.name)
            upcoming = self._execution_order.after_in_forward(upcoming)

    @contextmanager
    def unsharded(self, unit: UnitState) -> Iterator[None]:
        """A context in which `unit` is unsharded and its slot is its own.

        Raises:
            BadInput: as :meth:`require_no_early_updates`.
        """
        self.require_no_early_updates("engine")
        self.unshard(unit, exact=True)
        unit.param_slot.ready.wait(self.compute_stream)
        in_use, unit.param_slot.in_use = unit.param_slot.in_use, True
        try:
            yield
        finally:
            unit.param_slot.in_use = in_use
            unit.param_slot.last_use.record(self.compute_stream)

    def parameters_were_sent(self) -> None:
        """Notes that shards have other values since the last step, as when delayed updates are sent early: reads gather, also
        those of units that a call of the bare module has left open.
        """
        self._reads_on = None
        self.guard.close_all()

    def wait_for_unshard(self) -> None:
        """Makes the compute stream wait for every all-gather that was issued; below stage 3 those that are due are issued."""
        stream = self.compute_stream.key()
        if self._reads_on == stream:
            return
        for unit in self._execution_order.of_forward():  # as ranks would that do not read
            for part in unit.parts:
                if not self.setup.shards_params:
                    self.unshard(part)
                part.param_slot.ready.wait(self.compute_stream)
        self._reads_on = stream

    def require_no_early_updates(self, where: str) -> None:
        """Checks that no update on the host has begun for the step that is still to come, as its results show already.

        Raises:
            BadInput: with `where`, and the remedy.
        """
        host = self.grads.host
        if host is None or host.early_request is None or not self.hides_grads:
            return
        if any(unit.update_requested for unit in host.units):
            raise BadInput(
                "parameters and states are used between engine.backward() and the step, and their updates have begun",
                where=where,
                remedy="use them after engine.step(), or set gradient_clipping, with which updates wait for the step",
            )

    def before_read(self, unit: UnitState, name: str) -> None:
        """Called before somebody else than `unit`'s own forward reads its parameter `name`.

        Raises:
            BadInput: where it holds no value, or not the present one.
        """
        if unit in self._in_forward and unit.param_slot.holder is unit:
            return  # the forward of its own in a micro batch in which parameters stay guarded
        if self.setup.shards_params and not unit.is_root:
            if unit.param_slot.holder is unit and unit.param_slot.in_use:
                return
            raise not_gathered(name, unit, in_backward=self.in_engine_backward)
        if self.grads.has_grads and unit.offloaded is not None and unit.offloaded.update_requested:
            raise BadInput(
                f"parameter {name!r} is used after its update has begun, before the step",
                where="offload_optimizer",
                remedy="use it after engine.step(), or set gradient_clipping, with which updates wait for the step",
            )
        with self.reading(f"reading parameter {name!r}"):
            if self.setup.shards_params:
                self.unshard(unit)
                unit.param_slot.ready.wait(self.compute_stream)
            else:
                self.wait_for_unshard()

    def before_export(self, unit: UnitState, name: str) -> None:
        """Called before the memory of `unit`'s parameter `name` is handed out, where writes are not seen."""
        if self.writes is not None:
            self.writes.exported(unit, name)

    @property
    def hides_grads(self) -> bool:
        """Whether there are gradients of this step, which are in no parameter's ``grad``."""
        return self.grads.has_grads and not self.in_engine_backward

    def keeps_values(self, unit: UnitState) -> bool:
        """Returns whether a graph that is built outside `unit`'s forward finds its parameters as they are now in its
        backward. One that is built within the unit's backward, by a checkpoint inside its forward, does.
        """
        in_backward = self.in_engine_backward and unit.param_slot.holder is unit and unit.param_slot.in_use
        return in_backward or self._keeps_values(unit)

    def _keeps_values(self, unit: UnitState) -> bool:
        return unit.is_root or not self.setup.shards_params or unit in self._in_forward

    # ------------------------------------------------------------------ backward

    def root_pre_backward(self) -> None:
        """Prepares a micro batch's backward; also clears what an interrupted backward left."""
        self.in_engine_backward = True
        if self.hooked and not self.setup.shards_params and not all(unit.forward_count for unit in self.model_states.units):
            self.wait_for_unshard()  # of units that the forward left out, and a backward function may read
        for unit in self.model_states.units:
            if self._keeps_values(unit) and not self.keeps_guard:  # at stage 3 the others open as the backward reaches them
                self.guard.open(unit)
        self.grads.begin_backward()

    def _output_grad_hook(self, unit: UnitState, _grad: torch.Tensor) -> None:
        if self.in_engine_backward:
            self.pre_backward(unit)
        else:  # torch.autograd.grad() reads the parameters but must leave no gradients in ours
            if torch.is_grad_enabled() and not self._keeps_values(unit):
                raise BadInput(
                    f"gradients of gradients would use the parameters of unit {unit.name!r} when they are gone",
                    where="stage 3",
                    remedy="take create_graph=True back, or use stage 2",
                )
            for part in unit.parts:
                if part.param_slot.holder is not part:  # whose backward may be this one, too, and still read the slot
                    part.param_slot.last_use.record(self.compute_stream)
                self.unshard(part)
                part.param_slot.ready.wait(self.compute_stream)
                if part.guarded:
                    self.guard.open(part)
                    at_its_end = torch.autograd.Variable._execution_engine.queue_callback
                    at_its_end(partial(self.guard.close, part))
                    at_its_end(partial(part.param_slot.last_use.record, self.compute_stream))

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
        if before is not None and not unit.is_root and not self._execution_order.left_out:
            self._execution_order.next_in_backward[before] = unit
        if before is not None:
            self._post_backward(before)
        if unit.gathers_in_backward or recompute:
            for part in unit.parts:
                self._enter(part)
        following = self._execution_order.after_in_backward(unit)
        if following is not None and following.gathers_in_backward:
            self._prefetch_unshard(following)

    def _post_backward(self, unit: UnitState) -> None:
        for part in unit.parts:
            self._reshard(part)
            self.grads.post_backward(part)

    def root_post_backward(self) -> None:
        """Ends a micro batch's backward: reduces the gradients that have not been reduced."""
        if self._current is not None:
            self._post_backward(self._current)
        self.grads.end_backward()
        self._in_backward = self.in_engine_backward = False
        self._in_forward.clear()  # a checkpoint's second forward ends early, without its last hooks
        self._current = self._last = None
        self.guard.close_all()
        if not self.grads.boundary:
            self._read_ahead()
        elif not self.setup.delayed_update:
            self.grads.free_slots()

    def _set_phase(self, *, backward: bool) -> None:
        self._in_backward = backward
        self.model_states.arena.phase = Phase.BACKWARD if backward else Phase.FORWARD

    def _record_progress(self, doing: str, unit: UnitState) -> None:
        self.where, self.progress_count = f"{doing} of {unit.name}", self.progress_count + 1
