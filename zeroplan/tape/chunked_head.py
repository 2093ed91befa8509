"""The tape of a causal language model whose head and loss TRL computes together, tile by tile, in place of the model's own.

The logits of a tile of tokens and of the vocabulary are there one at a time; the backward makes them again and sums both
gradients in fp32. Every tensor that grows with the vocabulary or the hidden size is in the tape, and one number a token by
and large. Source: TRL 1.16, ``trainer/utils.py`` (``add_fused_lm_head``), ``kernels/chunked_logprob.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeroplan.core.losses import labelled_tokens, leaves_loss_to_function
from zeroplan.tape.edit import EventWriter, TapeEdit
from zeroplan.tape.expanded import ExpandedTape, Kind, Op, TapeModule

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
        complete: the parameter whose gradient that storage is at once, None where the embedding's has to be added.
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
    complete: int | None
    words: int
    width: int
    compute: int
    hidden: int
    weight: int


def with_chunked_head(tape: ExpandedTape, *, batch: int, seq_len: int, share: float | None = None) -> ExpandedTape:
    """Return `tape` with TRL's head over `batch` samples of `seq_len` tokens, or as it is where it has no head of that kind.

    The head sees the tokens whose next one has a label: a `share` of all, or all.
    """
    edit = TapeEdit(tape)
    head = _find(edit, batch * seq_len)
    if head is None:
        return tape
    _replace(edit, head, _scored(batch, seq_len, share), batch * seq_len)
    return edit.result()


def _scored(batch: int, seq_len: int, share: float | None) -> int:
    before_another = batch * (seq_len - 1)
    return before_another if share is None else min(before_another, labelled_tokens(batch * seq_len, share))


def chunked_head_of(modules: Sequence[TapeModule]) -> int:
    """Return the index of the linear layer whose weight TRL's head multiplies with; -1 for a model of another kind."""
    owned = (
        index
        for index, one in enumerate(modules)
        if one.type == "Linear" and (model := _model_of(modules, index)) >= 0 and leaves_loss_to_function(modules[model].type)
    )
    return next(owned, -1)


def _model_of(modules: Sequence[TapeModule], head: int) -> int:
    """Return the module that a head is part of, beyond what peft puts around one that is trained whole; -1 for none."""
    outer = modules[head].parent
    while outer >= 0 and modules[outer].type in ("ModuleDict", "ModulesToSaveWrapper"):
        outer = modules[outer].parent
    return outer


def with_chunked_forward(tape: ExpandedTape, *, batch: int, seq_len: int, share: float | None = None) -> ExpandedTape:
    """As :func:`with_chunked_head`, for the tape of a forward without gradients, where nothing waits for a backward."""
    found = logits_of(tape)
    if found is None:
        return tape
    edit = TapeEdit(tape)
    where, module, model = found
    begin, end = (edit.hooks.get(hook, -1) for hook in ((Op.ENTER, module), (Op.EXIT, model)))
    param = tape.params[tape.modules[module].params[0]]
    if not -1 < begin < where < end or len(param.shape) != 2:
        return tape
    words, width = param.shape
    span = range(begin, end)
    compute = tape.aux[where] // (batch * seq_len * words)
    head = _Head(module, span, range(end, end), -1, None, None, words, width, compute, param.itemsize, param.itemsize)
    made = edit.storages_of(edit.allocations(span))
    outer = [storage for storage in edit.storages_of(edit.frees(span)) if storage not in made]
    edit.drop(span)
    edit.drop_frees(made)
    write = edit.before(begin, module)
    write.free(*_forward(write, head, _scored(batch, seq_len, share)), *outer)
    return edit.result()


def logits_of(tape: ExpandedTape) -> tuple[int, int, int] | None:
    """Return the event that makes the logits, the head's index and the model's; None for a loss of its own."""
    where = next((i for i, pair in enumerate(zip(tape.op, tape.kind, strict=True)) if pair == (Op.ALLOC, Kind.LOGITS)), None)
    if where is None or (module := tape.module[where]) < 0:
        return None
    head, model = tape.modules[module], _model_of(tape.modules, module)
    if len(head.params) != 1 or model < 0 or not leaves_loss_to_function(tape.modules[model].type):
        return None
    return where, module, model


def _find(edit: TapeEdit, tokens: int) -> _Head | None:
    """Find the linear layer that makes the logits, and what stands around it; None where something there is not expected."""
    tape, found = edit.tape, logits_of(edit.tape)
    if found is None:
        return None
    where, module, model = found
    marks = ((Op.ENTER, module), (Op.EXIT, model), (Op.BWD_ENTER, model), (Op.BWD_EXIT, module))
    if any(mark not in edit.hooks for mark in marks):
        return None
    begin, end, after, last = (edit.hooks[mark] for mark in marks)
    param = tape.params[tape.modules[module].params[0]]
    if not begin < where < end < after < last or len(param.shape) != 2:
        return None
    words, width = param.shape
    backward = range(after + 1, last + 1)
    left = edit.left_by(backward)
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
        complete=next((tape.arg[at] for at in edit.gradients if at in backward), None),
        words=words,
        width=width,
        compute=tape.aux[where] // (tokens * words),
        hidden=left[hidden[0]] // (tokens * width),
        weight=param.itemsize,
    )


