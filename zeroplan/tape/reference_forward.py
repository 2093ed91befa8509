"""The tape of preference training: beside the model's forward, forwards without gradients: a reference model's after it, and
for KTO's KL term one of the model itself before it.

Without gradients nothing waits for a backward: a block's input dies when the block has returned, and the rest when the model
has. The tape of a checkpointed forward shows the same, but for those inputs and for what lies outside the blocks; so it is
the reference's tape here, whether the model itself is checkpointed or not.
Source: TRL 1.16, ``trainer/dpo_trainer.py`` (``_compute_loss``); transformers 5.17, the loop over the layers in each model.
"""

from __future__ import annotations

from collections.abc import Iterator

from zeroplan.tape.expanded import ExpandedTape, Kind, Mark, Op, blocks_of

_Event = tuple[int, int, int, int, int]


def with_reference(tape: ExpandedTape, reference: ExpandedTape, *, passes: int = 1, hooked: bool = False) -> ExpandedTape:
    """Return `tape` with so many forwards of `reference`, the tape of a checkpointed forward over the same batch, after it.

    The events of the reference's modules are left out: they are another model's. An engine that shards the reference, too, has
    hooks on them: with `hooked` they stand between two marks, for the modules of `tape` that are in the same place.

    Raises:
        ValueError: `hooked`, and the two have other modules.
    """
    if hooked and [one.name for one in tape.modules] != [one.name for one in reference.modules]:
        raise ValueError("a reference with other modules than the model's")
    return _with_forwards(tape, reference, _mark(tape, Mark.FORWARD_END), passes, hooked)


def with_forward_before(tape: ExpandedTape, forward: ExpandedTape) -> ExpandedTape:
    """Return `tape` with the forward of another, as in :func:`with_reference`, before its own."""
    return _with_forwards(tape, forward, 1 + _mark(tape, Mark.FORWARD_BEGIN), 1, hooked=False)


def _with_forwards(tape: ExpandedTape, forward: ExpandedTape, at: int, passes: int, hooked: bool) -> ExpandedTape:
    added: list[_Event] = []
    taken = 1 + max(arg for op, arg in zip(tape.op, tape.arg, strict=True) if op == Op.ALLOC)
    for _ in range(passes):
        events = list(_forward(forward, taken, hooked))
        taken = 1 + max(arg for op, arg, *_ in events if op == Op.ALLOC)
        added += [_BEGIN, *events, _END] if hooked else events
    columns = [list(column) for column in (tape.op, tape.arg, tape.aux, tape.kind, tape.module)]
    for column, values in zip(columns, zip(*added, strict=True), strict=True):
        column[at:at] = values
    return tape.with_events(zip(*columns, strict=True))


def _mark(tape: ExpandedTape, mark: Mark) -> int:
    return next(i for i, (op, arg) in enumerate(zip(tape.op, tape.arg, strict=True)) if op == Op.MARK and arg == mark)


def forward_without_gradients(tape: ExpandedTape) -> Iterator[_Event]:
    """Yield the events of a forward without gradients, those of its modules too, from the tape of a checkpointed one."""
    return _forward(tape, 0, hooked=True)


_BEGIN = (int(Op.MARK), int(Mark.REFERENCE_BEGIN), 0, 0, -1)
_END = (int(Op.MARK), int(Mark.REFERENCE_END), 0, 0, -1)


def _forward(tape: ExpandedTape, taken: int, hooked: bool) -> Iterator[_Event]:
    """Yield the forward's events with storages from `taken` on, and frees where a forward without gradients has them."""
    span = range(_mark(tape, Mark.FORWARD_BEGIN) + 1, _mark(tape, Mark.FORWARD_END))
    blocks = set(blocks_of(tape.modules))
    alive: dict[int, int] = {}  # storages and their kinds
    for i in span:
        op, arg = tape.op[i], tape.arg[i]
        if op == Op.ALLOC:
            alive[arg] = tape.kind[i]
            yield (Op.ALLOC, taken + arg, tape.aux[i], Kind.TEMP, -1)
        elif op == Op.FREE and arg in alive:
            del alive[arg]
            yield (Op.FREE, taken + arg, 0, 0, -1)
        elif op in (Op.ENTER, Op.EXIT):
            if hooked:
                yield (op, arg, 0, 0, -1)
            if op == Op.ENTER or arg not in blocks:
                continue
            # Of two inputs of blocks that are alive now, the later one is this block's output.
            for storage in [one for one, kind in alive.items() if kind == Kind.CHECKPOINT][:-1]:
                del alive[storage]
                yield (Op.FREE, taken + storage, 0, 0, -1)
    for storage in alive:
        yield (Op.FREE, taken + storage, 0, 0, -1)
