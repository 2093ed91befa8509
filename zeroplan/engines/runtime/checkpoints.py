"""Checkpointed inputs in host memory (``cpu_checkpointing``) or divided (``partition_activations``), found in a model's tape.

Which leave, and when they go and return, is said in the notes of zeroplan_runtime/offload/activations.py: of each checkpointed
block the input that what runs before it has made, unless autograd keeps it anyway. It is copied when the next checkpointed
block is entered, gone when the one after is (or the forward ends), and back when the backward of the block above begins. The
last block's never leaves. The pinned buffers stay and are used again. Where ranks divide it, a part is made when the next block
is entered and takes its place, and the whole is made again when the block is computed again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from zeroplan.core.layout import LEAST_MOVED_BYTES, Layout, UnitKind
from zeroplan.core.tape import ExpandedTape, Kind, Mark, Op, TapeEvent
from zeroplan.engines.base import Case
from zeroplan.engines.runtime.units import PEFT_PREFIX
from zeroplan.models.facts import spec_facts

#: Bytes of the narrowest element that an input has.
_LEAST_WIDTH = 2


@dataclass(frozen=True, slots=True)
class OffloadedInputSizes:
    """Number and size of the inputs that leave the GPU, as far as a config tells without a tape."""

    count: int = 0
    micro_batch: int = 0
    seq_len: int = 0
    hidden: int = 0
    parts: int = 1


def offloaded_input_sizes(case: Case, layout: Layout) -> OffloadedInputSizes:
    """Derive the formula's factors. Where a model's stacks read sequences of other lengths, the tape knows better.

    With adapters the first block's input is a leaf, which autograd keeps.
    """
    policy, hidden = case.workload.recomputation, spec_facts(case.spec).hidden_size
    if policy is None or hidden is None or not case.zero.activation_checkpointing.cpu_checkpointing:
        return OffloadedInputSizes()
    stacks: dict[str, int] = {}
    for unit in layout.units:
        if unit.shape.kind is UnitKind.BLOCK:
            stack = unit.shape.name.rpartition(".")[0]
            stacks[stack] = stacks.get(stack, 0) + 1
    count = sum(blocks // policy.every for blocks in stacks.values()) - 1
    if case.workload.lora_rank is not None and policy.every == 1:
        count -= 1
    work = case.workload
    return OffloadedInputSizes(max(0, count), work.micro_batch, work.seq_len or 0, hidden, parts_of(case))


def parts_of(case: Case) -> int:
    """Return the ranks that divide checkpointed inputs: the tensor-parallel ones, with ``partition_activations``."""
    return case.layout.tp if case.zero.activation_checkpointing.partition_activations else 1


@dataclass(frozen=True, slots=True)
class OffloadedInput:
    """A checkpointed input that leaves, with events by index.

    Attributes:
        storage, bytes: the whole.
        parts: the ranks that divide it; 1 where it stays whole.
        to_host: it or its part leaves the device.
        next: the next block is entered behind it.
        goes: what leaves is gone before it.
        returns: what left is made again before it.
        again: the block is computed again behind it.
    """

    storage: int
    bytes: int
    parts: int
    to_host: bool
    next: int
    goes: int
    returns: int
    again: int

    @property
    def part(self) -> int:
        """Bytes of what this rank keeps."""
        return self.bytes // self.parts


def offloaded_inputs(
    tape: ExpandedTape, blocks: Collection[str], *, parts: int = 1, to_host: bool = True
) -> tuple[OffloadedInput, ...]:
    """Return each input that leaves in one micro batch or is divided, in the order of the forward.

    Args:
        tape: the model's expanded tape.
        blocks: full names of the modules that are units of kind block.
        parts: the ranks that divide them.
        to_host: they leave for pinned memory, a buffer each.
    """
    found, forward_end = _checkpointed(tape, blocks)
    lives = _Lifetimes(tape)
    inputs: list[int | None] = []
    for before, block in zip([None, *found], found, strict=False):
        inside = before is not None and before.stack == block.stack
        inputs.append(lives.input_of(block, before.forward) if inside and before is not None else None)
    # A stack's first input is as large as the others. Tables and masks, which all blocks share, wait like it and are not.
    sizes = {lives.bytes[storage] for storage in inputs if storage is not None}
    for index, block in enumerate(found):
        if inputs[index] is None:
            inputs[index] = lives.input_of(block, found[index - 1].forward if index else 0, sizes)
    claimed = [
        (block, storage)
        for block, storage in zip(found, inputs, strict=True)
        if storage is not None and lives.bytes[storage] >= LEAST_MOVED_BYTES
    ]
    moved = []
    for index, (_, storage) in enumerate(claimed[:-1]):
        goes = claimed[index + 2][0].forward if index + 2 < len(claimed) else forward_end
        following, size = claimed[index + 1][0], lives.bytes[storage]
        divided = parts if size % (parts * _LEAST_WIDTH) == 0 else 1
        if to_host or divided > 1:
            times = following.forward, goes, following.again, claimed[index][0].again
            moved.append(OffloadedInput(storage, size, divided, to_host, *times))
    return tuple(moved)


def with_offloaded_inputs(tape: ExpandedTape, moved: Collection[OffloadedInput]) -> ExpandedTape:
    """The tape in which these inputs or their parts are freed in the forward, and others made in the backward."""
    first = max(arg for op, arg in zip(tape.op, tape.arg, strict=True) if op == Op.ALLOC) + 1
    made, added = iter(range(first, first + 3 * len(moved))), dict[int, list[TapeEvent]]()
    with_storage: dict[int, list[int]] = {}  # what is freed where the tape frees the input

    def alloc(at: int, size: int) -> int:
        storage = next(made)
        added.setdefault(at, []).append((Op.ALLOC, storage, size, Kind.CHECKPOINT, -1))
        return storage

    def free(at: int, storage: int) -> None:
        added.setdefault(at, []).append((Op.FREE, storage, 0, 0, -1))

    for one in moved:
        if one.parts == 1:
            free(one.goes, one.storage)
            with_storage[one.storage] = [alloc(one.returns, one.bytes)]
            continue
        part = alloc(one.next, one.part)
        free(one.next, one.storage)
        if one.to_host:
            free(one.goes, part)
            part = alloc(one.returns, one.part)
        whole = alloc(one.again, one.bytes)
        if one.to_host:
            free(one.again, part)
        with_storage[one.storage] = [whole] if one.to_host else [whole, part]
    events: list[TapeEvent] = []
    for at, (op, arg, aux, kind, module) in enumerate(tape.events()):
        events += added.get(at, ())
        instead = with_storage.get(arg) if op == Op.FREE else None
        events += [(op, arg, aux, kind, module)] if instead is None else [(op, one, aux, kind, module) for one in instead]
    return tape.with_events(events)


def host_buffers(moved: Collection[OffloadedInput]) -> dict[str, int]:
    """Bytes of the pinned buffers by the name that the Arena's row has for the unit (zeroplan_runtime's HostPool)."""
    return {f"checkpoint.{index}": one.part for index, one in enumerate(one for one in moved if one.to_host)}


@dataclass(frozen=True, slots=True)
class _CheckpointedBlock:
    """A checkpointed block: its list's name, and the events at which its forward, its recomputation and what follows begin."""

    stack: str
    forward: int
    again: int
    until: int


