"""The tape of preference training: beside the model's forward, forwards without gradients: a reference model's after it, and
for KTO's KL term one of the model itself before it.

Without gradients nothing waits for a backward: a block's input dies when the block has returned, and the rest when the model
has. The tape of a checkpointed forward shows the same, but for those inputs and for what lies outside the blocks; so it is
the reference's tape here, whether the model itself is checkpointed or not.
Source: TRL 1.16, ``trainer/dpo_trainer.py`` (``_compute_loss``); transformers 5.17, the loop over the layers in each model.
"""

from __future__ import annotations

from itertools import count

from zeroplan.tape.edit import EventWriter, TapeEdit
from zeroplan.tape.expanded import ExpandedTape, Kind, Mark, Op, TapeEvent, blocks_of


def with_reference(tape: ExpandedTape, reference: ExpandedTape, *, passes: int = 1, hooked: bool = False) -> ExpandedTape:
    """Return `tape` with so many forwards of `reference`, the tape of a checkpointed forward over the same batch, after it.

    The events of the reference's modules are left out: they are another model's. An engine that shards the reference, too, has
    hooks on them: with `hooked` they stand between two marks, for the modules of `tape` that are in the same place.

    Raises:
        ValueError: `hooked`, and the two have other modules.
    """
    if hooked and [one.name for one in tape.modules] != [one.name for one in reference.modules]:
        raise ValueError("a reference with other modules than the model's")
    return _with_forwards(tape, reference, tape.marks[Mark.FORWARD_END], passes, hooked)


def with_forward_before(tape: ExpandedTape, forward: ExpandedTape) -> ExpandedTape:
    """Return `tape` with the forward of another, as in :func:`with_reference`, before its own."""
    return _with_forwards(tape, forward, 1 + tape.marks[Mark.FORWARD_BEGIN], 1, hooked=False)


def _with_forwards(tape: ExpandedTape, forward: ExpandedTape, at: int, passes: int, hooked: bool) -> ExpandedTape:
    edit = TapeEdit(tape)
    write = edit.before(at)
    for _ in range(passes):
        if hooked:
            write.add(Op.MARK, Mark.REFERENCE_BEGIN)
        _forward(forward, write, hooked)
        if hooked:
            write.add(Op.MARK, Mark.REFERENCE_END)
    return edit.result()


def forward_without_gradients(tape: ExpandedTape) -> list[TapeEvent]:
    """Return the events of a forward without gradients, those of its modules too, from the tape of a checkpointed one."""
    write = EventWriter(count())
    _forward(tape, write, hooked=True)
    return write.events


def _forward(tape: ExpandedTape, write: EventWriter, hooked: bool) -> None:
    """Write the forward's events with storages of their own, and frees where a forward without gradients has them."""
    blocks = set(blocks_of(tape.modules))
    alive: dict[int, tuple[int, int]] = {}  # by storage, what stands for it and its kind
    for at in range(tape.marks[Mark.FORWARD_BEGIN] + 1, tape.marks[Mark.FORWARD_END]):
        op, arg = tape.op[at], tape.arg[at]
        if op == Op.ALLOC:
            alive[arg] = write.alloc(tape.aux[at]), tape.kind[at]
        elif op == Op.FREE and arg in alive:
            write.free(alive.pop(arg)[0])
        elif op in (Op.ENTER, Op.EXIT):
            if hooked:
                write.add(op, arg)
            if op == Op.ENTER or arg not in blocks:
                continue
            # Of two inputs of blocks that are alive now, the later one is this block's output.
            for storage in [one for one, (_, kind) in alive.items() if kind == Kind.CHECKPOINT][:-1]:
                write.free(alive.pop(storage)[0])
    write.free(*(storage for storage, _ in alive.values()))
