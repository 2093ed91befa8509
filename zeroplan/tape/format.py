"""The tape's stored form: sizes as expressions, blocks that are alike once; expanded to a :class:`ExpandedTape` on demand.

Note [Folding]
    A trace of a few blocks is cut into *pieces*: those outside the blocks (the embedding, the head and the loss, …) and
    *loops*, one :class:`Segment` a traced block, forward in order and backward in reverse. `plan` says for each stack of
    blocks which traced block each real one repeats. Events refer to storages, modules and parameters as (anchor, offset):
    an anchor is a piece and a block relative to the current one or to either end, so a segment fits at any depth.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from zeroplan.core.errors import BadInput
from zeroplan.tape.expanded import ExpandedTape, Op, TapeModule, TapeParam
from zeroplan.tape.sizes import FUNCTIONS, KernelDevice, Poly, evaluate

#: Bytes of one tensor beyond which no machine is planned, and sums of many would leave 64 bits.
MOST_BYTES = 32 << 40

#: Bumped when the stored form changes, so that older caches are not read.
FORMAT = 2


class Anchor(NamedTuple):
    """Points that an offset counts from: a piece (or a stack, for modules and parameters) and a block of it.

    `mode` says what `block` is relative to: ``"="`` the piece is no loop, ``"."`` the current block, ``"<"`` the first
    block, ``">"`` the last block, counted backwards.
    """

    space: str  # "s" storages, "m" modules, "p" parameters
    number: int  # piece, or stack; -1: modules and parameters outside all stacks
    mode: str
    block: int


class Size(NamedTuple):
    """Bytes: a polynomial, or a function of :data:`zeroplan.tape.sizes.FUNCTIONS` applied to polynomials."""

    function: str  # "" for the polynomial itself
    args: tuple[Poly, ...]

    def bytes(self, device: KernelDevice, batch: int, seq: int, rank: int) -> int:
        """Return the storage's bytes for these numbers."""
        values = [evaluate(poly, batch, seq, rank) for poly in self.args]
        return FUNCTIONS[self.function](device, *values) if self.function else values[0]


@dataclass(slots=True)
class Segment:
    """Events of one piece, or of one block within a loop, as columns.

    | op | anchor, offset | aux_anchor, aux |
    | --- | --- | --- |
    | ALLOC | innermost module (anchor -1: none) | -1, index of the size |
    | FREE | storage | |
    | ENTER, EXIT, BWD_ENTER, BWD_EXIT | module | |
    | GRAD | parameter | storage |
    | MARK | -1, the mark | |

    The storages of a segment are numbered in the order of their ALLOC events.
    """

    op: list[int] = field(default_factory=list)
    anchor: list[int] = field(default_factory=list)
    offset: list[int] = field(default_factory=list)
    aux_anchor: list[int] = field(default_factory=list)
    aux: list[int] = field(default_factory=list)
    kind: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Piece:
    """`stack` is -1 for a piece outside the blocks (one segment), else segments are those of the traced blocks.

    A loop's segments stand in the order of the blocks; `reverse` runs them last to first.
    """

    stack: int
    reverse: bool
    segments: list[Segment]


@dataclass(slots=True)
class TapeProgram:
    """The events for a range of micro batches and sequence lengths (both ends included; 0 is no upper end)."""

    batches: tuple[int, int]
    seqs: tuple[int, int]
    sizes: list[Size]
    anchors: list[Anchor]
    pieces: list[Piece]

    def fits(self, batch: int, seq: int) -> bool:
        """Return whether this program was traced for these numbers."""
        return _within(batch, self.batches) and _within(seq, self.seqs)


def _within(value: int, bounds: tuple[int, int]) -> bool:
    return value >= bounds[0] and (not bounds[1] or value <= bounds[1])


@dataclass(slots=True)
class Stack:
    """Blocks in a row. `plan[i]` is the traced block that block i repeats.

    `modules` and `params` are those of each traced block; their names are relative to the block, whose name is `name` with
    ``{}`` for its index, and modules' parents are indices within the block (-1: `parent`, a module outside all stacks).
    """

    name: str
    parent: int
    plan: list[int]
    modules: list[list[TapeModule]]
    params: list[list[TapeParam]]


