"""The tape of a causal language model whose head and loss TRL computes together, tile by tile, in place of the model's own.

The logits of a tile of tokens and of the vocabulary are there one at a time; the backward makes them again and sums both
gradients in fp32. Every tensor that grows with the vocabulary or the hidden size is in the tape, and one number a token by
and large. Source: TRL 1.16, ``trainer/utils.py`` (``add_fused_lm_head``), ``kernels/chunked_logprob.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from zeroplan.core.losses import labelled_tokens, leaves_loss_to_function
from zeroplan.tape.event_writer import EventWriter
from zeroplan.tape.expanded import ExpandedTape, Kind, Op, TapeEvent, TapeModule

#: Tokens and words of one tile.
_TOKENS, _WORDS = 4096, 32_768
_WIDE, _INDEX = 4, 8  # bytes of an fp32 number and of an index
#: fp32 numbers a token that the forward sums in; of those that it leaves, the first two wait for the backward.
_SUMS, _LEFT = 7, 5
#: Words a token in the sort by which the gradient of the picked rows is put back: the rows' indices and two pairs to sort.
_SORTED = 6


@dataclass(frozen=True, slots=True)
class _Head:
    """The head's part of a tape.

    Attributes:
        module: the head's index.
        forward: the events from its forward to the end of the model's, which are replaced; first and one past the last.
        backward: likewise in the backward.
        hidden_grad: storage of the gradient that the head hands back.
        weight_grad: storage of its weight's gradient, None where that is frozen.
        words: of the vocabulary.
        width: of the hidden states.
        compute: bytes of a factor of its product.
        hidden: bytes of an element of the hidden states.
        weight: bytes of an element of the weight.
    """

    module: int
    forward: range
    backward: range
    hidden_grad: int
    weight_grad: int | None
    words: int
    width: int
    compute: int
    hidden: int
    weight: int


def with_chunked_head(tape: ExpandedTape, *, batch: int, seq_len: int, share: float | None = None) -> ExpandedTape:
    """Return `tape` with TRL's head over `batch` samples of `seq_len` tokens, or as it is where it has no head of that kind.

    The head sees the tokens whose next one has a label: a `share` of all, or all.
    """
    head = _find(tape, batch * seq_len)
    if head is None:
        return tape
    return tape.with_events(_events(tape, head, _scored(batch, seq_len, share), batch * seq_len))


def _scored(batch: int, seq_len: int, share: float | None) -> int:
    before_another = batch * (seq_len - 1)
    return before_another if share is None else min(before_another, labelled_tokens(batch * seq_len, share))


def chunked_head_of(modules: Sequence[TapeModule]) -> int:
    """Return the index of the linear layer whose weight TRL's head multiplies with; -1 for a model of another kind."""
    owned = (
        index
        for index, one in enumerate(modules)
        if one.parent >= 0 and one.type == "Linear" and leaves_loss_to_function(modules[one.parent].type)
    )
    return next(owned, -1)


def with_chunked_forward(tape: ExpandedTape, *, batch: int, seq_len: int, share: float | None = None) -> ExpandedTape:
    """As :func:`with_chunked_head`, for the tape of a forward without gradients, where nothing waits for a backward."""
    found = _logits(tape)
    if found is None:
        return tape
    where, module, model = found
    at = {(op, arg): i for i, (op, arg) in enumerate(zip(tape.op, tape.arg, strict=True)) if op in _HOOKS}
    begin, end = at.get((Op.ENTER, module), -1), at.get((Op.EXIT, model), -1)
    param = tape.params[tape.modules[module].params[0]]
    if not -1 < begin < where < end or len(param.shape) != 2:
        return tape
    words, width = param.shape
    span = range(begin, end)
    compute = tape.aux[where] // (batch * seq_len * words)
    head = _Head(module, span, range(end, end), -1, None, words, width, compute, hidden=param.itemsize, weight=param.itemsize)
    dropped = {tape.arg[i] for i in span if tape.op[i] == Op.ALLOC}
    outer = [tape.arg[i] for i in span if tape.op[i] == Op.FREE and tape.arg[i] not in dropped]
    write = EventWriter(max(arg for op, arg in zip(tape.op, tape.arg, strict=True) if op == Op.ALLOC), module)
    write.free(*_forward(write, head, _scored(batch, seq_len, share)), *outer)
    replaced = write.taken()
    gone = {(Op.FREE, one) for one in dropped}
    kept = [event for i, event in enumerate(tape.events()) if i >= end and event[:2] not in gone]
    return tape.with_events((*islice(tape.events(), begin), *replaced, *kept))


