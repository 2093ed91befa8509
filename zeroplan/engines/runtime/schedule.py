"""The runtime's allocations over a run: the Arena's blocks, and the tape without the gradients that are written in place.

Gathers and reductions use slots, and the kernels need no temporaries. What the runtime takes and gives back in a step are
gradients: Note [Lifetimes] in core/layout. A plain linear layer's weight gradient is written into its flat by the product
itself; every other gradient is made by autograd, copied into its flat and dropped at once.
Source: zeroplan_runtime/arena.py; zeroplan_runtime/schedule.py; zeroplan_runtime/parameter_values.py, _fill.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import groupby

from zeroplan.core.arena.layout import EXPERTS_SUFFIX, ArenaLayout, UnitKind
from zeroplan.core.arena.owned_buffers import OwnedBuffer, runtime_buffers
from zeroplan.core.buffers import Buffer, Place
from zeroplan.engines.player import EngineSchedule
from zeroplan.engines.runtime.units import PEFT_PREFIX
from zeroplan.simulate.recorder import Recorder
from zeroplan.tape.edit import TapeEdit
from zeroplan.tape.expanded import ExpandedTape, Op

#: Optimizer steps until peaks repeat: the second runs with the blocks that the first left in the cache.
STEPS_UNTIL_STEADY = 2


@dataclass(slots=True)
class TransientBuffer:
    """A buffer that comes and goes.

    Attributes:
        row: what it is, and its bytes.
        block: its block of memory; -1 while it is not there.
    """

    row: OwnedBuffer
    block: int = -1


@dataclass(slots=True, eq=False)
class UnitRun:
    """One unit with gradients in a run: what is kept of them until the step, and the slot of the whole ones."""

    in_ring: bool
    kept: TransientBuffer | None  # None where they leave for the host
    slot: SlotRun | None
    sums: TransientBuffer | None = None  # where they are summed before they do
    visits: int = 0  # forwards in this micro batch
    landed: bool = False  # some gradient came in this micro batch
    accumulated: bool = False  # a reduction has left its part of a sum
    reduced: bool = False
    experts: UnitRun | None = None  # those of its module, where ranks share them


@dataclass(slots=True, eq=False)
class SlotRun:
    """A slot of whole gradients and the unit that holds it."""

    buffer: TransientBuffer
    holder: UnitRun | None = field(default=None, repr=False)


class RuntimeSchedule(EngineSchedule):
    """One rank's run. The methods beside the hooks are those of zeroplan_runtime's Schedule."""

    follows_modules = True

    def __init__(
        self,
        layout: ArenaLayout,
        tape: ExpandedTape,
        recorder: Recorder,
        *,
        cublas_workspace: int,
        makes_room: bool = True,
        beside: RuntimeSchedule | None = None,
    ) -> None:
        """`cublas_workspace` is bytes; `makes_room`: a segment for the kept gradients is made at the start; `beside`: that of
        another tape of the same rank, whose buffers these are.
        """
        self.layout, self.setup, self.recorder = layout, layout.setup, recorder
        self.cublas_workspace, self.makes_room = cublas_workspace, makes_room
        self.rows = runtime_buffers(layout)
        transient = {(row.buffer, row.unit): TransientBuffer(row) for row in self.rows if not row.persistent}
        self.staging = transient.get((Buffer.COMM_REDUCE_SCATTER, "staging"))
        self.slots = {name: SlotRun(transient[Buffer.GRAD_FULL, name]) for name in layout.grad_slots}
        self.sums = {name: transient[Buffer.STAGE_D2H, name] for name in layout.sum_slots}
        rounds = self.setup.quantize_training is not None
        self.hooked = self.setup.ranks > 1 or rounds or any(unit.offloaded for unit in layout.units)
        self.units: list[UnitRun] = []
        by_param: dict[str, UnitRun] = {}
        by_module: dict[str, UnitRun] = {}
        self.found = by_param, by_module
        if beside is not None:
            self.staging, self.slots, self.sums, self.units = beside.staging, beside.slots, beside.sums, beside.units
            by_param, by_module = self.found = beside.found
        for unit in layout.units if beside is None else ():
            if unit.trainable is None:
                continue
            slot = self.slots[unit.grad_slot] if unit.grad_slot is not None else None
            sums = self.sums.get(unit.grad_slot or "") if unit.offloaded else None
            kept = None if unit.offloaded else transient[self.setup.kept_grad, unit.shape.name]
            run = UnitRun(unit.shape.in_ring, kept, slot, sums)
            self.units.append(run)
            if unit.shape.kind is not UnitKind.EXPERTS:
                by_module[unit.shape.name] = run
            elif (block := by_module.get(unit.shape.name.removesuffix(EXPERTS_SUFFIX))) is not None:
                block.experts = run
            by_param.update((param.name, run) for param in unit.shape.params)
        self.of_param = [by_param.get(param.name.removeprefix(PEFT_PREFIX)) for param in tape.params]
        self.of_module = [by_module.get(module.name.removeprefix(PEFT_PREFIX)) for module in tape.modules]
        # Behind the forward of these, slots that an earlier backward left are given back.
        blocks = {unit.shape.name for unit in layout.units if unit.shape.kind is UnitKind.BLOCK}
        self.gives = [module.parent < 0 or module.name.removeprefix(PEFT_PREFIX) in blocks for module in tape.modules]
        self.boundary = True
        self.in_backward = False
        self.slots_due = False
        self.current: UnitRun | None = None
        self.uncompiled, self.forwards = len(tape.shapes), 0

    # --- building -------------------------------------------------------------------------------------------------------

    def initialize(self) -> None:
        """The Arena takes one block for each run of standing rows of one kind; then parameters pass through, one at a time, and
        what they leave in the cache is given back. cuBLAS takes its workspaces, and the allocator is left a segment in which
        the kept gradients fit.
        """
        standing = (row for row in self.rows if row.persistent and row.place is Place.HBM)
        for (buffer, _, _), group in groupby(standing, key=lambda row: (row.buffer, row.dtype, row.place)):
            self.recorder.alloc(sum(row.bytes for row in group), buffer)
        width = self.setup.param_dtype.bytes
        for unit in self.layout.units:
            for param in unit.shape.params:
                self.recorder.free(self.recorder.alloc(param.numel * width, Buffer.INIT_TEMP, note=param.name))
        self.recorder.empty_cache()
        for _ in range(2 if self.cublas_workspace else 0):
            self.recorder.alloc(self.cublas_workspace, Buffer.WORKSPACE)
        self._make_room()

    def _make_room(self) -> None:
        """Let the allocator cache a segment for the kept gradients that are not there."""
        room = sum(unit.kept.row.bytes for unit in self.units if unit.kept is not None and unit.kept.block < 0)
        if self.makes_room and room:
            self.recorder.free(self.recorder.alloc(room, Buffer.INIT_TEMP))

    # --- forward --------------------------------------------------------------------------------------------------------

    def forward_begin(self) -> None:
        """Note whether the last backward left slots that this forward is to free. The first compiled forward gives back what
        the uncompiled ones before it left in the cache.
        """
        if self.uncompiled and self.forwards == self.uncompiled:
            self.recorder.empty_cache()
            self._make_room()
        self.forwards += 1
        self.in_backward = False
        self.current = None
        self.slots_due = any(slot.buffer.block >= 0 for slot in self.slots.values())

    def enter(self, module: int) -> None:
        """Count a unit's forward; in the backward a recomputation begins the unit's backward."""
        unit = self.of_module[module]
        if unit is None:
            return
        if self.in_backward:
            self._begin_backward(unit)
        else:
            unit.visits += 1

    def exit(self, module: int) -> None:
        """Free the slots that an earlier backward left, after the first block."""
        if self.slots_due and not self.in_backward and self.gives[module]:
            self._give_slots()

    # --- backward -------------------------------------------------------------------------------------------------------

    def backward_begin(self, boundary: bool) -> None:
        """Begin a backward; `boundary` says that a step follows it."""
        self.in_backward, self.boundary = True, boundary

    def backward_enter(self, module: int) -> None:
        """Begin the backward of a unit and end that of the unit before it."""
        unit = self.of_module[module]
        if unit is not None:
            self._begin_backward(unit)

    def grad(self, param: int, handle: int) -> None:
        """Copy a gradient into its unit's flat buffer and free autograd's tensor."""
        unit = self.of_param[param]
        if unit is not None:
            self._acquire(unit)
            unit.landed = True
        self.recorder.free(handle)

    def backward_end(self, boundary: bool) -> None:
        """Reduce what is left and, before a step, free the slots."""
        if self.current is not None:
            self._finish(self.current)
        for unit in reversed(self.units):
            if not unit.reduced and self.is_due(unit):
                self._reduce(unit)
        for unit in self.units:
            unit.reduced, unit.visits = False, 0
            unit.landed = False
        self.current = None
        if boundary and not self.setup.delayed_update:
            self._give_slots()

    def is_due(self, unit: UnitRun) -> bool:
        """Return whether the present backward reduces a unit."""
        return True

    def _begin_backward(self, unit: UnitRun) -> None:
        if unit is self.current or not self.hooked:
            return
        before, self.current = self.current, unit
        if before is not None:
            self._finish(before)

    def _finish(self, unit: UnitRun) -> None:
        for part in (unit, unit.experts):
            if part is not None and part.landed and (unit.visits == 1 or part.slot is not None):
                self._reduce(part)

    def _acquire(self, unit: UnitRun) -> None:
        slot = unit.slot
        if slot is None:
            if unit.kept is not None:
                self._take(unit.kept)
        elif slot.holder is not unit:
            if slot.holder is not None:
                self._reduce(slot.holder)
            self._take(slot.buffer)
            slot.holder = unit

    def _reduce(self, unit: UnitRun) -> None:
        unit.reduced = True
        if unit.slot is None and not self.boundary:
            return
        self._acquire(unit)
        if unit.kept is not None:
            self._take(unit.kept)
        if unit.sums is not None:
            self._take(unit.sums)
        if self.staging is not None and not unit.in_ring:
            self._take(self.staging)
        if unit.slot is not None:
            unit.slot.holder = None
            unit.landed, unit.accumulated = False, True

    # --- step -----------------------------------------------------------------------------------------------------------

    def step(self, applied: bool) -> None:
        """Free each unit's gradients once it is updated; the kernels need nothing else."""
        for unit in self.units:
            unit.accumulated = False
            if unit.kept is not None:
                self._give(unit.kept)

    def _take(self, buffer: TransientBuffer) -> None:
        if buffer.block < 0:
            buffer.block = self.recorder.alloc(buffer.row.bytes, buffer.row.buffer, note=buffer.row.unit)

    def _give(self, buffer: TransientBuffer) -> None:
        if buffer.block >= 0:
            self.recorder.free(buffer.block)
            buffer.block = -1

    def _give_slots(self) -> None:
        self.slots_due = False
        if self.staging is not None:
            self._give(self.staging)
        for sums in self.sums.values():
            self._give(sums)
        for slot in self.slots.values():
            self._give(slot.buffer)