def _checkpointed(tape: ExpandedTape, blocks: Collection[str]) -> tuple[list[_CheckpointedBlock], int]:
    """Return the blocks whose forward runs again in the backward, in the order of the forward, and where the forward ends."""
    names = [module.name.removeprefix(PEFT_PREFIX) for module in tape.modules]
    entered: dict[int, int] = {}
    again: dict[int, int] = {}
    forward_end = backward_end = 0
    for at, (op, arg) in enumerate(zip(tape.op, tape.arg, strict=True)):
        if op == Op.MARK:
            forward_end = at if arg == Mark.FORWARD_END else forward_end
            backward_end = at if arg == Mark.BACKWARD_END else backward_end
        elif op == Op.ENTER and names[arg] in blocks:
            (again if forward_end else entered).setdefault(arg, at)
    order = [module for module in entered if module in again]
    ends = [backward_end, *(again[module] for module in order)]
    stacks = [names[module].rpartition(".")[0] for module in order]
    return [
        _CheckpointedBlock(stack, entered[module], again[module], end)
        for stack, module, end in zip(stacks, order, ends, strict=False)
    ], forward_end


class _Lifetimes:
    """Birth and death of each storage of a tape."""

    def __init__(self, tape: ExpandedTape) -> None:
        self.made: dict[int, int] = {}
        self.gone: dict[int, int] = {}
        self.bytes: dict[int, int] = {}
        for at, (op, arg, aux, _, _) in enumerate(tape.events()):
            if op == Op.ALLOC:
                self.made[arg], self.bytes[arg] = at, aux
            elif op == Op.FREE:
                self.gone[arg] = at
        self._latest = sorted(self.made, key=self.made.__getitem__, reverse=True)

    def input_of(self, block: _CheckpointedBlock, since: int, sizes: Collection[int] = ()) -> int | None:
        """The last storage made after event `since` that waits for the block's backward; of one of `sizes`, if there are any.

        What was there when the block before was entered is shared by several (a mask, an encoder's output), and what is freed
        later than the block's backward is kept by autograd.
        """
        for storage in self._latest:
            if self.made[storage] < since:
                break
            waits = self.made[storage] < block.forward and block.again < self.gone.get(storage, 0) < block.until
            if waits and (not sizes or self.bytes[storage] in sizes):
                return storage
        return None