@dataclass(slots=True)
class Tape:
    """One model's micro batch, stored.

    `order` and `param_order` lay out modules and parameters as ``named_modules()`` and ``named_parameters()`` would: an
    index ≥ 0 is one of `modules` (`params`), -1-k stands for all of stack k. `held` are bytes of each registered buffer of the
    model at its whole depth, where they are worth counting.
    """

    modules: list[TapeModule]
    params: list[TapeParam]
    order: list[int]
    param_order: list[int]
    stacks: list[Stack]
    programs: list[TapeProgram]
    held: list[int] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)
    _layout: TapeLayout | None = field(default=None, repr=False, compare=False)

    def expand(
        self, micro_batch: int, seq_len: int, lora_rank: int | None = None, *, device: KernelDevice | None = None
    ) -> ExpandedTape:
        """Return the events for a micro batch, sequence length and LoRA rank.

        Raises:
            BadInput: when the tape was traced for other micro batches or sequence lengths.
        """
        for program in self.programs:
            if program.fits(micro_batch, seq_len):
                break
        else:
            raise BadInput(
                f"no trace for micro batch {micro_batch} and sequence length {seq_len}",
                remedy=f"stay within {', '.join(str(p.seqs) for p in self.programs)}",
            )
        if self._layout is None:
            self._layout = TapeLayout(self)
        layout = self._layout
        sizes = [s.bytes(device or KernelDevice(), micro_batch, seq_len, lora_rank or 0) for s in program.sizes]
        if max(sizes, default=0) > MOST_BYTES:
            what = f"{micro_batch} samples of {seq_len} tokens make tensors of more than {MOST_BYTES >> 40} TiB"
            raise BadInput(what, where="--micro-batch", remedy="use fewer or shorter samples")
        return _Expansion(self, layout, program, sizes, lora_rank or 0).expanded


class TapeLayout:
    """Indices of modules and parameters at full depth."""

    def __init__(self, tape: Tape) -> None:
        self.module_at: list[int] = [0] * len(tape.modules)
        self.param_at: list[int] = [0] * len(tape.params)
        self.block_modules: list[list[int]] = [[] for _ in tape.stacks]
        self.block_params: list[list[int]] = [[] for _ in tape.stacks]
        modules: list[TapeModule] = []
        params: list[TapeParam] = []
        for index in tape.param_order:
            if index >= 0:
                self.param_at[index] = len(params)
                params.append(tape.params[index])
                continue
            stack = tape.stacks[-1 - index]
            for i, traced in enumerate(stack.plan):
                self.block_params[-1 - index].append(len(params))
                prefix = stack.name.replace("{}", str(i))
                params.extend(TapeParam(f"{prefix}.{p.name}", p.shape, p.trainable, p.itemsize) for p in stack.params[traced])
        for index in tape.order:  # a module comes behind its parent
            if index >= 0:
                m = tape.modules[index]
                self.module_at[index] = len(modules)
                parent = self.module_at[m.parent] if m.parent >= 0 else -1
                modules.append(TapeModule(m.name, m.type, parent, tuple(self.param_at[p] for p in m.params)))
                continue
            stack = tape.stacks[-1 - index]
            outside = self.module_at[stack.parent] if stack.parent >= 0 else -1
            for i, traced in enumerate(stack.plan):
                base, shift = len(modules), self.block_params[-1 - index][i]
                self.block_modules[-1 - index].append(base)
                prefix = stack.name.replace("{}", str(i))
                for m in stack.modules[traced]:
                    name = f"{prefix}.{m.name}" if m.name else prefix
                    parent = base + m.parent if m.parent >= 0 else outside
                    # A negative index marks a parameter that is owned outside the block, such as a tied one.
                    own = tuple(p + shift if p >= 0 else self.param_at[-1 - p] for p in m.params)
                    modules.append(TapeModule(name, m.type, parent, own))
        self.modules = tuple(modules)
        self.params = tuple(params)