def _logits(tape: ExpandedTape) -> tuple[int, int, int] | None:
    """Return the event that makes the logits, the head's index and the model's; None where TRL keeps the model's own head."""
    where = next((i for i, (op, kind) in enumerate(zip(tape.op, tape.kind, strict=True)) if (op, kind) == _LOGITS), None)
    if where is None or (module := tape.module[where]) < 0:
        return None
    head, model = tape.modules[module], tape.modules[module].parent
    if len(head.params) != 1 or model < 0 or not leaves_loss_to_function(tape.modules[model].type):
        return None
    return where, module, model


def _find(tape: ExpandedTape, tokens: int) -> _Head | None:
    """Find the linear layer that makes the logits, and what stands around it; None where something there is not expected."""
    found = _logits(tape)
    if found is None:
        return None
    where, module, model = found
    head = tape.modules[module]
    at = {(op, arg): i for i, (op, arg) in enumerate(zip(tape.op, tape.arg, strict=True)) if op in _HOOKS}
    marks = ((Op.ENTER, module), (Op.EXIT, model), (Op.BWD_ENTER, model), (Op.BWD_EXIT, module))
    if any(mark not in at for mark in marks):
        return None
    begin, end, after, last = (at[mark] for mark in marks)
    backward = range(after + 1, last + 1)
    param = tape.params[head.params[0]]
    if not begin < where < end < after < last or len(param.shape) != 2:
        return None
    words, width = param.shape
    left = dict(_left(tape, backward))
    weights = [storage for storage, size in left.items() if size == words * width * param.itemsize and param.trainable]
    hidden = [storage for storage, size in left.items() if size in (2 * tokens * width, 4 * tokens * width)]
    hidden = [storage for storage in hidden if storage not in weights[:1]]
    if len(hidden) != 1 or len(left) != len(weights[:1]) + 1 or len(weights) != int(param.trainable):
        return None
    return _Head(
        module=module,
        forward=range(begin, end),
        backward=backward,
        hidden_grad=hidden[0],
        weight_grad=weights[0] if weights else None,
        words=words,
        width=width,
        compute=tape.aux[where] // (tokens * words),
        hidden=left[hidden[0]] // (tokens * width),
        weight=param.itemsize,
    )


_LOGITS = (int(Op.ALLOC), int(Kind.LOGITS))
_HOOKS = (Op.ENTER, Op.EXIT, Op.BWD_ENTER, Op.BWD_EXIT)


def _left(tape: ExpandedTape, span: range) -> Iterator[tuple[int, int]]:
    """Yield the storages that the events of a span allocate and leave, with their bytes."""
    freed = {tape.arg[i] for i in span if tape.op[i] == Op.FREE}
    for i in span:
        if tape.op[i] == Op.ALLOC and tape.arg[i] not in freed:
            yield tape.arg[i], tape.aux[i]


def _events(tape: ExpandedTape, head: _Head, rows: int, tokens: int) -> Iterator[TapeEvent]:
    dropped = {tape.arg[i] for span in (head.forward, head.backward) for i in span if tape.op[i] == Op.ALLOC}
    handed = {head.hidden_grad, head.weight_grad}
    spans = (*head.forward, *head.backward)
    outer = [tape.arg[i] for i in spans if tape.op[i] == Op.FREE and tape.arg[i] not in dropped]
    write = EventWriter(max(arg for op, arg in zip(tape.op, tape.arg, strict=True) if op == Op.ALLOC), head.module)
    saved: list[int] = []
    total = _sum_of_tied(tape, head)
    for i, event in enumerate(tape.events()):
        if i == head.forward.start:
            saved = _forward(write, head, rows)
            write.free(*outer)  # the hidden states themselves: the picked rows are kept
            yield from write.taken()
        elif i == head.backward.start:
            _backward(write, head, rows, tokens, saved)
            yield from write.taken()
        if i in head.forward or i in head.backward:
            continue
        if total is not None and event[0] in (Op.ALLOC, Op.FREE, Op.GRAD):
            if event[:2] in ((Op.ALLOC, total), (Op.FREE, head.weight_grad)):
                continue
            if event[0] == Op.GRAD and event[2] == total:
                event = (Op.GRAD, event[1], head.weight_grad or 0, *event[3:])
        if event[0] in (Op.ALLOC, Op.FREE) and event[1] in dropped - handed:
            continue
        yield event


