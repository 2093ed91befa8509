"""The operators of Megatron-Core's layers: what each allocates, saves and makes in the backward, in bytes.

Sources: Megatron-Core 0.16.1, ``megatron/core/tensor_parallel/layers.py`` (``LinearWithGradAccumulationAndAsyncCommunication``,
``RowParallelLinear``), ``mappings.py``, ``random.py``
(``CheckpointFunction``), ``megatron/core/fusions``; TransformerEngine of 22 August 2026,
``pytorch/module/layernorm_linear.py``, ``linear.py``, ``pytorch/attention``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zeroplan.engines.megatron.autograd import Gradients, Storage, TapeWriter, Value
from zeroplan.engines.megatron.float8 import QuantizedOperands
from zeroplan.tape.expanded import Kind

Saved = tuple[Storage, ...]

#: The buffer that Megatron's own layers share for what they gather, and attention for its scores (``GlobalMemoryBuffer``).
SHARED = ("shared", ())


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm's sizes.

    Attributes:
        weight: bytes of its weight.
        biased: whether it is a LayerNorm, which has a bias and keeps a mean; else an RMSNorm.
        stats: bytes of one fp32 number for each row.
    """

    weight: int
    biased: bool
    stats: int


@dataclass(frozen=True, slots=True)
class Linear:
    """A parallel linear layer's sizes on one rank.

    Attributes:
        shape: of its weight.
        output: bytes of its product.
        bias: bytes of its bias; 0 for none.
        adds_bias: whether it adds the bias itself; else the caller does (``skip_bias_add``).
        gathers: bytes of its input gathered from the tensor-parallel ranks (column-wise, with sequence parallelism), or 0.
        scatters: bytes of its output's part (row-wise, with sequence parallelism); 0 for none.
        fused: whether the weight's gradient is added to the gradient buffer by the product itself.
        engine: whether it is TransformerEngine's; else Megatron's own.
        keeps: whether its stand-in for a fused gradient is TransformerEngine's, which has one for each shape and keeps it.
        element: bytes of one element.
        eight: how its operands are quantised to 8 bits; None for products of 16 bits.
        original: whether it keeps its input as it came, and quantises it once more in the backward.
    """

    shape: tuple[int, int]
    output: int
    bias: int = 0
    adds_bias: bool = False
    gathers: int = 0
    scatters: int = 0
    fused: bool = True
    engine: bool = True
    keeps: bool = True
    element: int = 2
    eight: QuantizedOperands | None = None
    original: bool = False

    @property
    def weight(self) -> int:
        """Bytes of its weight."""
        return self.shape[0] * self.shape[1] * self.element


def contiguous(w: TapeWriter, x: Value) -> Value:
    """Copy a tensor; its gradient is the copy's."""
    return w.apply([x], [w.empty(x.nbytes)], [], lambda saved, g: g[:])[0]


def pointwise(w: TapeWriter, x: Value) -> Value:
    """Compute a tensor of the same size, whose backward needs nothing and makes a new gradient."""
    size = x.nbytes

    return w.apply([x], [w.empty(size)], [], w.fresh(size))[0]


def split(w: TapeWriter, x: Value, sizes: Sequence[int]) -> list[Value]:
    """Split a tensor into views of so many bytes; gradients that are not views of one tensor are joined in a new one."""
    size = x.nbytes

    def backward(saved: Saved, g: Gradients) -> Gradients:
        together = all(one is g[0] for one in g)
        return [g[0] if together else w.empty(size)]

    return w.apply([x], [x.storage] * len(sizes), [], backward, sizes)


def repeat(w: TapeWriter, x: Value, nbytes: int) -> Value:
    """Repeat heads (``repeat_interleave``); the gradient is summed over the repetitions."""
    return w.apply([x], [w.empty(nbytes)], [], w.fresh(x.nbytes))[0]


