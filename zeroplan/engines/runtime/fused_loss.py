"""The tape of a causal language model with the runtime's loss in place of transformers'.

transformers casts the logits to fp32 and takes their log-softmax in the forward, and makes two gradients of that size in the
backward, before the cast's gradient has the logits' dtype. The runtime's loss keeps the logits until it has written their
gradient, and two numbers a row. Source: zeroplan_runtime/techniques/fused_loss.py;
transformers/loss/loss_utils.py, ForCausalLMLoss.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroplan.core.losses import leaves_loss_to_function
from zeroplan.tape.edit import TapeEdit
from zeroplan.tape.expanded import ExpandedTape, Kind

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
    edit = TapeEdit(tape)
    loss = _find(edit, itemsize)
    if loss is None:
        return tape
    first = edit.made[loss.first_dropped]
    sums = edit.before(first, tape.module[first]).alloc(rows * _WIDE, Kind.SAVED)
    edit.drop_storages(loss.dropped)
    edit.drop_frees((loss.logits,))
    edit.behind(edit.made[loss.grad]).free(sums, loss.logits)
    return edit.result()


def _find(edit: TapeEdit, itemsize: int) -> _Loss | None:
    """Find the loss of a causal language model by its model's class and the sizes of what it allocates."""
    tape = edit.tape
    forward = [at for at in edit.allocations(range(tape.backward)) if tape.kind[at] == Kind.LOGITS or _is_loss(tape, at)]
    backward = [at for at in edit.allocations(range(tape.backward, len(tape))) if _is_loss(tape, at)]
    head = next((tape.aux[at] for at in reversed(forward) if tape.kind[at] == Kind.LOGITS), 0)
    wide = head // itemsize * _WIDE
    copies = [place for place, at in enumerate(forward) if tape.aux[at] == wide]
    after = [tape.arg[at] for at in backward if tape.aux[at] == wide]
    if itemsize == _WIDE:  # the cast made no copy: the last two of their size are log-softmax's output, and its gradient
        if len(copies) < 2 or len(after) < 2:
            return None
        logits, softmax = (tape.arg[forward[place]] for place in copies[-2:])
        return _Loss(logits, frozenset({softmax, after[0]}), softmax, after[1])
    narrow = [tape.arg[at] for at in backward if tape.aux[at] == head]
    if len(copies) != 2 or not copies[0] or len(after) != 2 or not narrow:
        return None
    dropped = [tape.arg[forward[place]] for place in copies]
    return _Loss(tape.arg[forward[copies[0] - 1]], frozenset((*dropped, *after)), dropped[0], narrow[0])


def _is_loss(tape: ExpandedTape, at: int) -> bool:
    module = tape.module[at]
    return tape.kind[at] == Kind.LOSS and module >= 0 and leaves_loss_to_function(tape.modules[module].type)
