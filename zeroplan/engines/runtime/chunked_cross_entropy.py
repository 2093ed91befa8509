"""The tape of a causal language model whose head and loss see a chunk of tokens at a time.

The logits and their gradient are there for one chunk, once in the forward and again in the backward, where the gradients of the
hidden states and, unless it has a place of its own, of the weight exist before the first chunk.
Source: zeroplan_runtime/techniques/chunked_cross_entropy.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroplan.core.errors import BadInput
from zeroplan.core.losses import leaves_loss_to_function
from zeroplan.tape.edit import EventWriter, TapeEdit
from zeroplan.tape.expanded import ExpandedTape, Kind, Op

_WIDE, _INDEX = 4, 8  # bytes of an fp32 number and of an index

#: The key of the file.
KEY = "ds_config.zeroplan.chunked_cross_entropy"


@dataclass(frozen=True, slots=True)
class _FusedHead:
    """The head and the runtime's fused loss in a tape.

    Attributes:
        module: the head's index.
        logits: the event that allocates them.
        logits_grad: the one that allocates their gradient.
        begin: the head's backward begins.
        row: bytes of one token's logits.
        rows: tokens.
        handed: events that allocate what the head's backward makes, its results.
        late: events of the loss's backward that free what the head's needs here: labels and sums.
    """

    module: int
    logits: int
    logits_grad: int
    begin: int
    row: int
    rows: int
    handed: tuple[int, ...]
    late: tuple[int, ...]


def with_chunked_cross_entropy(tape: ExpandedTape, *, tokens: int, where: str = KEY) -> ExpandedTape:
    """Return `tape`, which has the runtime's fused loss, with `tokens` tokens' logits at a time; `where` asks for it.

    Raises:
        BadInput: where the model's head and loss are not what the runtime computes together.
    """
    edit = TapeEdit(tape)
    head = _find(edit)
    if head is None:
        raise BadInput(
            "the model is no causal language model whose linear head is followed by its loss",
            where=where,
            remedy="leave it out",
        )
    forward = edit.before(head.logits, head.module)
    losses = forward.alloc(head.rows * _WIDE)
    _chunks(forward, head, tokens, Kind.LOGITS)
    forward.free(losses)
    edit.drop_storages(edit.storages_of((head.logits, head.logits_grad)))
    # From where they were, these follow the backward's begin.
    backward = edit.behind(head.begin, head.module)
    backward.events += [edit.event(at) for at in head.handed]
    _chunks(backward, head, tokens, Kind.LOSS)
    backward.events += [edit.event(at) for at in head.late]
    edit.drop((*head.handed, *head.late))
    return edit.result()


def _find(edit: TapeEdit) -> _FusedHead | None:
    """Find the linear layer that makes the logits; None where something changes them before the loss."""
    tape, turn = edit.tape, edit.tape.backward
    where = next((at for at in edit.allocations(range(turn)) if tape.kind[at] == Kind.LOGITS), None)
    if where is None or turn == len(tape) or tape.module[where] < 0:
        return None
    module, size = tape.module[where], tape.aux[where]
    layer = tape.modules[module]
    if layer.parent < 0 or layer.type != "Linear" or not leaves_loss_to_function(tape.modules[layer.parent].type):
        return None
    begin, end = (edit.first(hook, module, turn) for hook in (Op.BWD_ENTER, Op.BWD_EXIT))
    if begin is None or end is None:
        return None
    copies = [at for at in edit.allocations(range(where + 1, begin)) if tape.aux[at] >= size]
    param = tape.params[layer.params[0]]
    row = param.shape[0] * param.itemsize
    if len(copies) != 1 or copies[0] < turn or size % row:
        return None
    rows = size // row
    narrow = {tape.arg[at] for at in edit.allocations(range(turn)) if tape.aux[at] in (_WIDE * rows, _INDEX * rows)}
    late = tuple(at for at in edit.frees(range(turn, begin)) if tape.arg[at] in narrow)
    return _FusedHead(module, where, copies[0], begin, row, rows, tuple(edit.allocations(range(begin, end))), late)


def _chunks(write: EventWriter, head: _FusedHead, tokens: int, kind: Kind) -> None:
    """Write a whole chunk, and the last one where it is smaller: those between take the first one's memory."""
    for rows in (min(tokens, head.rows), head.rows % tokens if head.rows > tokens else 0):
        if rows:
            write.free(write.alloc(rows * head.row, kind))
