"""A tape made ready to be played many times: stretches that are recorded as a whole, and what an engine does between them.

See Note [Stretches] in ``zeroplan/simulate/stretches.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from zeroplan.core.buffers import Buffer
from zeroplan.core.tape import Kind, Mark, Op, Stream, TapeModule
from zeroplan.simulate.stretches import Stretches

#: By Kind, the name of a tape's allocation.
BUFFER_OF_KIND = {
    Kind.SAVED: Buffer.ACTIVATION,
    Kind.TEMP: Buffer.ACTIVATION_TEMP,
    Kind.GRAD: Buffer.GRAD_FULL,
    Kind.LOGITS: Buffer.LOGITS,
    Kind.LOSS: Buffer.ACTIVATION_TEMP,
    Kind.CHECKPOINT: Buffer.ACTIVATION_CHECKPOINT,
    Kind.CAST: Buffer.ACTIVATION,
    Kind.WORKSPACE: Buffer.WORKSPACE,
    Kind.INPUT: Buffer.INPUT,
    Kind.ACT_GRAD: Buffer.ACTIVATION_TEMP,
}

#: Beside :class:`zeroplan.core.tape.Op`: a thread's first call of cuBLAS or cuBLASLt. A cue's `arg` is the workspace's index:
#: cuBLAS's of the forward's and of the backward's thread, then cuBLASLt's of both; `aux` is the module that calls.
WORKSPACE = 99


@dataclass(frozen=True, slots=True)
class Cue:
    """What comes after a stretch of allocations and frees.

    Attributes:
        stretch: what is recorded first, by its number; None for nothing.
        op: a module hook or GRAD of :class:`zeroplan.core.tape.Op`, or WORKSPACE; None at the end.
        arg: as in the tape's event.
        aux: as in the tape's event.
    """

    stretch: int | None
    op: int | None = None
    arg: int = 0
    aux: int = 0


@dataclass(frozen=True, slots=True)
class Script:
    """One micro batch. Storages are numbered as in the tape.

    Attributes:
        forward: the forward's cues.
        backward: the backward's.
        inputs: storages of the batch, freed once the backward has returned.
        kept: what the loss keeps until another takes its place, in the order in which it goes.
        stretches: what the cues' numbers stand for.
    """

    forward: tuple[Cue, ...]
    backward: tuple[Cue, ...]
    inputs: tuple[int, ...]
    kept: tuple[int, ...]
    stretches: Stretches


class Scripts:
    """The scripts of the last stream: all ranks and stages of a request play the same few."""

    def __init__(self) -> None:
        self._stream: Stream | None = None
        self._known: dict[tuple[bool, bool], Script] = {}

    def of(self, stream: Stream, *, modules: bool, own_linear: bool) -> Script:
        """As :func:`script_of`."""
        if stream is not self._stream:
            self._stream, self._known = stream, {}
        key = (modules, own_linear)
        if key not in self._known:
            self._known[key] = script_of(stream, modules=modules, own_linear=own_linear)
        return self._known[key]


def script_of(stream: Stream, *, modules: bool, own_linear: bool) -> Script:
    """The tape's forward and backward, with module hooks only if `modules`.

    Workspace cues stand behind the first result of the first module of each half that multiplies matrices, and of the first
    that adds a bias in the same kernel: cuBLAS and cuBLASLt take a workspace for each thread that calls them, once the result
    has its memory, and autograd runs the backward (and recomputations within it) in its own. Stage 3's own linear function
    adds the bias apart (zero/linear.py).

    Args:
        stream: the expanded tape.
        modules: whether the engine has module hooks.
        own_linear: whether it put a function of its own in place of ``torch.nn.functional.linear``.
    """
    halves: tuple[list[_Event], list[_Event], list[_Event]] = ([], [], [])
    half = 0
    for op, arg, aux, kind, module in zip(stream.op, stream.arg, stream.aux, stream.kind, stream.module, strict=True):
        if op == Op.MARK:
            half = {Mark.BACKWARD_BEGIN: 1, Mark.BACKWARD_END: 2}.get(Mark(arg), half)
        else:
            halves[half].append((op, arg, aux, kind, module))
    products = [_multiplies(m.type) for m in stream.modules]
    biased = [_adds_bias(m, stream, own_linear=own_linear) for m in stream.modules]
    stretches = Stretches()
    played = [_cues(_with_workspaces(halves[half], half, products, biased), modules, stretches) for half in (0, 1)]
    allocated = {arg: kind for op, arg, kind in zip(stream.op, stream.arg, stream.kind, strict=True) if op == Op.ALLOC}
    last = [arg for op, arg, *_ in halves[2] if op == Op.FREE]
    return Script(
        forward=played[0],
        backward=played[1],
        inputs=tuple(arg for arg in last if allocated[arg] == Kind.INPUT),
        kept=tuple(arg for arg in last if allocated[arg] != Kind.INPUT),
        stretches=stretches,
    )


#: op, arg, aux, kind, module: a row of the stream.
_Event = tuple[int, int, int, int, int]
_HOOKS = frozenset({Op.ENTER, Op.EXIT, Op.BWD_ENTER, Op.BWD_EXIT})


def _with_workspaces(events: list[_Event], half: int, products: list[bool], biased: list[bool]) -> list[_Event]:
    entered = [(i, arg, op) for i, (op, arg, *_) in enumerate(events) if op in (Op.ENTER, Op.BWD_ENTER)]
    first = next((i for i, module, _ in entered if products[module]), None)
    first_biased = next((i for i, module, op in entered if biased[module] and op == Op.ENTER), None)
    at, module = (0, -1) if first is None else (_after_result(events, first), events[first][1])
    added: list[tuple[int, _Event]] = [(at, (WORKSPACE, half, module, 0, -1))]
    if first_biased is not None:
        added.append((_after_result(events, first_biased), (WORKSPACE, 2 + half, events[first_biased][1], 0, -1)))
    found = list(events)
    for at, cue in sorted(added, reverse=True):
        found.insert(at, cue)
    return found


def _after_result(events: list[_Event], entry: int) -> int:
    """Where the first product of the module entered there has its result, casts of its operands left aside."""
    for at in range(entry + 1, len(events)):
        op, _, _, kind, _ = events[at]
        if op == Op.ALLOC and kind != Kind.CAST:
            return at + 1
    return entry + 1


def _multiplies(module_type: str) -> bool:
    return any(word in module_type for word in ("Linear", "Conv1D", "Rotary"))


def _adds_bias(module: TapeModule, stream: Stream, *, own_linear: bool) -> bool:
    shapes = [len(stream.params[p].shape) for p in module.params]
    linear = "Linear" in module.type and not own_linear
    return (linear or "Conv1D" in module.type) and sorted(shapes) == [1, 2]


def _cues(events: Iterable[_Event], modules: bool, stretches: Stretches) -> tuple[Cue, ...]:
    buffers = [BUFFER_OF_KIND[Kind(kind)] for kind in range(len(Kind))]
    alloc, free = int(Op.ALLOC), int(Op.FREE)
    cues: list[Cue] = []
    for op, arg, aux, kind, module in events:
        if op == alloc:
            stretches.alloc(arg, aux, buffers[kind], module)
        elif op == free:
            stretches.free(arg)
        elif modules or op not in _HOOKS:
            cues.append(Cue(stretches.close(), op, arg, aux))
    return (*cues, Cue(stretches.close()))