def scatter(w: TapeWriter, x: Value, nbytes: int) -> Value:
    """Reduce-scatter over tokens; the gradient is gathered."""
    return w.apply([x], [w.empty(nbytes, Kind.COMM)], [], w.fresh(x.nbytes, kind=Kind.COMM))[0]


def share_tokens(w: TapeWriter, x: Value, nbytes: int) -> Value:
    """Take this rank's tokens, a view; the gradient is gathered."""
    return w.apply([x], [x.storage], [], w.fresh(x.nbytes, kind=Kind.COMM), (nbytes,))[0]


def normalize(w: TapeWriter, x: Value, norm: Norm) -> Value:
    """A norm that keeps its input, and for each row its scale (a LayerNorm its mean, too), in fp32."""
    out = w.empty(x.nbytes)
    stats = [w.empty(norm.stats) for _ in range(1 + norm.biased)]
    size = x.nbytes

    def backward(saved: Saved, g: Gradients) -> Gradients:
        made = [w.empty(size)]
        grads = [w.empty(norm.weight, Kind.GRAD) for _ in range(1 + norm.biased)]
        return [*made, *grads]

    return w.apply([x], [out], [x.storage, *stats], backward)[0]


#: The attribute that stands for autograd's buffer of a matrix' gradient that waits for the one of its other use.
WAITING = ("waiting", 0)


def column_linear(w: TapeWriter, x: Value, sizes: Linear, kind: Kind | None = None, *, waits: bool = False) -> Value:
    """A column-wise linear layer. Its input is saved as it is, and gathered again for the weight's gradient. `kind` is that of
    its output. `waits`: the embedding has the same matrix, so that its gradient waits for the embedding's.
    """
    out, kept = _multiplied(w, sizes, x.nbytes, kind)
    size = x.nbytes

    def backward(saved: Saved, g: Gradients) -> Gradients:
        made = _linear_backward(w, sizes, size)
        if waits:
            w.attributes[WAITING] = [one for one in made[1:2] if one is not None]
        return made

    return w.apply([x], [out], kept or [x.storage], backward)[0]