def with_direct_gradients(tape: ExpandedTape, but: frozenset[int] = frozenset()) -> ExpandedTape:
    """The tape without the weight gradients that linear layers write in place; their GRAD stands where they are written.
    Layers of the weights `but`, by their index, leave them to autograd.

    Where other modules use the weight, too (a tied embedding), autograd's sum of their gradients is left out as well: each
    arrives on its own and is added in place.
    """
    edit = TapeEdit(tape)
    weights = {param: layers for param, layers in _direct_weights(tape).items() if param not in but}
    final = {tape.aux[at]: tape.arg[at] for at in edit.gradients if tape.arg[at] in weights}
    written: dict[int, int] = {}  # storages that are never made, and the parameters whose gradients they would hold
    summed: set[int] = set()  # storages of sums that are never made
    alive: dict[int, tuple[int, int]] = {}  # storages of the backward: bytes and module
    end = min((at for at in tape.marks.values() if at > tape.backward), default=len(tape))
    for at in range(tape.backward, end):
        op, arg, aux, _, module = edit.event(at)
        if op == Op.FREE:
            alive.pop(arg, None)
        elif op == Op.ALLOC:
            if arg in final:
                nbytes, layers = weights[final[arg]]
                direct = {arg} if module in layers else _written(alive, nbytes, layers)
                written.update(dict.fromkeys(direct, final[arg]))
                if arg not in direct and direct and len(direct) < sum(size == nbytes for size, _ in alive.values()):
                    summed.add(arg)
            alive[arg] = (aux, module)
    edit.drop(at for at in edit.gradients if tape.aux[at] in written or tape.aux[at] in summed)
    edit.drop_storages(summed - set(written))
    edit.drop_frees(written)
    for storage, param in written.items():
        op, arg, _, kind, module = edit.event(edit.made[storage])
        edit.replace(edit.made[storage], (op, arg, 0, kind, module), (Op.GRAD, param, storage, 0, -1))
    return edit.result()


def _direct_weights(tape: ExpandedTape) -> dict[int, tuple[int, frozenset[int]]]:
    """Return, for each trainable weight of a plain linear layer, its gradient's bytes and the layers that use it."""
    users: dict[int, set[int]] = {}
    for index, module in enumerate(tape.modules):
        if module.type == "Linear":
            for p in module.params:
                if tape.params[p].trainable and len(tape.params[p].shape) == 2:
                    users.setdefault(p, set()).add(index)
    params = tape.params
    return {p: (math.prod(params[p].shape) * params[p].itemsize, frozenset(layers)) for p, layers in users.items()}


def _written(alive: dict[int, tuple[int, int]], nbytes: int, layers: frozenset[int]) -> set[int]:
    """Return the living storages of `nbytes` that these layers made: their gradients."""
    return {storage for storage, (size, module) in alive.items() if size == nbytes and module in layers}