def _replace(edit: TapeEdit, head: _Head, rows: int, tokens: int) -> None:
    spans = head.forward, head.backward
    made = edit.storages_of(edit.allocations(*spans))
    outer = [storage for storage in edit.storages_of(edit.frees(*spans)) if storage not in made]
    handed = [storage for storage in (head.hidden_grad, head.weight_grad) if storage is not None]
    total = _sum_of_tied(edit, head)
    if total is not None and head.weight_grad is not None:
        edit.drop((edit.made[total],))
        edit.drop_frees((head.weight_grad,))
        for at in edit.gradients:
            op, arg, storage, kind, module = edit.event(at)
            if storage == total:
                edit.replace(at, (op, arg, head.weight_grad, kind, module))
    edit.drop_storages([storage for storage in made if storage not in handed])
    edit.drop((*head.forward, *head.backward))
    forward = edit.before(head.forward.start, head.module)
    saved = _forward(forward, head, rows)
    forward.free(*outer)  # the hidden states themselves: the picked rows are kept
    _backward(edit.before(head.backward.start, head.module), head, rows, tokens, saved)


def _sum_of_tied(edit: TapeEdit, head: _Head) -> int | None:
    """Return the storage in which autograd adds up the gradients of a weight that the embedding shares; None without one.

    The gradient of the model's own head is a transposed view, so autograd adds out of place. TRL's is a tensor that nothing
    else holds: the embedding's is added to it in place, and no third one is made.
    Source: torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace
    """
    if head.weight_grad is None:
        return None
    weight = edit.tape.modules[head.module].params[0]
    grads = (edit.tape.aux[at] for at in edit.gradients if edit.tape.arg[at] == weight)
    total = next(grads, head.weight_grad)
    return None if total == head.weight_grad else total


def _forward(write: EventWriter, head: _Head, rows: int) -> list[int]:
    """Write the forward; return what it keeps for the backward."""
    mask = write.alloc(rows, Kind.SAVED)
    write.free(write.alloc(2 * _INDEX * rows))
    picked = write.alloc(rows * head.width * head.hidden, Kind.SAVED)
    write.free(write.alloc(2 * _INDEX * rows))
    labels = write.alloc(_INDEX * rows, Kind.SAVED)
    write.add(Op.ENTER, head.module)
    sums = [write.alloc(_WIDE * rows) for _ in range(_SUMS)]
    tile = write.alloc(min(rows, _TOKENS) * _WORDS * head.compute)
    states = _cast(write, head.compute != head.hidden, min(rows, _TOKENS) * head.width * head.compute, rows > _TOKENS)
    write.free(*_cast(write, head.compute != head.weight, min(head.words, _WORDS) * head.width * head.compute, False))
    kept = [write.alloc(_WIDE * rows, Kind.SAVED) for _ in range(_LEFT)]
    write.free(*sums, tile, *states)
    write.add(Op.EXIT, head.module)
    return [mask, picked, labels, *kept]


def _backward(write: EventWriter, head: _Head, rows: int, tokens: int, saved: list[int]) -> None:
    """Write the backward, which hands back the gradients of the hidden states and of the weight."""
    size, matrix = rows * head.width, head.words * head.width
    write.add(Op.BWD_ENTER, head.module)
    # A sum that is as wide as what is handed back is itself handed back.
    grad = write.alloc(size * _WIDE, Kind.ACT_GRAD)
    wide = [] if head.hidden == _WIDE else [grad]
    if head.weight_grad is not None:
        if head.weight == _WIDE:
            write.alloc(matrix * _WIDE, Kind.GRAD, head.weight_grad)
        else:
            wide.append(write.alloc(matrix * _WIDE, Kind.ACT_GRAD))
    tile = write.alloc(min(rows, _TOKENS) * _WORDS * head.compute)
    states = _cast(write, head.compute != head.hidden, min(rows, _TOKENS) * head.width * head.compute, rows > _TOKENS)
    several = head.words > _WORDS
    parts = _cast(write, head.compute != head.weight, min(head.words, _WORDS) * head.width * head.compute, several)
    if head.hidden != _WIDE:
        grad = write.alloc(size * head.hidden, Kind.ACT_GRAD)
    if head.weight_grad is not None and head.weight != _WIDE:
        write.alloc(matrix * head.weight, Kind.GRAD, head.weight_grad)
    write.free(tile, *states, *parts, *wide, *saved)
    if head.complete is not None and head.weight_grad is not None:
        write.add(Op.GRAD, head.complete, head.weight_grad)  # autograd hands a leaf's gradient over before all else
    rows_grad = write.alloc(size * head.hidden, Kind.ACT_GRAD)
    write.free(write.alloc(_SORTED * _INDEX * rows), grad)
    write.alloc(tokens * head.width * head.hidden, Kind.ACT_GRAD, head.hidden_grad)
    write.free(rows_grad)
    write.add(Op.BWD_EXIT, head.module)


def _cast(write: EventWriter, needed: bool, size: int, again: bool) -> list[int]:
    """Copies in the product's dtype that are alive at once: a name still holds the last one while the next is made."""
    return [write.alloc(size) for _ in range(1 + int(again))] if needed else []
