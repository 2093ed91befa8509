"""The ends of a Megatron-Core model: the gradient of its embedding, and its loss over a vocabulary that ranks share.

Sources: Megatron-Core 0.16.1, ``megatron/core/tensor_parallel/layers.py`` (``VocabParallelEmbedding``), ``cross_entropy.py``,
``megatron/core/fusions``.
"""

from __future__ import annotations

from zeroplan.engines.megatron.autograd import Gradients, Storage, TapeWriter, Value
from zeroplan.engines.megatron.operators import Saved
from zeroplan.tape.expanded import Kind
from zeroplan.tape.sizes import FUNCTIONS


def embedding_gradient(w: TapeWriter, count: int, rows: int, width: int, nbytes: int) -> Storage:
    """Return the gradient of a table of so many rows, looked up `count` times: more than 3,072 words are sorted first.

    Source: torch, aten/src/ATen/native/cuda/Embedding.cu, EmbeddingBackwardKernel.cu
    """

    def size(name: str, *given: int) -> int:
        return FUNCTIONS[name](None, count, *given)

    if not size("sort_index"):
        return w.empty(nbytes, Kind.GRAD)
    held = [w.empty(size("sort_index")) for _ in range(2)]  # the sorted words, and where they came from
    scratch = [w.empty(size("sort_index")), w.empty(size("sort_scratch"))]
    scratch.clear()
    out = w.empty(nbytes, Kind.GRAD)
    held += [w.empty(size("sort_index")), w.empty(size("sort_number"))]  # segments of one word, and their number
    scratch += [w.empty(size("sort_index")), w.empty(size("sort_scan"))]
    scratch.clear()
    held += [w.empty(size("embedding_index", rows)) for _ in range(2)]  # parts of each segment, and where they begin
    w.empty(size("sort_scan"))
    held += [w.empty(size("sort_number")), w.empty(size("embedding_partial_index", rows))]
    held.append(w.empty(size("embedding_partial_grad", rows, width)))
    return out


_FP32, _INT64 = 4, 8


def cross_entropy(w: TapeWriter, logits: Value, tokens: int, *, fused: bool, in_place: bool) -> Value:
    """The loss of each token over logits that the ranks share.

    Megatron's own keeps their softmax in fp32, which is also their gradient before it is cast; or compiled (``fused``).
    TransformerEngine's (``in_place``) writes the gradient over the logits in the forward.
    Source: megatron/core/tensor_parallel/cross_entropy.py, megatron/core/fusions/fused_cross_entropy.py; TransformerEngine,
    pytorch/triton/cross_entropy.py.
    """
    size, element = logits.nbytes, 2
    wide = size // element * _FP32
    row = tokens * _FP32
    if in_place:
        return w.apply([logits], [w.empty(row, Kind.LOSS)], [logits.storage], lambda saved, g: [saved[0]])[0]
    if fused:
        return _compiled_cross_entropy(w, logits, tokens)
    softmax = w.empty(wide, Kind.LOGITS)
    largest = w.empty(row)
    w.empty(tokens * _INT64)
    mask, indices, predicted = _targets(w, tokens)
    total = w.empty(row)
    logs = w.empty(row)
    loss = w.empty(row, Kind.LOSS)
    del logs, largest, predicted, total

    def backward(saved: Saved, g: Gradients) -> Gradients:
        numbers = w.empty(tokens * _INT64)
        flags = w.empty(row)
        update = w.empty(row)
        del flags
        w.empty(row)
        del numbers, update
        return [saved[0]]

    whole = w.apply([logits], [logits.storage], [], w.fresh(size))[0]
    return w.apply([whole], [loss], [softmax, mask, indices], backward)[0]


def _compiled_cross_entropy(w: TapeWriter, logits: Value, tokens: int) -> Value:
    """The loss by four compiled functions. What they write over their input, the exponentials and the gradient, the compiler
    computes into a tensor of its own first, which goes at the function's end.
    """
    size, row, pair = logits.nbytes, tokens * _FP32, 2 * tokens * _FP32
    wide = size // 2 * _FP32
    softmax = w.empty(wide, Kind.LOGITS)
    largest = w.empty(row)
    mask, indices = w.empty(tokens), w.empty(tokens * _INT64)
    predicted, total = w.empty(row), w.empty(row)
    both = w.empty(pair)  # one after the other, for one collective
    del predicted, total
    w.empty(wide)  # the exponentials
    loss = w.empty(row, Kind.LOSS)
    del largest, both

    def backward(saved: Saved, g: Gradients) -> Gradients:
        exact = w.empty(wide)
        made = w.empty(size)
        del exact
        return [made]

    return w.apply([logits], [loss], [softmax, mask, indices], backward)[0]


def _targets(w: TapeWriter, tokens: int) -> tuple[Storage, Storage, Storage]:
    """Return which words are other ranks', their places among this rank's, and the logits there."""
    below, above = w.empty(tokens), w.empty(tokens)
    mask = w.empty(tokens)
    del below, above
    cloned = w.empty(tokens * _INT64)
    indices = w.empty(tokens * _INT64)
    del cloned
    w.empty(_INT64)
    numbers = w.empty(tokens * _INT64)
    chosen = w.empty(tokens * _FP32)
    predicted = w.empty(tokens * _FP32)
    del chosen
    w.empty(_FP32)
    del numbers
    return mask, indices, predicted


def mean_loss(w: TapeWriter, loss: Value, tokens: int, mask: Storage) -> Value:
    """The masked sum of the tokens' losses. Source: pretrain_gpt.py, loss_func"""
    row = tokens * _FP32

    masked = w.apply([loss], [w.empty(row)], [mask], w.fresh(row))[0]
    return w.apply([masked], [w.empty(_FP32, Kind.LOSS)], [], lambda saved, g: g[:])[0]
