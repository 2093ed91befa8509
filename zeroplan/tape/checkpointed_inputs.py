"""Which storages of a tape are the inputs that checkpointed blocks wait for, and when each block runs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from zeroplan.tape.expanded import ExpandedTape, Mark, Op


@dataclass(frozen=True, slots=True)
class CheckpointedInput:
    """The input of a checkpointed block: its storage and bytes, and the events at which forward and recomputation begin."""

    storage: int
    bytes: int
    forward: int
    again: int


@dataclass(frozen=True, slots=True)
class CheckpointedInputs:
    """The inputs of a micro batch in the order of the forward, how many blocks wait, and the events that end both passes.

    `first_kept`: the events of the first block's recomputation and backward, where autograd keeps its input anyway, as the
    embedding's output that is made to require a gradient before a frozen model with adapters.
    """

    inputs: tuple[CheckpointedInput, ...]
    blocks: int
    first_kept: range | None
    forward_end: int
    backward_end: int


@dataclass(frozen=True, slots=True)
class _Block:
    """A checkpointed block: its list's name, and the events at which its forward, its recomputation and what follows begin."""

    stack: str
    forward: int
    again: int
    until: int


def checkpointed_inputs(tape: ExpandedTape, blocks: Collection[int]) -> CheckpointedInputs:
    """Return of each checkpointed block the input that what runs before it has made, unless autograd keeps it anyway.

    Args:
        tape: the model's expanded tape.
        blocks: indices of the blocks' modules.
    """
    found, forward_end, backward_end = _checkpointed(tape, blocks)
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
    told = tuple(
        CheckpointedInput(storage, lives.bytes[storage], block.forward, block.again)
        for block, storage in zip(found, inputs, strict=True)
        if storage is not None
    )
    first_kept = range(found[0].again, found[0].until) if found and inputs[0] is None else None
    return CheckpointedInputs(told, len(found), first_kept, forward_end, backward_end)


def _checkpointed(tape: ExpandedTape, blocks: Collection[int]) -> tuple[list[_Block], int, int]:
    """Return the blocks whose forward runs again in the backward, in the order of the forward, and where both passes end."""
    entered: dict[int, int] = {}
    again: dict[int, int] = {}
    forward_end = backward_end = 0
    for at, (op, arg) in enumerate(zip(tape.op, tape.arg, strict=True)):
        if op == Op.MARK:
            forward_end = at if arg == Mark.FORWARD_END else forward_end
            backward_end = at if arg == Mark.BACKWARD_END else backward_end
        elif op == Op.ENTER and arg in blocks:
            (again if forward_end else entered).setdefault(arg, at)
    order = [module for module in entered if module in again]
    ends = [backward_end, *(again[module] for module in order)]
    stacks = [tape.modules[module].name.rpartition(".")[0] for module in order]
    made = [_Block(stack, entered[module], again[module], end) for stack, module, end in zip(stacks, order, ends, strict=False)]
    return made, forward_end, backward_end


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

    def input_of(self, block: _Block, since: int, sizes: Collection[int] = ()) -> int | None:
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
