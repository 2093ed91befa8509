"""Cuts traces of a few blocks into pieces and loops. See Note [Folding] in :mod:`zeroplan.tape.format`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zeroplan.tape.expanded import Kind, Mark, Op
from zeroplan.tape.format import Anchor, Piece, Segment, Size, TapeProgram
from zeroplan.trace.fit import SizeForm, TracePoint, fit_size
from zeroplan.trace.recorder import RawAlloc, Recording


class DoesNotFoldError(ValueError):
    """Blocks run in another order than one after another, or inner ones differ."""


class UnlikeError(ValueError):
    """Two traces hold different events, so their sizes cannot be compared."""


@dataclass(frozen=True, slots=True)
class TracedStack:
    """A stack of traced blocks.

    Attributes:
        modules: for each block, the index of its own module.
        module_counts: for each block, its number of modules.
        param_of: for each parameter in the stack, its block and its index within the block.
    """

    modules: tuple[int, ...]
    module_counts: tuple[int, ...]
    param_of: dict[int, tuple[int, int]]

    @property
    def depth(self) -> int:
        """The number of traced blocks."""
        return len(self.modules)


@dataclass(slots=True)
class _Span:
    """Events `begin` to `end`, of block `block` of stack `stack` (-1 outside all stacks), in piece number `piece`."""

    stack: int
    block: int
    begin: int
    end: int
    piece: int = -1


class TraceFolder:
    """Folds traces with the same events into a program; see :meth:`program`.

    Args:
        points: the point of each trace.
        traces: one trace for each point.
        stacks: the stacks of blocks.
        outside_modules: module index -> index among those outside all stacks.
        outside_params: the same for parameters.
        kinds: each storage's kind.
        forms: the form of each storage's size, where a model of the same family tells it.
    """

    def __init__(
        self,
        points: Sequence[TracePoint],
        traces: Sequence[Recording],
        stacks: Sequence[TracedStack],
        outside_modules: dict[int, int],
        outside_params: dict[int, int],
        kinds: Sequence[Kind],
        forms: Sequence[SizeForm] | None = None,
    ) -> None:
        self.points, self.traces, self.stacks = points, traces, stacks
        self.outside_modules, self.outside_params, self.kinds = outside_modules, outside_params, kinds
        first = traces[0]
        for other in traces[1:]:
            if other.op != first.op or other.arg != first.arg or other.aux != first.aux:
                raise UnlikeError("events differ")
        # A copy: the folder puts frees into order (_group_frees), while the traces are compared with others later.
        self.trace = replace(first, arg=list(first.arg))
        self.forms = forms
        self.anchors: dict[Anchor, int] = {}
        self.sizes: dict[Size, int] = {}
        self._fitted: dict[tuple[object, object], int] = {}
        self.size_of = [0] * len(self.trace.allocs)
        self._piece_stacks: dict[int, int] = {}
        self._block_of = {
            base + i: (s, block, i)
            for s, stack in enumerate(stacks)
            for block, (base, count) in enumerate(zip(stack.modules, stack.module_counts, strict=True))
            for i in range(count)
        }

    def _group_frees(self, spans: list[_Span]) -> dict[int, tuple[int, int, int]]:
        """Sort runs of frees that go through all blocks of a stack by block, as those of autocast's casts at its exit.

        Returns:
            For the first event of each block's frees: the stack, the block, and the end.
        """
        owner: dict[int, tuple[int, int]] = {}
        for span in spans:
            if span.stack >= 0:
                for i in range(span.begin, span.end):
                    if self.trace.op[i] == Op.ALLOC:
                        owner[self.trace.arg[i]] = (span.stack, span.block)
        loops: dict[int, tuple[int, int, int]] = {}
        for span in spans:
            i = span.begin
            while span.stack < 0 and i < span.end:
                end = i
                stack = owner.get(self.trace.arg[i], (-1, 0))[0]
                while end < span.end and self.trace.op[end] == Op.FREE and owner.get(self.trace.arg[end], (-1,))[0] == stack:
                    end += 1
                if stack >= 0 and end - i >= self.stacks[stack].depth:
                    freed = sorted(self.trace.arg[i:end], key=lambda ident: (owner[ident][1], ident))
                    blocks = [owner[ident][1] for ident in freed]
                    if set(blocks) == set(range(self.stacks[stack].depth)):
                        self.trace.arg[i:end] = freed
                        for block in range(self.stacks[stack].depth):
                            first = i + blocks.index(block)
                            loops[first] = (stack, block, first + blocks.count(block))
                i = max(end, i + 1)
        return loops

    def program(self, batches: tuple[int, int], seqs: tuple[int, int]) -> TapeProgram:
        """Fold the trace into the program for a range of micro batches and sequence lengths.

        Raises:
            DoesNotFitError: when a size follows no short polynomial.
            DoesNotFoldError: when the blocks do not run one after another.
        """
        spans = self._spans()
        self._piece_stacks = {span.piece: span.stack for span in spans}
        home: dict[int, tuple[int, int, int]] = {}  # storage -> piece, block, index within
        for span in spans:
            count = 0
            for i in range(span.begin, span.end):
                if self.trace.op[i] == Op.ALLOC:
                    home[self.trace.arg[i]] = (span.piece, span.block, count)
                    count += 1
        pieces: list[Piece] = []
        for span in spans:
            segment = self._segment(span, home)
            if span.piece == len(pieces):
                pieces.append(Piece(span.stack, False, []))
            piece = pieces[span.piece]
            piece.reverse = piece.reverse or (bool(piece.segments) and span.block == 0)
            piece.segments.append(segment)
        for piece in pieces:
            if piece.reverse:
                piece.segments.reverse()
        return TapeProgram(batches, seqs, list(self.sizes), list(self.anchors), pieces)

    # ---- cutting -------------------------------------------------------------------------------------------------------
    def _spans(self) -> list[_Span]:
        spans = self._cut(self._starts())
        loops = self._group_frees(spans)
        if loops:
            starts = [s for s in self._starts() if s[0] not in loops]
            spans = self._cut(sorted(starts + [(i, *loop) for i, loop in loops.items()]))
        return self._number(spans)

    def _cut(self, starts: list[tuple[int, int, int, int]]) -> list[_Span]:
        spans: list[_Span] = []
        at = 0
        for i, stack, block, end in starts:
            if i > at:
                spans.append(_Span(-1, 0, at, i))
            spans.append(_Span(stack, block, i, end))
            at = end
        if at < len(self.trace.op):
            spans.append(_Span(-1, 0, at, len(self.trace.op)))
        return spans

    def _number(self, spans: list[_Span]) -> list[_Span]:
        """Number the pieces: a loop over all blocks of a stack is one piece."""
        piece, run = -1, 0
        for k, span in enumerate(spans):
            before = spans[k - 1] if k else None
            whole = span.stack >= 0 and run == self.stacks[span.stack].depth
            if span.stack >= 0 and before is not None and before.stack == span.stack and not whole:
                step = span.block - before.block
                if abs(step) != 1 or (run > 1 and step != spans[k - 1].block - spans[k - 2].block):
                    raise DoesNotFoldError(f"block {span.block} after block {before.block}")
                run += 1
            else:
                if before is not None and before.stack >= 0 and run != self.stacks[before.stack].depth:
                    raise DoesNotFoldError("a stack runs in part")
                piece, run = piece + 1, 1
            span.piece = piece
        return spans

    def _starts(self) -> list[tuple[int, int, int, int]]:
        """Return the first event, stack, block and end of each block's forward and backward, or both halves of its backward.

        A block's events reach to the begin of the next block; those of the last block to its own end.
        """
        block_of = {m: (s, b) for s, stack in enumerate(self.stacks) for b, m in enumerate(stack.modules)}
        backward = 0
        begun: set[tuple[int, int, int]] = set()
        starts: list[tuple[int, int, int, int]] = []
        ends: dict[tuple[int, int, int], int] = {}
        for i, (op, arg) in enumerate(zip(self.trace.op, self.trace.arg, strict=True)):
            if op == Op.MARK:
                backward += arg in (Mark.BACKWARD_BEGIN, Mark.WEIGHTS_BEGIN)
            elif op in (Op.ENTER, Op.BWD_ENTER) and arg in block_of:
                key = (*block_of[arg], backward)
                if key not in begun:
                    begun.add(key)
                    starts.append((i, *key))
            # Recomputation leaves a block in backward as well; the block's end is where backward leaves it.
            elif arg in block_of and op == (Op.BWD_EXIT if backward else Op.EXIT):
                ends[(*block_of[arg], backward)] = i + 1
        out = []
        for k, (i, stack, block, back) in enumerate(starts):
            following = starts[k + 1] if k + 1 < len(starts) else None
            if following is not None and (following[1], following[3]) == (stack, back):
                end = following[0]
            else:
                end = ends.get((stack, block, back), following[0] if following else len(self.trace.op))
            out.append((i, stack, block, end))
        return out

    # ---- references ------------------------------------------------------------------------------------------------------
    def _anchor(self, space: str, index: int, target_stack: int, block: int, span: _Span) -> int:
        if target_stack < 0:
            anchor = Anchor(space, index, "=", 0)
        elif target_stack == span.stack:
            anchor = Anchor(space, index, ".", block - span.block)
            if abs(block - span.block) > 1:
                anchor = self._from_ends(space, index, target_stack, block)
        else:
            anchor = self._from_ends(space, index, target_stack, block)
        return self.anchors.setdefault(anchor, len(self.anchors))

    def _from_ends(self, space: str, index: int, stack: int, block: int) -> Anchor:
        depth = self.stacks[stack].depth
        return Anchor(space, index, "<", block) if block < depth / 2 else Anchor(space, index, ">", depth - 1 - block)

    def _module(self, index: int, span: _Span) -> tuple[int, int]:
        if index < 0:
            return -1, 0
        place = self._block_of.get(index)
        if place is None:
            return self._anchor("m", -1, -1, 0, span), self.outside_modules[index]
        return self._anchor("m", place[0], place[0], place[1], span), place[2]

    def _param(self, index: int, span: _Span) -> tuple[int, int]:
        for s, stack in enumerate(self.stacks):
            if index in stack.param_of:
                block, local = stack.param_of[index]
                return self._anchor("p", s, s, block, span), local
        return self._anchor("p", -1, -1, 0, span), self.outside_params[index]

    def _storage(
        self, ident: int, home: dict[int, tuple[int, int, int]], spans: dict[int, int], span: _Span
    ) -> tuple[int, int]:
        piece, block, local = home[ident]
        return self._anchor("s", piece, spans[piece], block, span), local

    def _size(self, ident: int) -> int:
        values = tuple(t.allocs[ident].size for t in self.traces)
        form = self.forms[ident] if self.forms is not None else None
        known = self._fitted.get((values, form))
        if known is None:
            size = fit_size(self.points, values, form)
            known = self._fitted[values, form] = self.sizes.setdefault(size, len(self.sizes))
        self.size_of[ident] = known
        return known

    def _segment(self, span: _Span, home: dict[int, tuple[int, int, int]]) -> Segment:
        out = Segment()
        trace = self.trace
        stack_of = self._piece_stacks
        for i in range(span.begin, span.end):
            op, arg = trace.op[i], trace.arg[i]
            anchor, offset, aux_anchor, aux, kind = -1, 0, -1, 0, 0
            if op == Op.ALLOC:
                anchor, offset = self._module(trace.allocs[arg].module, span)
                aux, kind = self._size(arg), self.kinds[arg]
            elif op == Op.FREE:
                anchor, offset = self._storage(arg, home, stack_of, span)
            elif op == Op.GRAD:
                anchor, offset = self._param(arg, span)
                aux_anchor, aux = self._storage(trace.aux[i], home, stack_of, span)
            elif op == Op.MARK:
                offset = arg
            else:
                anchor, offset = self._module(arg, span)
            for column, value in (
                (out.op, op),
                (out.anchor, anchor),
                (out.offset, offset),
                (out.aux_anchor, aux_anchor),
                (out.aux, aux),
                (out.kind, int(kind)),
            ):
                column.append(int(value))
        return out


def kinds_of(
    trace: Recording, vocab: int, head: frozenset[int], inside: frozenset[int], block_inputs: frozenset[int]
) -> list[Kind]:
    """Return each storage's kind.

    Args:
        trace: the events.
        vocab: the size of the vocabulary, which tells logits.
        head: indices of the modules that compute the logits.
        inside: indices of the blocks' modules, which make neither logits nor the loss, however wide they are.
        block_inputs: storages that checkpointed blocks keep.
    """
    allocs = trace.allocs
    gradients = {aux for op, aux in zip(trace.op, trace.aux, strict=True) if op == Op.GRAD}
    saved: set[int] = set()
    live: set[int] = set()
    for op, arg in zip(trace.op, trace.arg, strict=True):
        if op == Op.ALLOC:
            live.add(arg)
        elif op == Op.FREE:
            live.discard(arg)
        elif op == Op.MARK and arg == Mark.FORWARD_END:
            saved = set(live)
    return [_kind(i, a, gradients, saved, 0 if a.module in inside else vocab, head, block_inputs) for i, a in enumerate(allocs)]


def _kind(
    ident: int,
    alloc: RawAlloc,
    gradients: set[int],
    saved: set[int],
    vocab: int,
    head: frozenset[int],
    block_inputs: frozenset[int],
) -> Kind:
    if alloc.phase == 0:
        return Kind.INPUT
    if ident in gradients:
        return Kind.GRAD
    if alloc.cast_of_param:
        return Kind.CAST
    if alloc.collective:
        return Kind.COMM
    if vocab and alloc.last == vocab:
        return Kind.LOGITS if alloc.module in head else Kind.LOSS
    if ident in block_inputs:
        return Kind.CHECKPOINT
    if alloc.phase == 2 and not alloc.recomputed:
        return Kind.ACT_GRAD
    return Kind.SAVED if ident in saved or alloc.recomputed else Kind.TEMP
