"""The tape of a language model whose head and loss see the labelled tokens alone.

What the head and the loss make is smaller by the labelled share. Beside it stand the picked rows of the hidden states and their
indices; the hidden states themselves end where the head begins, and in the backward the rows' gradient is laid into one of all
tokens. Source: zeroplan_runtime/techniques/labelled_tokens.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from zeroplan.core.losses import labelled_tokens, leaves_loss_to_function, scores_each_token
from zeroplan.tape.edit import TapeEdit
from zeroplan.tape.expanded import ExpandedTape, Kind, Mark, Op

_INDEX = 8  # bytes of an index
#: Kinds that hold tokens' values where they are as large as a weight, too: hidden states of as many tokens as a layer is wide.
_OF_TOKENS = (Kind.SAVED, Kind.LOGITS, Kind.LOSS, Kind.ACT_GRAD)


@dataclass(frozen=True, slots=True)
class _LabelledHead:
    """What stands behind the base model in a tape.

    Attributes:
        is_causal: labels are shifted into a tensor of their own.
        begin: the event with which the model's forward begins.
        forward: the events from the base model's end to the model's; first and one past the last.
        backward: the events from the backward's begin to the base model's, likewise.
        hidden: storages of hidden states that live for the head alone.
        hidden_grad: storage of the gradient that the head hands back, and its bytes.
        resized: storages that have a row a token.
        shifted: the loss's own shift of the labels, which are shifted before.
    """

    is_causal: bool
    begin: int
    forward: range
    backward: range
    hidden: frozenset[int]
    hidden_grad: tuple[int, int]
    resized: frozenset[int]
    shifted: frozenset[int]


def with_labelled_tokens(tape: ExpandedTape, *, tokens: int, share: float) -> ExpandedTape:
    """`tape` with the head and the loss over `share` of its `tokens`; as it is, where no such head is in it."""
    edit = TapeEdit(tape)
    head = _find(edit, tokens)
    if head is None:
        return tape
    _replace(edit, head, tokens, labelled_tokens(tokens, share))
    return edit.result()


def _find(edit: TapeEdit, tokens: int) -> _LabelledHead | None:
    """Find the model by its class, and what its base model hands over."""
    tape, at = edit.tape, edit.hooks
    models = (i for i, one in enumerate(tape.modules) if leaves_loss_to_function(one.type) or scores_each_token(one.type))
    model = next(models, -1)
    base = next((i for i, module in enumerate(tape.modules) if module.parent == model and (Op.EXIT, i) in at), -1)
    marks = ((Op.ENTER, model), (Op.EXIT, base), (Op.EXIT, model), (Op.MARK, Mark.BACKWARD_BEGIN), (Op.BWD_ENTER, base))
    if any(mark not in at for mark in marks):
        return None
    start, ready, end, turn, last = (at[mark] for mark in marks)
    forward, backward = range(ready + 1, end), range(turn + 1, last)
    is_causal = leaves_loss_to_function(tape.modules[model].type)
    shifted = _shifted_labels(edit, forward, model, _INDEX * tokens) if is_causal else frozenset()
    resized = _of_tokens(edit, (forward, backward), tokens) - shifted
    given = [storage for storage in edit.left_by(backward) if storage in resized]
    if len(given) != 1:
        return None
    freed = edit.storages_of(edit.frees(backward))
    before = edit.allocations(range(start, ready))
    inside = {tape.arg[i] for i in before if tape.aux[i] % tokens == 0}
    return _LabelledHead(
        is_causal,
        start,
        forward,
        backward,
        frozenset(inside.intersection(freed)),
        (given[0], tape.aux[edit.made[given[0]]]),
        frozenset(resized - {given[0]}),
        shifted,
    )


def _of_tokens(edit: TapeEdit, spans: tuple[range, range], tokens: int) -> frozenset[int]:
    """Return the storages made within spans that have a row a token."""
    tape = edit.tape
    weights = {math.prod(param.shape) * param.itemsize for param in tape.params if len(param.shape) > 1}
    whole = (at for at in edit.allocations(*spans) if tape.aux[at] and tape.aux[at] % tokens == 0)
    return frozenset(
        tape.arg[at]
        for at in whole
        if tape.kind[at] != Kind.GRAD and (tape.aux[at] not in weights or tape.kind[at] in _OF_TOKENS)
    )


def _shifted_labels(edit: TapeEdit, forward: range, model: int, size: int) -> frozenset[int]:
    """Return the storages of labels moved by one, `size` bytes, and of the padded ones that they are a part of."""
    made = [edit.event(at) for at in edit.allocations(forward) if edit.tape.module[at] == model]
    for padded, moved in pairwise(made):
        if moved[2:4] == (size, Kind.SAVED) and padded[3] == Kind.TEMP and padded[2] > size:
            return frozenset((padded[1], moved[1]))
    return frozenset()


def _replace(edit: TapeEdit, head: _LabelledHead, tokens: int, rows: int) -> None:
    storage, size = head.hidden_grad
    if head.is_causal:
        shifted = edit.behind(head.begin).alloc(_INDEX * tokens, Kind.SAVED)
    picking = edit.before(head.forward.start)
    indices = picking.alloc(_INDEX * tokens, Kind.SAVED)
    picked = picking.alloc(_INDEX * rows, Kind.SAVED)
    states = picking.alloc(size // tokens * rows, Kind.SAVED)
    picking.free(*sorted(head.hidden))
    if head.is_causal:
        edit.before(head.forward.stop).free(shifted)
    edit.drop_storages(head.shifted)
    edit.drop(at for at in edit.frees(head.backward) if edit.tape.arg[at] in head.hidden)
    for one in head.resized:
        op, arg, aux, kind, module = edit.event(edit.made[one])
        edit.replace(edit.made[one], (op, arg, aux // tokens * rows, kind, module))
    grad = next(edit.storages)
    op, _, _, kind, module = edit.event(edit.made[storage])
    edit.replace(edit.made[storage], (op, grad, size // tokens * rows, kind, module))
    laying = edit.before(head.backward.stop)
    laying.alloc(size, Kind.ACT_GRAD, storage)
    laying.free(states, grad, picked, indices)