def _sum_of_tied(tape: ExpandedTape, head: _Head) -> int | None:
    """Return the storage in which autograd adds up the gradients of a weight that the embedding shares; None without one.

    The gradient of the model's own head is a transposed view, so autograd adds out of place. TRL's is a tensor that nothing
    else holds: the embedding's is added to it in place, and no third one is made.
    Source: torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace
    """
    if head.weight_grad is None:
        return None
    weight = tape.modules[head.module].params[0]
    grads = (aux for op, arg, aux in zip(tape.op, tape.arg, tape.aux, strict=True) if op == Op.GRAD and arg == weight)
    total = next(grads, head.weight_grad)
    return None if total == head.weight_grad else total


def _forward(write: EventWriter, head: _Head, rows: int) -> list[int]:
    """Write the forward; return what it keeps for the backward."""
    mask = write.alloc(rows, Kind.SAVED)
    write.free(write.alloc(2 * _INDEX * rows))
    picked = write.alloc(rows * head.width * head.hidden, Kind.SAVED)
    write.free(write.alloc(2 * _INDEX * rows))
    labels = write.alloc(_INDEX * rows, Kind.SAVED)
    write.events.append((Op.ENTER, head.module, 0, 0, -1))
    sums = [write.alloc(_WIDE * rows) for _ in range(_SUMS)]
    tile = write.alloc(min(rows, _TOKENS) * _WORDS * head.compute)
    states = _cast(write, head.compute != head.hidden, min(rows, _TOKENS) * head.width * head.compute, rows > _TOKENS)
    write.free(*_cast(write, head.compute != head.weight, min(head.words, _WORDS) * head.width * head.compute, False))
    kept = [write.alloc(_WIDE * rows, Kind.SAVED) for _ in range(_LEFT)]
    write.free(*sums, tile, *states)
    write.events.append((Op.EXIT, head.module, 0, 0, -1))
    return [mask, picked, labels, *kept]


def _backward(write: EventWriter, head: _Head, rows: int, tokens: int, saved: list[int]) -> None:
    """Write the backward, which hands back the gradients of the hidden states and of the weight."""
    size, matrix = rows * head.width, head.words * head.width
    write.events.append((Op.BWD_ENTER, head.module, 0, 0, -1))
    wide = [write.alloc(size * _WIDE, Kind.ACT_GRAD)]
    if head.weight_grad is not None:
        wide.append(write.alloc(matrix * _WIDE, Kind.ACT_GRAD))
    tile = write.alloc(min(rows, _TOKENS) * _WORDS * head.compute)
    states = _cast(write, head.compute != head.hidden, min(rows, _TOKENS) * head.width * head.compute, rows > _TOKENS)
    several = head.words > _WORDS
    parts = _cast(write, head.compute != head.weight, min(head.words, _WORDS) * head.width * head.compute, several)
    grad = write.alloc(size * head.hidden, Kind.ACT_GRAD) if head.hidden != _WIDE else wide.pop(0)
    if head.weight_grad is not None:
        if head.weight == _WIDE:
            # The sum itself is the gradient: the storage that the rest of the tape knows takes its place.
            place = next(i for i, event in enumerate(write.events) if event[:2] == (Op.ALLOC, wide[-1]))
            write.events[place] = (Op.ALLOC, head.weight_grad, matrix * _WIDE, Kind.GRAD, head.module)
            wide.pop()
        else:
            write.events.append((Op.ALLOC, head.weight_grad, matrix * head.weight, Kind.GRAD, head.module))
    write.free(tile, *states, *parts, *wide, *saved)
    rows_grad = write.alloc(size * head.hidden, Kind.ACT_GRAD)
    write.free(write.alloc(_SORTED * _INDEX * rows), grad)
    write.events.append((Op.ALLOC, head.hidden_grad, tokens * head.width * head.hidden, Kind.ACT_GRAD, head.module))
    write.free(rows_grad)
    write.events.append((Op.BWD_EXIT, head.module, 0, 0, -1))


def _cast(write: EventWriter, needed: bool, size: int, again: bool) -> list[int]:
    """Copies in the product's dtype that are alive at once: a name still holds the last one while the next is made."""
    return [write.alloc(size) for _ in range(1 + int(again))] if needed else []