def _multiplied(
    w: TapeWriter, sizes: Linear, size: int, kind: Kind | None = None, *, source: list[Storage] | None = None
) -> tuple[Storage, list[Storage]]:
    """Return the product of an input of `size` bytes, and what is kept of the input in 8 bits; nothing where it is kept itself.

    `source` holds what is quantised and goes then.
    """
    eight = sizes.eight
    if eight is None:
        return _product(w, sizes, kind), []
    gathers = bool(sizes.gathers) and not eight.blocks  # again in the backward, which takes rows
    rows, columns = eight.make(w, size // sizes.element, columns=w.recording and not gathers and not sizes.original)
    if source is not None:
        source.clear()
    out = _product(w, sizes, kind)
    return out, [] if sizes.original else [rows if columns is None else columns]


def _product(w: TapeWriter, sizes: Linear, kind: Kind | None = None) -> Storage:
    """Gather, multiply, and add the bias: TransformerEngine in the product, Megatron's own layer in a new tensor."""
    gathered = _gather(w, sizes)
    out = w.empty(sizes.output, kind)
    del gathered
    if sizes.bias and sizes.adds_bias and not sizes.engine:
        out = w.empty(sizes.output)
    return out


def _gather(w: TapeWriter, sizes: Linear) -> Storage | None:
    """Gather the input: TransformerEngine into a new tensor, Megatron's own layers into one that they all share."""
    if sizes.gathers and sizes.engine:
        return w.empty(sizes.gathers if sizes.eight is None else sizes.eight.size(sizes.gathers // sizes.element), Kind.COMM)
    w.keep(SHARED, sizes.gathers)
    return None


def _linear_backward(w: TapeWriter, sizes: Linear, size: int) -> Gradients:
    """Return the gradients of the input, of the weight and of the bias."""
    narrow = _quantized_backward(w, sizes, size)
    gathered = _gather(w, sizes)
    made = w.empty(sizes.gathers or size)
    part = w.empty(size, Kind.COMM) if sizes.gathers else made
    grads: Gradients = []
    if not sizes.fused:
        grads.append(w.empty(sizes.weight, Kind.GRAD))
    elif sizes.keeps:
        w.keep(("stand-in", sizes.shape), sizes.weight)  # for each shape one, so that DDP's hook runs in the same thread
    else:
        grads.append(w.empty(sizes.weight, Kind.GRAD))  # a stand-in as well, but made anew
    del gathered, made, narrow
    if sizes.bias and sizes.adds_bias:
        grads.append(w.empty(sizes.bias, Kind.GRAD))
    return [part, *grads]


def _quantized_backward(w: TapeWriter, sizes: Linear, size: int) -> list[Storage | None]:
    """Return the output's gradient in 8 bits, by rows for the input's and by columns for the weight's, and what of the input is
    made once more: all of it, or the columns of what is gathered.
    """
    eight = sizes.eight
    if eight is None:
        return []
    held = [*eight.make(w, sizes.output // sizes.element)]
    if sizes.original:
        held += eight.make(w, size // sizes.element)
    elif sizes.gathers and not eight.blocks and eight.transposes:
        held.append(w.empty(eight.size(sizes.gathers // sizes.element)))
    return held


def grouped_linear(w: TapeWriter, x: Value, sizes: Linear, experts: int) -> Value:
    """Products of the rows of so many experts with their matrices, by one kernel; `sizes` has the shape of one matrix."""
    size = x.nbytes

    def backward(saved: Saved, g: Gradients) -> Gradients:
        first, *grads = _linear_backward(w, sizes, size)
        for _ in range(experts - 1):
            grads += [] if sizes.keeps and sizes.fused else [w.empty(sizes.weight, Kind.GRAD)]
        return [first, *grads]

    out, kept = _multiplied(w, sizes, size)
    return w.apply([x], [out], kept or [x.storage], backward)[0]


def norm_linear(w: TapeWriter, x: Value, norm: Norm, sizes: Linear) -> Value:
    """TransformerEngine's ``LayerNormLinear``: the norm's input and output are saved, the output not gathered."""
    eight = sizes.eight
    normed = [] if eight is not None and eight.normalizes else [w.empty(x.nbytes)]
    stats = [w.empty(norm.stats) for _ in range(1 + norm.biased)]
    out, kept = _multiplied(w, sizes, x.nbytes, source=None if eight is None else normed)
    size = x.nbytes

    def backward(saved: Saved, g: Gradients) -> Gradients:
        first, *rest = _linear_backward(w, sizes, size)
        made = w.empty(size)
        del first
        grads = [w.empty(norm.weight, Kind.GRAD) for _ in range(1 + norm.biased)]
        return [made, *grads, *rest]

    return w.apply([x], [out], [x.storage, *(kept or normed), *stats], backward)[0]


def row_linear(w: TapeWriter, x: Value, sizes: Linear) -> Value:
    """A row-wise linear layer: its output is summed in place over the ranks, or scattered over their tokens."""
    size = x.nbytes
    if sizes.engine:
        out, kept = _multiplied(w, sizes, size)
        if sizes.scatters:
            part = w.empty(sizes.scatters, Kind.COMM)
            out = part
            del part

        def backward(saved: Saved, g: Gradients) -> Gradients:
            gathered = w.empty(sizes.output, Kind.COMM) if sizes.scatters and sizes.eight is None else None
            grads = _linear_backward(w, sizes, size)
            del gathered
            return grads

        return w.apply([x], [out], kept or [x.storage], backward)[0]
    whole = w.apply([x], [_product(w, sizes)], [x.storage], lambda saved, g: _linear_backward(w, sizes, size))[0]
    return scatter(w, whole, sizes.scatters) if sizes.scatters else whole


def add(w: TapeWriter, x: Value, residual: Value, *, bias: int = 0, dropout: bool = False, element: int = 2) -> Value:
    """Add bias, dropout and residual as one kernel does; dropout keeps a mask of one byte an element.

    Args:
        bias: bytes of a bias that is added before dropout; 0 for none.
        dropout: whether elements of the sum with the bias are dropped.
        element: bytes of one element.
    """
    size = x.nbytes
    mask = [w.empty(size // element)] if dropout else []
    out = w.empty(size)

    def backward(saved: Saved, g: Gradients) -> Gradients:
        made = w.empty(size) if dropout else g[0]
        grads = [w.empty(bias, Kind.GRAD)] if bias else []
        return [made, g[0], *grads]

    return w.apply([x, residual], [out], mask, backward)[0]


def drop(w: TapeWriter, x: Value, element: int = 2) -> Value:
    """Dropout: a new tensor and a mask of one byte an element."""
    size = x.nbytes
    mask = w.empty(size // element)
    out = w.empty(size)

    return w.apply([x], [out], [mask], w.fresh(size))[0]


def checkpoint(w: TapeWriter, run: Callable[[list[Value]], Value], inputs: list[Value], *, masked: bool = True) -> Value:
    """Run `run` without a graph and keep its inputs alone; the backward runs it again, with one. Attention's mask is an input,
    too, where `masked`.

    The gradients of the inputs are kept by their leaves, and the output of the second run is held until then. Where an
    attribute of a module inside holds the graph, the leaves live on with their gradients.
    """
    sizes = [x.nbytes for x in inputs]
    mask = [w.mask] if masked and w.mask is not None else []
    with w.without_graph():
        out = run([Value(x.storage, nbytes=x.nbytes) for x in inputs]).storage

    def backward(saved: Saved, g: Gradients) -> Gradients:
        with w.with_graph():
            leaves = [w.leaf(storage, size) for storage, size in zip(saved, sizes, strict=False)]
            w.holder = -1
            output = run(leaves)
        made = w.backward(output, [g[0]], leaves)
        if w.holder >= 0:
            w.held[w.holder] = [*(leaf.storage for leaf in leaves), *(one for one in made if one is not None)]
        return made

    return w.apply(inputs, [out], [*(x.storage for x in inputs), *mask], backward)[0]


def attention(
    w: TapeWriter, query: Value, key: Value, value: Value, *, output: int, stats: int, packed: bool, copies: bool
) -> Value:
    """Flash attention: query, key, value and output are saved, and one fp32 number for each row and head.

    Args:
        query, key, value: what it reads.
        output: bytes of its output.
        stats: bytes of those numbers.
        packed: whether their gradients are views of one tensor, as they are themselves.
        copies: whether the output is copied into the order of sequences first, which FlashAttention does for several samples.
    """
    out, kept = w.empty(output), w.empty(stats)
    sizes = (query.nbytes, key.nbytes, value.nbytes)

    def backward(saved: Saved, g: Gradients) -> Gradients:
        if packed:
            whole = w.empty(sum(sizes))
            return [whole, whole, whole]
        return [w.empty(size) for size in sizes]

    saved = [query.storage, key.storage, value.storage, out, kept]
    made = w.apply([query, key, value], [out], saved, backward)[0]
    return contiguous(w, made) if copies else made


def activate(w: TapeWriter, x: Value, *, gated: bool, bias: int) -> Value:
    """The MLP's activation as one kernel with the bias: it keeps its input.

    Source: megatron/core/fusions/fused_bias_swiglu.py, fused_bias_gelu.py
    """
    size = x.nbytes

    def backward(saved: Saved, g: Gradients) -> Gradients:
        made: Gradients = [w.empty(size)]
        if bias:
            made.append(w.empty(bias, Kind.GRAD))
        return made

    return w.apply([x], [w.empty(size // (1 + gated))], [x.storage], backward)[0]
