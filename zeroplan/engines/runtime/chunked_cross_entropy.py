"""The tape of a causal language model whose head and loss see a chunk of tokens at a time.

The logits and their gradient are there for one chunk, once in the forward and again in the backward, where the gradients of the
hidden states and, unless it has a place of its own, of the weight exist before the first chunk.
Source: zeroplan_runtime/chunked_cross_entropy.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zeroplan.core.errors import BadInput
from zeroplan.core.losses import leaves_loss_to_function
from zeroplan.tape.expanded import ExpandedTape, Kind, Mark, Op, TapeEvent

_WIDE, _INDEX = 4, 8  # bytes of an fp32 number and of an index


@dataclass(frozen=True, slots=True)
class _FusedHead:
    """The head and the runtime's fused loss in a tape.

    Attributes:
        module: the head's index.
        logits: their storage.
        logits_grad: that of their gradient.
        row: bytes of one token's logits.
        rows: tokens.
        handed: allocations of the head's backward, which are its results.
        late: what the loss's backward frees, and the head's needs here: labels and sums.
    """

    module: int
    logits: int
    logits_grad: int
    row: int
    rows: int
    handed: tuple[TapeEvent, ...]
    late: tuple[TapeEvent, ...]


def with_chunked_cross_entropy(tape: ExpandedTape, *, tokens: int) -> ExpandedTape:
    """Return `tape`, which has the runtime's fused loss, with `tokens` tokens' logits at a time.

    Raises:
        BadInput: where the model's head and loss are not what the runtime computes together.
    """
    head = _find(tape)
    if head is None:
        raise BadInput(
            "the model is no causal language model whose linear head is followed by its loss",
            where="ds_config.zeroplan.chunked_cross_entropy",
            remedy="leave the key out",
        )
    return tape.with_events(_events(tape, head, tokens))


def _find(tape: ExpandedTape) -> _FusedHead | None:
    """Find the linear layer that makes the logits; None where something changes them before the loss."""
    events = list(tape.events())
    where = next((i for i, event in enumerate(events) if event[0] == Op.ALLOC and event[3] == Kind.LOGITS), None)
    turn = next((i for i, event in enumerate(events) if event[:2] == (Op.MARK, Mark.BACKWARD_BEGIN)), None)
    if where is None or turn is None or where > turn or events[where][4] < 0:
        return None
    _, logits, size, _, module = events[where]
    layer = tape.modules[module]
    if layer.parent < 0 or layer.type != "Linear" or not leaves_loss_to_function(tape.modules[layer.parent].type):
        return None
    begin = next((i for i in range(turn, len(events)) if events[i][:2] == (Op.BWD_ENTER, module)), None)
    end = next((i for i in range(turn, len(events)) if events[i][:2] == (Op.BWD_EXIT, module)), None)
    if begin is None or end is None:
        return None
    copies = [i for i in range(where + 1, begin) if events[i][0] == Op.ALLOC and events[i][2] >= size]
    if len(copies) != 1 or copies[0] < turn:
        return None
    shape = tape.params[layer.params[0]].shape
    row = _row_bytes(shape[0], size, tape.params[layer.params[0]].itemsize)
    if not row:
        return None
    handed = tuple(event for event in events[begin:end] if event[0] == Op.ALLOC)
    rows = size // row
    narrow = {event[1] for event in events[:turn] if event[0] == Op.ALLOC and event[2] in (_WIDE * rows, _INDEX * rows)}
    late = tuple(event for event in events[turn:begin] if event[0] == Op.FREE and event[1] in narrow)
    return _FusedHead(module, logits, events[copies[0]][1], row, rows, handed, late)


def _row_bytes(words: int, size: int, itemsize: int) -> int:
    """Return the bytes of a row of logits, 0 where `size` is no whole number of rows."""
    return words * itemsize if size % (words * itemsize) == 0 else 0


def _events(tape: ExpandedTape, head: _FusedHead, tokens: int) -> Iterator[TapeEvent]:
    new = max(arg for op, arg in zip(tape.op, tape.arg, strict=True) if op == Op.ALLOC) + 1
    losses, first, last = new, new + 1, new + 3
    gone = {*head.handed, *head.late}  # from where they were: they follow the backward's begin
    for event in tape.events():
        op, arg, _, _, module = event
        if op == Op.ALLOC and arg == head.logits:
            yield (Op.ALLOC, losses, head.rows * _WIDE, Kind.TEMP, module)
            yield from _chunks(head, tokens, first, Kind.LOGITS)
            yield (Op.FREE, losses, 0, 0, -1)
        elif event in gone or (op in (Op.ALLOC, Op.FREE) and arg in (head.logits, head.logits_grad)):
            continue
        else:
            yield event
            if op == Op.BWD_ENTER and arg == head.module:
                yield from head.handed
                yield from _chunks(head, tokens, last, Kind.LOSS)
                yield from head.late


def _chunks(head: _FusedHead, tokens: int, storage: int, kind: Kind) -> Iterator[TapeEvent]:
    """Yield a whole chunk, and the last one where it is smaller: those between take the first one's memory."""
    sizes = [min(tokens, head.rows), head.rows % tokens if head.rows > tokens else 0]
    for i, rows in enumerate(size for size in sizes if size):
        yield (Op.ALLOC, storage + i, rows * head.row, kind, head.module)
        yield (Op.FREE, storage + i, 0, 0, -1)
