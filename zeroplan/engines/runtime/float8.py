"""The tape of a model whose blocks' linear layers multiply in 8-bit floats.

What stays for the backward is what stays without: the input as it came. Each product holds its two factors in 8 bits, and
makes each from a scaled copy in 16; a factor that is summed along its other side is copied once more. Scales, a few bytes for
each part of a factor, are counted; what they are made from, which is gone before a factor is there, is not.
Source: zeroplan_runtime/techniques/float8.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from zeroplan.core.arena.layout import align
from zeroplan.core.float8 import BLOCK, Float8Recipe, multiple_of
from zeroplan.tape.edit import EventWriter, TapeEdit
from zeroplan.tape.expanded import ExpandedTape, Kind, Op

_HALF, _SCALE = 2, 4  # bytes of an element in bf16 and of a scale


def float8_layers(tape: ExpandedTape, recipe: Float8Recipe, blocks: Collection[str]) -> dict[int, int]:
    """Return the weight of each plain linear layer of the blocks that multiplies in 8 bits, by the module's index."""
    size, found = multiple_of(recipe), {}
    for index, module in enumerate(tape.modules):
        if module.type != "Linear" or not any(module.name.startswith(f"{block}.") for block in blocks):
            continue
        weight = next((p for p in module.params if len(tape.params[p].shape) == 2), None)
        if weight is not None and all(n % size == 0 for n in tape.params[weight].shape):
            found[index] = weight
    return found


def with_float8(tape: ExpandedTape, layers: dict[int, int], recipe: Float8Recipe) -> ExpandedTape:
    """Return `tape` with what these layers' products hold beside their results.

    Args:
        tape: where autograd makes the layers' weight gradients.
        layers: the weight of each, by the module's index.
        recipe: how factors are scaled.
    """
    edit = TapeEdit(tape)
    entered = {at: tape.arg[at] for at, op in enumerate(tape.op) if op == Op.ENTER and tape.arg[at] in layers}
    for at, module in entered.items():
        factors = _Factors(edit, module, tape.params[layers[module]].shape, recipe)
        factors.forward(next(n for n in edit.allocations(range(at, len(tape))) if tape.module[n] == module))
    begins = {at: tape.arg[at] for at, op in enumerate(tape.op) if op == Op.BWD_ENTER and tape.arg[at] in layers}
    for at, module in begins.items():
        end = edit.first(Op.BWD_EXIT, module, at)
        if end is not None:
            factors = _Factors(edit, module, tape.params[layers[module]].shape, recipe)
            factors.backward([n for n in edit.allocations(range(at, end)) if tape.module[n] == module])
    return edit.result()


class _Factors:
    """The factors of one layer's products, written where each is made and dropped."""

    def __init__(self, edit: TapeEdit, module: int, shape: tuple[int, ...], recipe: Float8Recipe) -> None:
        self.edit, self.module, self.recipe = edit, module, recipe
        self.out, self.into = shape

    def forward(self, result: int) -> None:
        """Write the factors around the event that makes the layer's output."""
        tokens = self.edit.tape.aux[result] // (_HALF * self.out)
        write = self.edit.before(result, self.module)
        held = [*self._rounded(write, tokens, self.into), *self._weight(write, self.out, self.into)]
        self.edit.behind(result, self.module).free(*held)

    def backward(self, made: list[int]) -> None:
        """Write the factors around the events that make gradients: that of the weight, behind it now, and that of the input."""
        tape, edit = self.edit.tape, self.edit
        weight = next((at for at in made if tape.kind[at] == Kind.GRAD), None)
        inputs = next((at for at in made if at != weight and tape.aux[at] % (_HALF * self.into) == 0), None)
        if inputs is None and weight is None:
            return
        first = min(at for at in (weight, inputs) if at is not None)
        tokens = tape.aux[inputs] // (_HALF * self.into) if inputs is not None else 0
        write = edit.before(first, self.module)
        once = self.recipe is Float8Recipe.TENSORWISE
        whole = list(self._rounded(write, tokens, self.out)) if once else []
        if inputs is not None:
            event = edit.event(inputs)
            edit.drop((inputs,))
            held = [] if once else list(self._rounded(write, tokens, self.out))
            held += self._turned_weight(write)
            write.events.append(event)
            write.free(*held)
        if weight is not None:
            event = edit.event(weight)
            edit.drop((weight,))
            held = list(self._for_weight(write, tokens, whole=once))
            write.events.append(event)
            write.free(*held)
        write.free(*whole)

    def _rounded(self, write: EventWriter, rows: int, columns: int) -> Iterator[int]:
        """Write a factor of tokens: its bits, and its scales."""
        count = rows * columns
        scales = {Float8Recipe.TENSORWISE: 1, Float8Recipe.ROWWISE: rows}.get(self.recipe, count // BLOCK)
        yield write.alloc(scales * _SCALE)
        yield self._bits(write, count)

    def _weight(self, write: EventWriter, rows: int, columns: int) -> Iterator[int]:
        count = rows * columns
        scales = {Float8Recipe.TENSORWISE: 1, Float8Recipe.ROWWISE: rows}.get(self.recipe, count // BLOCK**2)
        yield write.alloc(scales * _SCALE)
        yield self._bits(write, count)

    def _turned_weight(self, write: EventWriter) -> list[int]:
        """Write the weight's transpose as a factor."""
        scale, bits = self._weight(write, self.into, self.out)
        return [scale, self._copied(write, bits, self.into * self.out)]

    def _for_weight(self, write: EventWriter, tokens: int, *, whole: bool) -> Iterator[int]:
        """Write both factors of the weight's gradient, which sums over tokens."""
        rows = align(tokens, BLOCK if self.recipe is Float8Recipe.BLOCKWISE else 16)
        if rows > tokens:
            yield write.alloc(rows * self.into * _HALF)
        if whole:
            padded = write.alloc(rows * self.out) if rows > tokens else None
            yield write.alloc(rows * self.out)
            if padded is not None:
                write.free(padded)
        else:
            wide = write.alloc(rows * self.out * _HALF) if rows > tokens else None
            scale, bits = self._rounded(write, self.out, rows)
            yield from (scale, self._copied(write, bits, rows * self.out))
            if wide is not None:
                write.free(wide)
        scale, bits = self._rounded(write, self.into, rows)
        yield from (scale, self._copied(write, bits, rows * self.into))

    def _bits(self, write: EventWriter, count: int) -> int:
        scaled = write.alloc(count * _HALF)
        bits = write.alloc(count)
        write.free(scaled)
        return bits

    def _copied(self, write: EventWriter, bits: int, count: int) -> int:
        """Write a copy of `bits` in the other order, in whose place it stays."""
        copy = write.alloc(count)
        write.free(bits)
        return copy
