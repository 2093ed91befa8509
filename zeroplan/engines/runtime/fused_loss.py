"""The tape of a causal language model with the runtime's loss in place of transformers'.

transformers casts the logits to fp32 and takes their log-softmax in the forward, and makes two gradients of that size in the
backward, before the cast's gradient has the logits' dtype. The runtime's loss keeps the logits until it has written their
gradient, and two numbers a row. Source: zeroplan_runtime/loss.py; transformers/loss/loss_utils.py, ForCausalLMLoss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zeroplan.core.losses import leaves_loss_to_function
from zeroplan.tape.expanded import ExpandedTape, Kind, Mark, Op, TapeEvent

_WIDE = 4  # bytes of an fp32 number


@dataclass(frozen=True, slots=True)
class _Loss:
    """Storages of transformers' loss in the tape: those it takes, those never made, the logits' gradient."""

    logits: int
    dropped: frozenset[int]
    first_dropped: int
    grad: int


def with_fused_loss(tape: ExpandedTape, *, rows: int, itemsize: int) -> ExpandedTape:
    """`tape` with the loss over `rows` tokens computed by the runtime; as it is, where that loss is not in it.

    Args:
        tape: the tape of one micro batch.
        rows: tokens of the micro batch.
        itemsize: bytes of one logit.
    """
    loss = _find(tape, itemsize)
    if loss is None:
        return tape
    return tape.with_events(_events(tape, loss, rows))


def _find(tape: ExpandedTape, itemsize: int) -> _Loss | None:
    """Find the loss of a causal language model by its model's class and the sizes of what it allocates."""
    forward: list[tuple[int, int]] = []  # storages and bytes of logits and loss, in order
    backward: list[tuple[int, int]] = []
    chosen, head = forward, 0
    for op, arg, aux, kind, module in tape.events():
        if op == Op.MARK and arg == Mark.BACKWARD_BEGIN:
            chosen = backward
        elif op == Op.ALLOC and kind == Kind.LOGITS and chosen is forward:
            head = aux
            forward.append((arg, aux))
        elif op == Op.ALLOC and kind == Kind.LOSS and module >= 0 and leaves_loss_to_function(tape.modules[module].type):
            chosen.append((arg, aux))
    wide = head // itemsize * _WIDE
    after = [storage for storage, size in backward if size == wide]
    if itemsize == _WIDE:  # the cast made no copy: the last two of their size are log-softmax's output, and its gradient
        before = [storage for storage, size in forward if size == wide]
        if len(before) < 2 or len(after) < 2:
            return None
        return _Loss(before[-2], frozenset({before[-1], after[0]}), before[-1], after[1])
    copies = [i for i, (_, size) in enumerate(forward) if size == wide]
    narrow = [storage for storage, size in backward if size == head]
    if len(copies) != 2 or not copies[0] or len(after) != 2 or not narrow:
        return None
    dropped = [forward[i][0] for i in copies]
    return _Loss(forward[copies[0] - 1][0], frozenset((*dropped, *after)), dropped[0], narrow[0])


def _events(tape: ExpandedTape, loss: _Loss, rows: int) -> Iterator[TapeEvent]:
    sums = max(arg for op, arg in zip(tape.op, tape.arg, strict=True) if op == Op.ALLOC) + 1
    for event in tape.events():
        op, arg, _, _, module = event
        if op == Op.ALLOC and arg == loss.first_dropped:
            yield (Op.ALLOC, sums, rows * _WIDE, Kind.SAVED, module)
        if op in (Op.ALLOC, Op.FREE) and (arg in loss.dropped or (op == Op.FREE and arg == loss.logits)):
            continue
        yield event
        if op == Op.ALLOC and arg == loss.grad:
            yield (Op.FREE, sums, 0, 0, -1)
            yield (Op.FREE, loss.logits, 0, 0, -1)
