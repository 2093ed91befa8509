"""The tape of a language model whose head and loss see the labelled tokens alone.

What the head and the loss make is smaller by the labelled share. Beside it stand the picked rows of the hidden states and their
indices; the hidden states themselves end where the head begins, and in the backward the rows' gradient is laid into one of all
tokens. Source: zeroplan_runtime/labelled_tokens.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from zeroplan.core.losses import labelled_tokens, leaves_loss_to_function, scores_each_token
from zeroplan.tape.expanded import ExpandedTape, Kind, Mark, Op, TapeEvent

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
    head = _find(tape, tokens)
    if head is None:
        return tape
    return tape.with_events(_events(tape, head, tokens, labelled_tokens(tokens, share)))


def _find(tape: ExpandedTape, tokens: int) -> _LabelledHead | None:
    """Find the model by its class, and what its base model hands over."""
    models = [
        i for i, module in enumerate(tape.modules) if leaves_loss_to_function(module.type) or scores_each_token(module.type)
    ]
    events = list(tape.events())
    at = {(op, arg): i for i, (op, arg, *_) in enumerate(events) if op in (Op.ENTER, Op.EXIT, Op.BWD_ENTER, Op.MARK)}
    model = models[0] if models else -1
    base = next((i for i, module in enumerate(tape.modules) if module.parent == model and (Op.EXIT, i) in at), -1)
    marks = ((Op.ENTER, model), (Op.EXIT, base), (Op.EXIT, model), (Op.MARK, Mark.BACKWARD_BEGIN), (Op.BWD_ENTER, base))
    if any(mark not in at for mark in marks):
        return None
    start, ready, end, turn, last = (at[mark] for mark in marks)
    forward, backward = range(ready + 1, end), range(turn + 1, last)
    weights = {math.prod(param.shape) * param.itemsize for param in tape.params if len(param.shape) > 1}
    made = {events[i][1]: events[i] for span in (forward, backward) for i in span if events[i][0] == Op.ALLOC}
    resized = {
        storage
        for storage, (_, _, size, kind, _) in made.items()
        if kind != Kind.GRAD and size and size % tokens == 0 and (size not in weights or kind in _OF_TOKENS)
    }
    is_causal = leaves_loss_to_function(tape.modules[model].type)
    shifted = _shifted_labels(events, forward, model, _INDEX * tokens) if is_causal else frozenset()
    resized -= shifted
    freed = {events[i][1] for i in backward if events[i][0] == Op.FREE}
    inside = {events[i][1] for i in range(start, ready) if events[i][0] == Op.ALLOC and events[i][2] % tokens == 0}
    given = [i for i in backward if events[i][0] == Op.ALLOC and events[i][1] in resized - freed]
    if len(given) != 1:
        return None
    storage, size = events[given[0]][1:3]
    return _LabelledHead(
        is_causal,
        start,
        forward,
        backward,
        frozenset(freed & inside),
        (storage, size),
        frozenset(resized - {storage}),
        shifted,
    )


def _shifted_labels(events: list[TapeEvent], forward: range, model: int, size: int) -> frozenset[int]:
    """Return the storages of labels moved by one, `size` bytes, and of the padded ones that they are a part of."""
    made = [events[i] for i in forward if events[i][0] == Op.ALLOC and events[i][4] == model]
    for padded, moved in pairwise(made):
        if moved[2:4] == (size, Kind.SAVED) and padded[3] == Kind.TEMP and padded[2] > size:
            return frozenset((padded[1], moved[1]))
    return frozenset()


def _events(tape: ExpandedTape, head: _LabelledHead, tokens: int, rows: int) -> Iterator[TapeEvent]:
    new = max(arg for op, arg in zip(tape.op, tape.arg, strict=True) if op == Op.ALLOC) + 1
    shifted, indices, picked, states, grad = range(new, new + 5)
    storage, size = head.hidden_grad
    for i, event in enumerate(tape.events()):
        op, arg, aux, kind, module = event
        if i == head.forward.start:
            yield (Op.ALLOC, indices, _INDEX * tokens, Kind.SAVED, -1)
            yield (Op.ALLOC, picked, _INDEX * rows, Kind.SAVED, -1)
            yield (Op.ALLOC, states, size // tokens * rows, Kind.SAVED, -1)
            for one in sorted(head.hidden):
                yield (Op.FREE, one, 0, 0, -1)
        if i == head.forward.stop and head.is_causal:
            yield (Op.FREE, shifted, 0, 0, -1)
        if i == head.backward.stop:
            yield (Op.ALLOC, storage, size, Kind.ACT_GRAD, -1)
            for one in (states, grad, picked, indices):
                yield (Op.FREE, one, 0, 0, -1)
        if (op == Op.FREE and arg in head.hidden and i in head.backward) or (op in (Op.ALLOC, Op.FREE) and arg in head.shifted):
            continue
        if op == Op.ALLOC and arg == storage:
            yield (op, grad, size // tokens * rows, kind, module)
        elif op == Op.ALLOC and arg in head.resized:
            yield (op, arg, aux // tokens * rows, kind, module)
        else:
            yield event
        if i == head.begin and head.is_causal:
            yield (Op.ALLOC, shifted, _INDEX * tokens, Kind.SAVED, -1)
