"""One model chunk's micro batch as a tape: the layers of one pipeline stage, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from zeroplan.engines.megatron import layers
from zeroplan.engines.megatron import operators as ops
from zeroplan.engines.megatron.autograd import Storage, TapeWriter, Value
from zeroplan.engines.megatron.shapes import Shapes
from zeroplan.tape.expanded import ExpandedTape, Kind


@dataclass(frozen=True, slots=True)
class ChunkLayers:
    """The part of the model that a chunk has: its layers by number, and whether embedding and head are its own."""

    layers: tuple[int, ...]
    embeds: bool
    ends: bool


@dataclass(frozen=True, slots=True)
class ChunkTape:
    """One micro batch of a chunk.

    Attributes:
        tape: the events of the forward, then those of the backward.
        split: where the backward begins.
        output: the storage of what is sent to the next stage, whose end the schedule decides; -1 on the last.
        gradient: the storage of what is sent back to the stage before, likewise; -1 on the first.
        kept: bytes of the buffers that live for the whole run, by their names.
    """

    tape: ExpandedTape
    split: int
    output: int
    gradient: int
    kept: Mapping[tuple[str, tuple[int, ...]], int]


@lru_cache(maxsize=64)
def chunk_tape(shapes: Shapes, chunk: ChunkLayers) -> ChunkTape:
    """Write the tape of a chunk's micro batch."""
    w = TapeWriter("GPTModel")
    received = None if chunk.embeds else w.leaf(w.outside(shapes.hidden))
    x = _forward(w, shapes, chunk, received)
    output = -1 if chunk.ends else x.storage.ident
    held: list[Storage] = []
    if not chunk.ends:  # the schedule frees it once it is sent; autograd needs the node alone
        held.append(x.storage)
    w.begin_backward()
    gradient = w.empty(4, Kind.LOSS) if chunk.ends else w.outside(shapes.hidden)
    out = Value(gradient, x.node, x.slot)
    del x
    made = w.backward(out, [gradient], [] if received is None else [received])
    del out, gradient
    sent = made[0].ident if made and made[0] is not None else -1
    w.attributes.clear()
    return ChunkTape(*w.tape(outlive=(output, sent)), output, sent, w.kept)


def _forward(w: TapeWriter, s: Shapes, chunk: ChunkLayers, received: Value | None) -> Value:
    """Run the forward; the batch goes with its end, but for what autograd has saved."""
    if not (chunk.embeds or chunk.ends):
        assert received is not None
        return _layers(w, s, chunk.layers, received)
    words, weights, w.mask = layers.load(w, s)
    x = layers.embed(w, s, words) if received is None else received
    x = _layers(w, s, chunk.layers, x)
    tied = chunk.embeds and not s.model.untie_embeddings_and_output_weights
    x = layers.head(w, s, x, weights, tied=tied) if chunk.ends else x
    w.mask = None
    return x


def _layers(w: TapeWriter, s: Shapes, numbers: tuple[int, ...], x: Value) -> Value:
    """Run a chunk's layers, recomputing as the arguments say."""
    model = s.model
    if model.recompute_granularity != "full":
        for number in numbers:
            x = layers.layer(w, s, number, x)
        return x
    block = model.recompute_method == "block"
    size = 1 if block else model.recompute_num_layers
    for at in range(0, len(numbers), size):
        part = numbers[at : at + size]
        if block and at >= model.recompute_num_layers:
            x = layers.layer(w, s, part[0], x)
            continue

        def run(inputs: list[Value], part: tuple[int, ...] = part) -> Value:
            (value,) = inputs
            for number in part:
                value = layers.layer(w, s, number, value)
            return value

        x = ops.checkpoint(w, run, [x])
    return x
