"""Assembles a stored tape from a model and its traces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from zeroplan.tape.expanded import Kind, Mark, Op, TapeModule, TapeParam
from zeroplan.tape.format import Stack, Tape, TapeProgram
from zeroplan.tape.options import Checkpointing, TraceOptions
from zeroplan.trace.fit import SizeForm, TracePoint
from zeroplan.trace.fold import DoesNotFoldError, TracedStack, TraceFolder, kinds_of
from zeroplan.trace.recorder import Recording


@dataclass(frozen=True, slots=True)
class Blocks:
    """A stack of blocks of the traced model: the name before the index, the traced and the real number of blocks."""

    prefix: str
    traced: int
    real: int


def find_blocks(model: nn.Module, depths: Sequence[tuple[int, int]]) -> list[Blocks]:
    """The outermost module lists whose length is one of the traced depths, and which hold no module twice or another's.

    Args:
        depths: pairs of a traced and a real depth; no traced one has two real ones.
    """
    found: list[Blocks] = []
    named = dict(model.named_modules())
    for name, module in named.items():
        if not isinstance(module, nn.ModuleList) or any(name.startswith(b.prefix + ".") for b in found):
            continue
        real = next((real for traced, real in depths if traced == len(module)), 0)
        if len(module) > 1 and real and all(f"{name}.{i}" in named for i in range(len(module))):
            found.append(Blocks(name, len(module), real))
    return found


#: Bytes of registered buffers from which they are counted: most models have a few hundred (rotary frequencies, biases of
#: routers), GPT-Neo a mask of all positions a block.
LEAST_BUFFERS = 16 << 20


class Assembler:
    """Collects the parts of one model's tape, with its blocks' events as loops if `folded`."""

    def __init__(
        self, model: nn.Module, blocks: Sequence[Blocks], options: TraceOptions, vocab: int, *, folded: bool = True
    ) -> None:
        self.options, self.vocab = options, vocab
        self.blocks = list(blocks) if folded else []
        self.modules = list(model.named_modules())
        self.params = list(model.named_parameters())
        self._index = {name: i for i, (name, _) in enumerate(self.modules)}
        self._place = [self._find(name) for name, _ in self.modules]
        within = tuple(b.prefix + "." for b in blocks)
        self._inside = frozenset(i for i, (name, _) in enumerate(self.modules) if name.startswith(within))
        self._repeated = [[self._index[f"{b.prefix}.{i}"] for i in range(b.traced)] for b in blocks]
        self._param_place = [self._find(name) for name, _ in self.params]
        self.outside_modules = _numbered(i for i, p in enumerate(self._place) if p is None)
        self.outside_params = _numbered(i for i, p in enumerate(self._param_place) if p is None)
        held = {b.untyped_storage()._cdata: (name, b.untyped_storage().nbytes()) for name, b in model.named_buffers()}
        self._held = [(self._find(name), size) for name, size in held.values()]
        self.traced = [self._traced(s) for s in range(len(self.blocks))]
        owners = {id(p): i for i, (_, p) in enumerate(self.params)}
        self._own = [
            tuple(dict.fromkeys(owners[id(p)] for p in module.parameters(recurse=False))) for _, module in self.modules
        ]

    def _find(self, name: str) -> tuple[int, int] | None:
        """Return the stack and the block that a module or parameter belongs to; None outside all stacks."""
        for s, blocks in enumerate(self.blocks):
            if name.startswith(blocks.prefix + "."):
                return s, int(name[len(blocks.prefix) + 1 :].split(".", 1)[0])
        return None

    def _traced(self, stack: int) -> TracedStack:
        members: list[list[int]] = [[] for _ in range(self.blocks[stack].traced)]
        for i, place in enumerate(self._place):
            if place is not None and place[0] == stack:
                members[place[1]].append(i)
        param_of: dict[int, tuple[int, int]] = {}
        counts = [0] * self.blocks[stack].traced
        for i, place in enumerate(self._param_place):
            if place is not None and place[0] == stack:
                param_of[i] = (place[1], counts[place[1]])
                counts[place[1]] += 1
        return TracedStack(tuple(m[0] for m in members), tuple(len(m) for m in members), param_of)

    def program(
        self,
        points: Sequence[TracePoint],
        traces: Sequence[Recording],
        batches: tuple[int, int],
        seqs: tuple[int, int],
        forms: Sequence[SizeForm] | None = None,
    ) -> tuple[TapeProgram, list[int]]:
        """Build the program of traces with the same events, and the index of each recorded storage's size."""
        kinds = self._kinds(traces[0])
        folder = TraceFolder(points, traces, self.traced, self.outside_modules, self.outside_params, kinds, forms)
        return folder.program(batches, seqs), folder.size_of

    def _kinds(self, trace: Recording) -> list[Kind]:
        wide = (i for i, (_, m) in enumerate(self.modules) if getattr(m, "out_features", 0) == self.vocab)
        heads = frozenset(wide) - self._inside  # an MLP may be as wide as the vocabulary
        kept: frozenset[int] = frozenset()
        if self.options.checkpointing is not Checkpointing.NONE:
            # A block's last output is the input of the next block, which keeps it where that block is checkpointed.
            every = self.options.every
            kept = _kept_outside(trace, {m for stack in self._repeated for b, m in enumerate(stack) if (b + 2) % every == 0})
        return kinds_of(trace, -(-self.vocab // self.options.mesh.tp), heads, self._inside, kept)

    def tape(self, programs: list[TapeProgram], shapes: Sequence[tuple[int, ...]]) -> Tape:
        """The stored tape. `shapes` are those of the parameters; -k stands for k times the LoRA rank.

        Raises:
            DoesNotFoldError: when inner blocks differ, so that the depth cannot be extrapolated.
        """
        stacks = [self._stack(s, programs, shapes) for s in range(len(self.blocks))]
        held = [size for at, size in self._held for _ in range(1 if at is None else stacks[at[0]].plan.count(at[1]))]
        modules = [self._module(i, None) for i in self.outside_modules]
        params = [self._param(i, shapes, "") for i in self.outside_params]
        return Tape(
            modules,
            params,
            _order(self._place, self.outside_modules),
            _order(self._param_place, self.outside_params),
            stacks,
            programs,
            held if sum(held) >= LEAST_BUFFERS else [],
        )

    def _stack(self, s: int, programs: list[TapeProgram], shapes: Sequence[tuple[int, ...]]) -> Stack:
        blocks, traced = self.blocks[s], self.traced[s]
        modules = [
            [self._module(i, base) for i in range(base, base + count)]
            for base, count in zip(traced.modules, traced.module_counts, strict=True)
        ]
        params: list[list[TapeParam]] = [[] for _ in range(blocks.traced)]
        for i, (block, _) in traced.param_of.items():
            params[block].append(self._param(i, shapes, f"{blocks.prefix}.{block}."))
        signatures = [
            (modules[b], params[b], [piece.segments[b] for prog in programs for piece in prog.pieces if piece.stack == s])
            for b in range(blocks.traced)
        ]
        return Stack(
            blocks.prefix + ".{}",
            self.outside_modules.get(self._index[blocks.prefix], -1),
            _plan(signatures, blocks, 1 + self.options.ends[1]),
            modules,
            params,
        )

    def _module(self, i: int, base: int | None) -> TapeModule:
        name, module = self.modules[i]
        parent = self._index[name.rpartition(".")[0]] if name else -1
        stack = self._place[i]
        own = []
        for p in self._own[i]:
            place = self._param_place[p]
            if place is None:
                own.append(self.outside_params[p] if base is None else -1 - self.outside_params[p])
            elif base is not None and place == stack:
                own.append(self.traced[place[0]].param_of[p][1])
        if base is None:
            return TapeModule(name, type(module).__name__, self.outside_modules.get(parent, -1), tuple(own))
        inner = name[len(self.modules[base][0]) + 1 :]
        return TapeModule(inner, type(module).__name__, parent - base if parent >= base else -1, tuple(own))

    def _param(self, i: int, shapes: Sequence[tuple[int, ...]], prefix: str) -> TapeParam:
        name, param = self.params[i]
        return TapeParam(name[len(prefix) :], tuple(shapes[i]), param.requires_grad, param.element_size())


def _numbered(items: Iterable[int]) -> dict[int, int]:
    return {item: k for k, item in enumerate(items)}


def _order(places: Sequence[tuple[int, int] | None], outside: dict[int, int]) -> list[int]:
    order: list[int] = []
    for i, place in enumerate(places):
        if place is None:
            order.append(outside[i])
        elif -1 - place[0] not in order:
            order.append(-1 - place[0])
    return order


def _plan(signatures: Sequence[object], blocks: Blocks, last: int) -> list[int]:
    """Decide which traced block each real one repeats.

    The first ones and the `last` stand for themselves; between them, blocks must repeat with a period that the difference
    between traced and real depth is a multiple of.
    """
    n, real = blocks.traced, blocks.real
    if n == real:
        return list(range(n))
    for period in range(1, n // 2 + 1):
        if (real - n) % period:
            continue
        for first in range(1, n - last - 2 * period + 1):
            # Blocks from `first` on to the last ones repeat; two whole periods of them prove it.
            if all(signatures[i] == signatures[i + period] for i in range(first, n - last - period)):
                head = list(range(first + period))
                middle = [first + period + (k % period) for k in range(real - n)]
                tail = list(range(first + period, n))
                return head + middle + tail
    raise DoesNotFoldError(f"the {n} traced blocks of {blocks.prefix} show no period")


def _kept_outside(trace: Recording, blocks: set[int]) -> frozenset[int]:
    """The storages that the modules in `blocks` allocate in the forward and that are alive at its end."""
    live: dict[int, None] = {}
    for op, arg in zip(trace.op, trace.arg, strict=True):
        if op == Op.ALLOC:
            live[arg] = None
        elif op == Op.FREE:
            live.pop(arg, None)
        elif op == Op.MARK and arg == Mark.FORWARD_END:
            break
    return frozenset(i for i in live if trace.allocs[i].phase == 1 and trace.allocs[i].module in blocks)