class _Expansion:
    """Lays a program's segments end to end."""

    def __init__(self, tape: Tape, layout: TapeLayout, program: TapeProgram, sizes: Sequence[int], rank: int) -> None:
        self.tape, self.layout, self.program, self.sizes = tape, layout, program, sizes
        self._counts = [[_storage_sizes(s, sizes) for s in piece.segments] for piece in program.pieces]
        self._bases: list[list[int]] = []
        self.expanded = ExpandedTape(layout.modules, _with_lora_rank(layout.params, rank), buffers=tuple(tape.held))
        self._place()
        self._lay()

    def _runs(self, piece: Piece) -> Iterable[tuple[int, int]]:
        """Return the pairs (block, traced block) in the order in which they run."""
        if piece.stack < 0:
            return [(0, 0)]
        plan = self.tape.stacks[piece.stack].plan
        return reversed(list(enumerate(plan))) if piece.reverse else list(enumerate(plan))

    def _place(self) -> None:
        """Number the storages: `_bases[piece][block]` is a segment's first."""
        total = 0
        for piece, counts in zip(self.program.pieces, self._counts, strict=True):
            depth = 1 if piece.stack < 0 else len(self.tape.stacks[piece.stack].plan)
            bases = [0] * depth
            for block, traced in self._runs(piece):
                bases[block] = total
                total += len(counts[traced])
            self._bases.append(bases)

    def _lay(self) -> None:
        expanded = self.expanded
        for number, piece in enumerate(self.program.pieces):
            compiled: dict[int, _Compiled] = {}
            for block, traced in self._runs(piece):
                code = compiled.get(traced)
                if code is None:
                    code = compiled[traced] = _Compiled(self, piece, number, traced)
                bases = [0] * (len(self.program.anchors) + 2)
                for i, anchor in code.used:
                    bases[i] = self._base(anchor, block)
                bases[-1] = self._bases[number][block]
                expanded.op += code.op
                expanded.kind += code.kind
                expanded.arg += [bases[a] + x for a, x in code.arg]
                expanded.module += [bases[a] + x for a, x in code.module]
                at = len(expanded.aux)
                expanded.aux += code.aux
                for i, a, x in code.grads:
                    expanded.aux[at + i] = bases[a] + x

    def _base(self, anchor: Anchor, block: int) -> int:
        if anchor.space == "s":
            blocks = self._bases[anchor.number]
        elif anchor.number < 0:
            return 0
        else:
            blocks = (self.layout.block_modules if anchor.space == "m" else self.layout.block_params)[anchor.number]
        return blocks[_resolve(anchor, block, len(blocks))]


def _resolve(anchor: Anchor, block: int, depth: int) -> int:
    if anchor.mode == ".":
        return block + anchor.block
    if anchor.mode == ">":
        return depth - 1 - anchor.block
    return anchor.block


def _storage_sizes(segment: Segment, sizes: Sequence[int]) -> list[int]:
    alloc = int(Op.ALLOC)
    return [sizes[x] for op, x in zip(segment.op, segment.aux, strict=True) if op == alloc]


class _Compiled:
    """A segment for given sizes: storages without bytes dropped, numbers outside blocks resolved."""

    def __init__(self, run: _Expansion, piece: Piece, number: int, traced: int) -> None:
        segment = piece.segments[traced]
        anchors = run.program.anchors
        plain, own = len(anchors), len(anchors) + 1
        self.op: list[int] = []
        self.kind: list[int] = []
        self.arg: list[tuple[int, int]] = []
        self.aux: list[int] = []
        self.module: list[tuple[int, int]] = []
        self.grads: list[tuple[int, int, int]] = []
        outside = {"m": run.layout.module_at, "p": run.layout.param_at}
        # By anchor where numbers outside all blocks are looked up; None for storages and blocks. -1 is no anchor.
        tables = [outside[anchor.space] if anchor.space != "s" and anchor.number < 0 else None for anchor in anchors]
        local = -1

        def fixed(a: int, x: int) -> tuple[int, int]:
            if a < 0:
                return plain, x
            table = tables[a]
            return (a, x) if table is None else (plain, table[x])

        alloc, free, grad, nobody = int(Op.ALLOC), int(Op.FREE), int(Op.GRAD), (plain, -1)
        columns = zip(segment.op, segment.anchor, segment.offset, segment.aux_anchor, segment.aux, segment.kind, strict=True)
        for op, a, x, b, y, kind in columns:
            if op == alloc:
                local += 1
                size = run.sizes[y]
                if size <= 0:
                    continue
                self.arg.append((own, local))
                self.aux.append(size)
                self.module.append(fixed(a, x) if a >= 0 else nobody)
            else:
                if op == free and _size_at(run, anchors[a], x, piece, traced) <= 0:
                    continue
                self.arg.append(fixed(a, x))
                if op == grad:
                    self.grads.append((len(self.aux), b, y))
                self.aux.append(0)
                self.module.append(nobody)
            self.op.append(op)
            self.kind.append(kind)
        indices = {a for a, _ in self.arg} | {a for a, _ in self.module} | {a for _, a, _ in self.grads}
        self.used = [(i, anchors[i]) for i in sorted(indices) if i < plain]


def _size_at(run: _Expansion, anchor: Anchor, local: int, piece: Piece, traced: int) -> int:
    """Return the bytes of a storage that the segment of a traced block refers to."""
    target = run._counts[anchor.number]
    block = _resolve(anchor, traced, len(target)) if piece.stack >= 0 or anchor.mode != "." else anchor.block
    return target[block][local]


def _with_lora_rank(params: tuple[TapeParam, ...], rank: int) -> tuple[TapeParam, ...]:
    """Return the parameters with the LoRA rank filled in; -k in a stored shape stands for k times the rank."""
    if not any(min(p.shape, default=0) < 0 for p in params):
        return params
    return tuple(TapeParam(p.name, tuple(-d * rank if d < 0 else d for d in p.shape), p.trainable, p.itemsize) for p in params)
