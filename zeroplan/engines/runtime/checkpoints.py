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

from zeroplan.core.arena.layout import LEAST_MOVED_BYTES, ArenaLayout, UnitKind
from zeroplan.engines.case import Case
from zeroplan.engines.runtime.units import PEFT_PREFIX
from zeroplan.models.facts import spec_facts
from zeroplan.tape.checkpointed_inputs import checkpointed_inputs
from zeroplan.tape.edit import TapeEdit
from zeroplan.tape.expanded import ExpandedTape, Kind, Op

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


def offloaded_input_sizes(case: Case, layout: ArenaLayout) -> OffloadedInputSizes:
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
    return OffloadedInputSizes(max(0, count), work.batch.micro_batch, work.batch.seq_len or 0, hidden, parts_of(case))


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
        to_host: they leave for pinned memory, a buffer each.
    """
    inside = {at for at, module in enumerate(tape.modules) if module.name.removeprefix(PEFT_PREFIX) in blocks}
    found = checkpointed_inputs(tape, inside)
    claimed = [one for one in found.inputs if one.bytes >= LEAST_MOVED_BYTES]
    moved = []
    for index, one in enumerate(claimed[:-1]):
        goes = claimed[index + 2].forward if index + 2 < len(claimed) else found.forward_end
        following, size = claimed[index + 1], one.bytes
        divided = parts if size % (parts * _LEAST_WIDTH) == 0 else 1
        if to_host or divided > 1:
            times = following.forward, goes, following.again, one.again
            moved.append(OffloadedInput(one.storage, size, divided, to_host, *times))
    return tuple(moved)


def with_offloaded_inputs(tape: ExpandedTape, moved: Collection[OffloadedInput]) -> ExpandedTape:
    """The tape in which these inputs or their parts are freed in the forward, and others made in the backward."""
    edit = TapeEdit(tape)
    for one in moved:
        if one.parts == 1:
            edit.before(one.goes).free(one.storage)
            back = [edit.before(one.returns).alloc(one.bytes, Kind.CHECKPOINT)]
        else:
            divided = edit.before(one.next)
            part = divided.alloc(one.part, Kind.CHECKPOINT)
            divided.free(one.storage)
            if one.to_host:
                edit.before(one.goes).free(part)
                part = edit.before(one.returns).alloc(one.part, Kind.CHECKPOINT)
            again = edit.before(one.again)
            back = [again.alloc(one.bytes, Kind.CHECKPOINT)]
            if one.to_host:
                again.free(part)
            else:
                back.append(part)
        if one.storage in edit.freed:
            edit.replace(edit.freed[one.storage], *[(Op.FREE, storage, 0, 0, -1) for storage in back])
    return edit.result()


def host_buffers(moved: Collection[OffloadedInput]) -> dict[str, int]:
    """Bytes of the pinned buffers by the name that the Arena's row has for the unit (zeroplan_runtime's HostPool)."""
    return {f"checkpoint.{index}": one.part for index, one in enumerate(one for one in moved if one.to_host)}
